"""Compiles the Triton kernels of layers and sampling for sm_90; run by test_triton_aot.

Prints one line per variant with its shared memory in bytes, then a summary.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang.srt.distributed import peer_memory, peer_triton
from sglang.srt.forward.adapter_tiles import TILE
from sglang.srt.kv_tiers.ops.slot_sums import triton as slot_sums
from sglang.srt.kv_tiers.ops.unit_rows import triton as unit_rows
from sglang.srt.layers.ops.activation import triton as activation
from sglang.srt.layers.ops.attention.tables.page_indices import page_indices_kernel
from sglang.srt.layers.ops.attention.tables.tree_mask import pack_tree_mask_kernel
from sglang.srt.layers.ops.attention.tables.window_table import BLOCK as WINDOW_BLOCK
from sglang.srt.layers.ops.attention.tables.window_table import window_table_kernel
from sglang.srt.layers.ops.head_linear import triton as head_linear
from sglang.srt.layers.ops.latent_store import triton as latent_store
from sglang.srt.layers.ops.linear.triton_gated import gated_gemm_kernel
from sglang.srt.layers.ops.linear.triton_kernels import (
    FORMATS,
    Product,
    gemm_kernel,
    gemv_kernel,
)
from sglang.srt.layers.ops.linear.triton_quantized import (
    block_product_kernel,
    dequantize_kernel,
    round_rows_kernel,
)
from sglang.srt.layers.ops.linear.triton_table import (
    MAX_GATED_ROWS,
    lookup,
    lookup_quantized,
)
from sglang.srt.layers.ops.lora import triton_kernels as lora
from sglang.srt.layers.ops.lora.table import SHAPES
from sglang.srt.layers.ops.moe import triton_sort as moe_sort
from sglang.srt.layers.ops.moe.triton_kernels import (
    GroupedProduct,
    grouped_kernel,
    sum_kernel,
)
from sglang.srt.layers.ops.moe.triton_table import BLOCK_K
from sglang.srt.layers.ops.moe.triton_table import lookup as moe_lookup
from sglang.srt.layers.ops.moe_routing import triton as moe_routing
from sglang.srt.layers.ops.moe_routing.op import RoutingRule
from sglang.srt.layers.ops.norm import triton as norm
from sglang.srt.layers.ops.norm import triton_ranks
from sglang.srt.layers.ops.rope import triton as rope
from sglang.srt.mem_cache.kv_dtype import KVScales
from sglang.srt.mem_cache.ops.move_kv import triton as move_kv
from sglang.srt.sampling.ops.choose_tokens import triton as choose_tokens
from sglang.srt.sampling.ops.divide_rows import triton as divide_rows
from sglang.srt.sampling.ops.draw import triton as draw
from sglang.srt.sampling.ops.keep_prefix import (
    triton as keep_prefix,
)
from sglang.srt.sampling.ops.keep_prefix import (
    triton_collect,
    triton_guess,
    triton_search,
)
from sglang.srt.sampling.ops.softmax_rows import triton as softmax_rows
from sglang.test.scale import sampled

TARGET = GPUTarget("cuda", 90, 32)
# N and K of the products of Llama-3.1-8B, then of Qwen3-4B and Llama-3.2-1B, and
# whether they end in SiLU * mul.
PRODUCTS = (
    (6144, 4096, False),
    (4096, 4096, False),
    (28672, 4096, True),
    (4096, 14336, False),
    (128256, 4096, False),
    (6144, 2560, False),
    (2560, 4096, False),
    (19456, 2560, True),
    (2560, 9728, False),
    (3072, 2048, False),
    (16384, 2048, True),
    (2048, 8192, False),
)
SCALES: Any = KVScales("fp32", "fp32")  # type: ignore[arg-type]
POINTERS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}


class Variant(NamedTuple):
    name: str
    kernel: Any
    pointers: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int = 3


def pointwise(dtype: str) -> Iterator[Variant]:
    p = POINTERS[dtype]
    for width in (128, 4096):
        options = norm.row_options(width, False)
        warps = int(options.pop("num_warps"))
        constants = {**options, "WIDTH": width, "PDL": True}
        named = {"x": p, "weight": p, "out": p, "residual": p, "eps": "fp32"}
        yield Variant(
            f"rmsnorm {width}",
            norm.rmsnorm_kernel,
            named,
            {**constants, "INNER": 1},
            warps,
        )
        for inner in ({"inner": None}, {}):
            yield Variant(
                f"add+norm {width}",
                norm.fused_add_rmsnorm_kernel,
                named if inner else {**named, "inner": p},
                {**constants, **inner},
                warps,
            )
    for name, width in (("silu", 14336), ("gelu", 2048)):
        yield Variant(
            name,
            activation.gated_kernel,
            {"x": p, "out": p},
            {
                "WIDTH": width,
                "BLOCK": activation.BLOCK,
                "GELU": name == "gelu",
                "PDL": True,
            },
            4,
        )
    for with_norm in (False, True):
        for heads, warps in ((4, 2), (16, 4)):
            yield rope_variant(p, p, heads=heads, warps=warps, with_norm=with_norm)
    yield from stores_of_8_bits()
    for page_size in (1, 64):
        yield Variant(
            f"window table page={page_size}",
            window_table_kernel,
            {
                **dict.fromkeys(("table", "out"), "*i32"),
                **dict.fromkeys(("row_index", "prefix_lens", "read_lens"), "*i64"),
                **dict.fromkeys(("mapping", "first_position"), "*i64"),
                **dict.fromkeys(("out_prefix_lens", "out_read_lens"), "*i64"),
            },
            {"PAGE": page_size, "BLOCK": WINDOW_BLOCK},
            4,
        )
    for q_heads in (16, 128):
        yield latent_store_variant(p, p, q_heads=q_heads)
    for moves in (1, 64, move_kv.MAX_MOVES):
        rows, channels = move_kv.tile_shape(moves, 1024)
        yield Variant(
            f"move {moves}",
            move_kv.move_kv_kernel,
            {"k": p, "v": p, "dst": "*i64", "src": "*i64"},
            {"WIDTH": 1024, "MOVES": rows, "CHANNELS": channels},
            move_kv.warps_for(rows * channels),
        )
    for greedy in (True, False):
        yield Variant(
            f"choose greedy={greedy}",
            choose_tokens.choose_kernel,
            {
                "logits": p,
                **dict.fromkeys(("temperatures", "maxima", "sums"), "*fp32"),
                **dict.fromkeys(("seeds", "positions", "out", "best_keys"), "*i64"),
                "greedy_rows": "*u8",
                "counters": "*i32",
            },
            {
                "SPLITS": 32,
                "SPLITS_BLOCK": 32,
                "BLOCK": 4096,
                "ALL_GREEDY": greedy,
                "HAS_TEMPERATURE": not greedy,
                "PDL": True,
            },
            8,
        )


def rope_variant(
    p: str, cache: str, *, heads: int, warps: int, with_norm: bool, most: int = 0
) -> Variant:
    """The kernel that rotates values of type `p` and stores them in `cache`."""
    return Variant(
        f"rope {cache} norm={with_norm} heads={heads}",
        rope.rope_store_kv_kernel,
        {
            **dict.fromkeys(("q", "k", "v"), p),
            **dict.fromkeys(("k_cache", "v_cache"), cache),
            **dict.fromkeys(("q_norm_weight", "k_norm_weight"), p),
            **dict.fromkeys(("positions", "out_cache_loc"), "*i64"),
            "cos_sin_cache": "*fp32",
            "eps": "fp32",
            "scales": SCALES,
        },
        {
            "HEADS": rope.Heads(
                q_heads=32,
                kv_heads=8,
                dim=128,
                dim_block=128,
                half=64,
                half_block=64,
                rest_block=1,
                block=heads,
                has_q_norm=with_norm,
                has_k_norm=with_norm,
                most=most,
            ),
            "UPDATE_K": heads == 16,
            "PDL": True,
        },
        warps,
    )


def latent_store_variant(p: str, cache: str, *, q_heads: int, most: int = 0) -> Variant:
    return Variant(
        f"latent store {cache} {q_heads}",
        latent_store.latent_store_kernel,
        {
            **dict.fromkeys(("q", "k", "norm_weight"), p),
            "k_cache": cache,
            **dict.fromkeys(("positions", "out_cache_loc"), "*i64"),
            "cos_sin_cache": "*fp32",
            **dict.fromkeys(("eps", "scale"), "fp32"),
        },
        {
            "LATENT": latent_store.latent_sizes(q_heads, 192, 576, 64),
            "MOST": most,
            "PDL": True,
        },
        4,
    )


def stores_of_8_bits() -> Iterator[Variant]:
    p = POINTERS["bf16"]
    for cache, most in (("*fp8e4nv", 448), ("*fp8e5", 57344)):
        yield rope_variant(p, cache, heads=4, warps=2, with_norm=True, most=most)
        yield latent_store_variant(p, cache, q_heads=16, most=most)


def filters() -> Iterator[Variant]:
    floats = dict.fromkeys(("probs", "top_ps", "min_ps"), "*fp32")
    words = dict.fromkeys(("bounds", "candidates", "cuts"), "*i32")
    longs = dict.fromkeys(("rows", "top_ks", "counted"), "*i64")
    types = {**floats, **words, **longs}
    splits = {"SPLITS": 3, "SPLITS_BLOCK": 4}
    for ids, has_min_p in itertools.product((512, 8192), (True, False)):
        block = min(ids, 4096)
        sizes = {"BLOCK": block, "SAMPLE": 4096, "FEW": 512, "CANDIDATES": ids}
        for kernel, warps in (
            (triton_guess.guess_kernel, 4),
            (triton_collect.collect_kernel, 8 if block >= 4096 else 4),
            (triton_search.search_kernel, 16),
            (keep_prefix.zero_kernel, 4),
        ):
            known = {**splits, **sizes, "HAS_MIN_P": has_min_p, "PDL": True}
            known |= {} if has_min_p else {"rows": None}
            yield Variant(
                f"{kernel.__name__} {ids} min_p={has_min_p}",
                kernel,
                {name: t for name, t in types.items() if name in kernel.arg_names},
                {name: x for name, x in known.items() if name in kernel.arg_names},
                warps,
            )


def filtered_draws() -> Iterator[Variant]:
    for block, rows in ((512, {}), (4096, {}), (4096, {"rows": None})):
        yield Variant(
            f"draw {block} {rows}",
            draw.draw_kernel,
            {
                "probs": "*fp32",
                "cuts": "*i32",
                **dict.fromkeys(("rows", "seeds", "positions", "out"), "*i64"),
                "sums": "*fp64",
                "counters": "*i32",
            },
            {"SPLITS": 3, "SPLITS_BLOCK": 4, "BLOCK": block, "PDL": True, **rows},
            8 if block >= 4096 else 4,
        )
    for dtype in ("fp32", "bf16"):
        yield Variant(
            f"divide {dtype}",
            divide_rows.divide_kernel,
            {"logits": f"*{dtype}", "temperatures": "*fp32", "out": "*fp32"},
            {"BLOCK": 4096, "PDL": True},
            4,
        )


def softmaxes() -> Iterator[Variant]:
    floats = dict.fromkeys(("maxima", "sums", "totals", "probs"), "*fp32")
    types = {**floats, "temperatures": "*fp32", "counters": "*i32"}
    known = {"SPLITS": 3, "SPLITS_BLOCK": 4, "SHARE": 128, "EXACT": True, "PDL": True}
    for dtype, (kernel, warps) in itertools.product(
        ("fp32", "bf16"),
        (
            (softmax_rows.max_kernel, 4),
            (softmax_rows.sum_kernel, 4),
            (softmax_rows.softmax_kernel, 8),
        ),
    ):
        given = {**types, "logits": f"*{dtype}", "rows": "*i64"}
        sizes = {**known, "BLOCK": 4096}
        sizes |= {} if dtype == "bf16" else {"rows": None}
        yield Variant(
            f"{kernel.__name__} {dtype}",
            kernel,
            {name: t for name, t in given.items() if name in kernel.arg_names},
            {name: x for name, x in sizes.items() if name in kernel.arg_names},
            warps,
        )


def rank_sums() -> Iterator[Variant]:
    sent: dict[str, Any] = {
        "SIZES": peer_triton.PeerSizes(
            rank=1,
            world=2,
            region=peer_memory.REGION_BYTES // 2,
            width=4096,
            block=4096,
        ),
        "PDL": True,
    }
    words = dict.fromkeys(("addresses", "counts"), "*i64")
    yield Variant(
        "sum over ranks", peer_triton.sum_rows_kernel, {"x": "*bf16", **words}, sent, 8
    )
    for norms in (("weight",), ("weight", "inner")):
        pointers = dict.fromkeys(("x", "residual", *norms), "*bf16")
        yield Variant(
            f"sum over ranks, {norms}",
            triton_ranks.sum_add_rmsnorm_kernel,
            {**pointers, "eps": "fp32", **words},
            sent if "inner" in norms else {**sent, "inner": None},
            8,
        )


def products() -> Iterator[Variant]:
    p = POINTERS["bf16"]
    pointers = {
        **dict.fromkeys(("x", "weight", "bias", "residual", "out"), p),
        **dict.fromkeys(("scales", "partial"), "*fp32"),
        "zeros": "*fp32",
        "counters": "*i32",
    }
    for (n, k, gated), rows in itertools.product(PRODUCTS, (1, 16, 32, 64)):
        config = lookup(rows=rows, n=n, k=k, gated=gated)
        if config is None:
            continue
        is_vector = config.split_k == 0
        product = Product(
            k=k,
            block_m=1 if is_vector else max(16, triton.next_power_of_2(rows)),
            block_n=config.block_n,
            block_k=config.block_k,
            gated=gated,
            gelu=gated and is_vector,
            has_bias=False,
            has_residual=not gated,
        )
        constants = {"PRODUCT": product, "PDL": config.dependent}
        name = f"gemm rows={rows} n={n} k={k} gated={gated} split={config.split_k}"
        if is_vector:
            yield Variant(name, gemv_kernel, pointers, constants, config.warps)
            continue
        constants |= {
            "SPLIT_K": config.split_k,
            "STAGES": config.stages,
            "PREFETCH": config.prefetch,
        }
        yield Variant(name, gemm_kernel, pointers, constants, config.warps)


CODES = {"e4m3": "*fp8e4nv", "e4m3_bits": "*u8", "int4": "*u8", "mxfp4": "*u8"}
FOUR_BITS = ("int4", "mxfp4")


def stored_types(form: str) -> dict[str, str]:
    """Types of a weight, its scales and zeros."""
    scales = "*u8" if form == "mxfp4" else "*fp32"
    return {"weight": CODES[form], "scales": scales, "zeros": "*i8"}


def quantized_products() -> Iterator[Variant]:
    p = POINTERS["bf16"]
    pointers = {
        **dict.fromkeys(("x", "bias", "residual", "out"), p),
        **dict.fromkeys(("scales", "partial"), "*fp32"),
        "counters": "*i32",
    }
    shapes = ((6144, 4096, False), (28672, 4096, True), (4096, 14336, False))
    products = itertools.product(shapes, (1, 16, 64), (0, 128), CODES)
    # Steps of fewer columns than a cache line has.
    narrow = itertools.product(shapes[:1], (16,), (32,), CODES)
    for (n, k, gated), rows, group, form in (*products, *narrow):
        packed = form in FOUR_BITS
        config = lookup_quantized(rows=rows, n=n, k=k, group=group, packed=packed)
        if config is None:
            continue
        is_vector = config.split_k == 0
        product = Product(
            k=k,
            block_m=1 if is_vector else max(16, triton.next_power_of_2(rows)),
            block_n=config.block_n,
            block_k=config.block_k,
            gated=gated,
            gelu=False,
            has_bias=False,
            has_residual=not gated,
            format=FORMATS[form],
            group_rows=128 if group and not packed else 1,
            group_columns=group or k,
            groups=k // group if group else 1,
            has_zeros=form == "int4",
            run=16 if packed else 1,
        )
        constants = {"PRODUCT": product, "PDL": config.dependent}
        args = pointers | stored_types(form)
        name = f"quantised gemm rows={rows} n={n} k={k} group={group} {form}"
        if is_vector:
            yield Variant(name, gemv_kernel, args, constants, config.warps)
            continue
        constants |= {
            "SPLIT_K": config.split_k,
            "STAGES": config.stages,
            "PREFETCH": config.prefetch,
        }
        yield Variant(name, gemm_kernel, args, constants, config.warps)


def many_quantized() -> Iterator[Variant]:
    p, scales = POINTERS["bf16"], {"scales": "*fp32"}
    for group in (128, 4096):
        args = {"rows": p, "codes": "*fp8e4nv", **scales}
        constants = {"K": 4096, "GROUP": group, "BLOCK": group}
        constants |= {"MOST": 448.0, "PDL": True}
        yield Variant(f"round rows {group}", round_rows_kernel, args, constants, 4)
    for form in CODES:
        product = Product(
            k=4096,
            block_m=1,
            block_n=1,
            block_k=2048,
            gated=False,
            gelu=False,
            has_bias=False,
            has_residual=False,
            format=FORMATS[form],
            group_columns=128,
            groups=32,
            has_zeros=form == "int4",
            run=16 if form in FOUR_BITS else 1,
        )
        args = {"plain": p, **stored_types(form)}
        args["codes"] = args.pop("weight")
        constants = {"PRODUCT": product, "PDL": True}
        yield Variant(f"dequantise {form}", dequantize_kernel, args, constants, 4)
    pointers = {**dict.fromkeys(("x", "weight"), "*fp8e4nv"), "bias": p, "out": p}
    pointers |= dict.fromkeys(("x_scales", "weight_scales"), "*fp32")
    for bias in (False, True):
        constants = {"K": 7168, "BLOCK": 128, "TILE_M": 128, "TILE_N": 64}
        constants |= {"HAS_BIAS": bias, "PDL": True}
        yield Variant(
            f"block product bias={bias}",
            block_product_kernel,
            pointers,
            constants,
            4,
            stages=4,
        )


def tall_products() -> Iterator[Variant]:
    for n, k in ((28672, 4096), (16384, 2048)):
        config = lookup(rows=MAX_GATED_ROWS, n=n, k=k, gated=True)
        assert config is not None and config.is_tall
        dtype = "bf16" if k == 4096 else "fp16"
        tile = f"tensordesc<{dtype}[%d, {config.block_k}]>"
        yield Variant(
            f"gated gemm {dtype} n={n} k={k}",
            gated_gemm_kernel,
            {
                **dict.fromkeys(("weight", "out"), POINTERS[dtype]),
                "x_tiles": tile % MAX_GATED_ROWS,
                "weight_tiles": tile % config.block_n,
            },
            {
                "K": k,
                "BLOCK_M": MAX_GATED_ROWS,
                "BLOCK_N": config.block_n,
                "BLOCK_K": config.block_k,
                "STAGES": config.stages,
                "PREFETCH": config.prefetch,
                "GELU": dtype == "fp16",
                "PDL": config.dependent,
            },
            config.warps,
        )


def gathers() -> Iterator[Variant]:
    int32 = dict.fromkeys(("page_table", "indptr", "out"), "*i32")
    for page_size in (1, 16):
        yield Variant(
            f"page indices {page_size}",
            page_indices_kernel,
            {**int32, "row_index": "*i64"},
            {"PAGE_SIZE": page_size, "BLOCK": 1024},
            4,
        )
    mask = {"tree_mask": "*u8", "prefix_lens": "*i64", "indptr": "*i32", "out": "*u8"}
    constants = {"NODES": 64, "BLOCK": 256}
    yield Variant("tree mask", pack_tree_mask_kernel, mask, constants, 4)


def unit_moves() -> Iterator[Variant]:
    """Of slots with 8 KV heads of 128 channels in bfloat16, and of their scales."""
    numbers = {"slots": "*i64", "sums": "*i64", "numbers": "*i64"}
    for words, block in (("*i64", 256), ("*u8", 8)):
        pointers = {**numbers, "words": words, "rows": words}
        for kernel in (
            slot_sums.sum_kernel,
            unit_rows.gather_kernel,
            unit_rows.scatter_kernel,
        ):
            yield Variant(
                f"{kernel.__name__} {block}", kernel, pointers, {"BLOCK": block}, 4
            )


# Experts, hidden size, inner size and experts per token of Qwen3-30B-A3B, gpt-oss-20b.
EXPERTS = ((128, 2048, 768, 8), (32, 2880, 2880, 4))


def routings() -> Iterator[Variant]:
    rules = (
        (128, RoutingRule(top_k=8, renormalise=True)),
        (
            256,
            RoutingRule(
                top_k=8,
                is_sigmoid=True,
                renormalise=True,
                groups=8,
                top_groups=4,
                group_best=2,
            ),
        ),
    )
    for experts, rule in rules:
        fp32 = dict.fromkeys(("logits", "weights"), "*fp32")
        constants = {"RULE": moe_routing.kernel_rule(rule, experts), "PDL": True}
        if rule.is_sigmoid:
            fp32 |= {"correction": "*fp32"}
        else:
            constants |= {"correction": None}
        args = {**fp32, "ids": "*i32", "scale": "fp32"}
        yield Variant(f"route {experts}", moe_routing.route_kernel, args, constants, 4)
        args = args | {"x": "*bf16", "weight": "*bf16", "bias": "*fp32"}
        args["counter"] = "*i32"
        constants = constants | {"HIDDEN": 2880, "BLOCK_K": moe_routing.CHOICE_BLOCK}
        yield Variant(
            f"choose {experts}", moe_routing.choose_kernel, args, constants, 1
        )
    lists = dict.fromkeys(("ids", "counts", "rows", "block_experts"), "*i32")
    for experts_block, chunk in ((32, moe_sort.CHUNKS[0]), (256, moe_sort.CHUNKS[1])):
        constants = {"EXPERTS_BLOCK": experts_block, "CHUNK": chunk, "PDL": True}
        yield Variant("count", moe_sort.count_kernel, lists, constants, 4)
        constants = constants | {"BLOCK_M": 16, "TILE": moe_sort.TILE}
        for counts in ({}, {"counts": None}):
            placing = constants | counts
            yield Variant("place", moe_sort.place_kernel, lists, placing, 4)


def experts() -> Iterator[Variant]:
    p = POINTERS["bf16"]
    pointers = {
        **dict.fromkeys(("x", "weight", "bias", "out", "products"), p),
        **dict.fromkeys(("rows", "block_experts"), "*i32"),
        **dict.fromkeys(("scales", "weight_scales"), "*fp32"),
        "weight_zeros": "*i8",
        **dict.fromkeys(("alpha", "limit"), "fp32"),
    }
    for (count, hidden, inner, top_k), tokens, gated, form in itertools.product(
        EXPERTS, (1, 64, 512, 2048), (True, False), ("plain", "e4m3", *FOUR_BITS)
    ):
        outputs = inner if gated else hidden
        config = moe_lookup(
            assignments=tokens * top_k,
            experts=count,
            outputs=outputs,
            gated=gated,
            itemsize=2,
        )
        product = GroupedProduct(
            k=hidden if gated else inner,
            outputs=outputs,
            block_m=config.block_m,
            block_n=config.block_n,
            block_k=BLOCK_K,
            experts=count,
            top_k=top_k if gated else 1,
            gated=gated,
            clamped=count == 32,
            has_bias=count == 32,
            direct=tokens == 1,
            addends=top_k if tokens == 1 and not gated else 0,
            format=FORMATS[form],
            group_rows=128 if form == "e4m3" else 1,
            group_columns=128 if form != "plain" else 1,
            groups=hidden // 128 if form != "plain" else 1,
            has_zeros=form == "int4",
        )
        constants = {"PRODUCT": product, "STAGES": config.stages, "PDL": True}
        sums = {"sums": "*bf16", "counters": "*i32"}
        if not product.addends:
            constants |= dict.fromkeys(sums)
            sums = {}
        name = f"experts {count} tokens={tokens} gated={gated} {form} {config}"
        args = {**pointers, **sums}
        if form != "plain":
            stored = stored_types(form)
            args["weight"] = stored["weight"]
            args["weight_scales"] = stored["scales"]
        yield Variant(name, grouped_kernel, args, constants, config.warps)
    constants = {"WIDTH": 2880, "TOP_K": 4, "BLOCK": 1024, "PDL": True}
    yield Variant("sum of experts", sum_kernel, pointers, constants, 4)


def head_products() -> Iterator[Variant]:
    """Queries to latents of 512 channels, and these to values, of 128."""
    pointers = dict.fromkeys(("x", "weight", "out"), "*bf16")
    for n, k, strides in ((512, 128, (1, 512)), (128, 512, (512, 1))):
        constants = {"N": n, "K": k, "N_STRIDE": strides[0], "K_STRIDE": strides[1]}
        constants |= {"BLOCK_N": head_linear.TILE // k, "BLOCK_K": k, "PDL": True}
        kernel = head_linear.head_gemv_kernel
        yield Variant(f"heads {n} x {k}", kernel, pointers, constants, 4)


def _kind(variant: Variant) -> tuple[Any, int]:
    """The kernel, and the format of its weight or of what it stores."""
    product = variant.constants.get("PRODUCT")
    heads = variant.constants.get("HEADS")
    stored = int(variant.constants.get("MOST", getattr(heads, "most", 0)))
    return variant.kernel, getattr(product, "format", stored)


def compile_variant(variant: Variant) -> Any:
    names = variant.kernel.arg_names
    signature: dict[str, Any] = {}
    attributes = {}
    for position, name in enumerate(names):
        if name in variant.constants:
            signature[name] = "constexpr"
        else:
            kind = signature[name] = variant.pointers.get(name, "i32")
            is_pointer = isinstance(kind, str) and kind.startswith("*")
            if is_pointer or "stride" in name:
                attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        variant.kernel, signature, constexprs=variant.constants, attrs=attributes
    )
    options = {"num_warps": variant.warps, "launch_pdl": True}
    options["num_stages"] = variant.stages
    return triton.compile(source, target=TARGET, options=options)


def adapters(dtype: str) -> Iterator[Variant]:
    """Of Llama-3.1-8B: q, k and v; gate and up; down."""
    p = POINTERS[dtype]
    pointers = {"ranks": "*i32", "words": "*i32", "inner": "*fp32"}
    for shape, rank in itertools.product(SHAPES, (16, 64)):
        common = {"RANK": rank, "TILE_ROWS": TILE, "PDL": True}
        for k, sizes in (
            (4096, (4096, 1024, 1024)),
            (4096, (14336, 14336, 0)),
            (14336, (4096, 0, 0)),
        ):
            shards = 3 - sizes.count(0)
            sums = {"K": k, "K_BLOCK": shape.block_k, "SLICE_K": shape.slice_k}
            yield Variant(
                f"lora shrink {k} {shards}",
                lora.shrink_kernel,
                {"x": p, "a": p, **pointers},
                {**common, **sums, "SHARDS": shards},
                shape.shrink_warps,
            )
            n = dict(zip(("N0", "N1", "N2"), sizes, strict=True))
            n |= {"WIDTH": shards * rank, "N_BLOCK": shape.block_n}
            for inner, parts in (
                (p, {"SPLIT": 1, "JOINED": True}),
                ("*fp32", {"SPLIT": triton.cdiv(k, shape.slice_k), "JOINED": False}),
            ):
                ends = {"y": p, "out": p, "b": p, **pointers, "inner": inner}
                yield Variant(
                    f"lora expand {sizes}",
                    lora.expand_kernel,
                    ends,
                    {**common, **n, **parts},
                    shape.expand_warps,
                )
                if sizes[0] != sizes[1]:
                    continue
                gated = {"OUTPUTS": sizes[0], "N_BLOCK": shape.block_n // 2}
                yield Variant(
                    "lora expand gated",
                    lora.expand_gated_kernel,
                    ends,
                    {**common, **gated, **parts, "GELU": False},
                    shape.expand_warps,
                )


def main() -> None:
    variants = [v for dtype in POINTERS for v in pointwise(dtype)]
    variants += [
        *filters(),
        *filtered_draws(),
        *softmaxes(),
        *rank_sums(),
        *products(),
        *tall_products(),
        *quantized_products(),
        *many_quantized(),
        *gathers(),
        *unit_moves(),
    ]
    variants += [*routings(), *experts(), *head_products()]
    variants += [*adapters("bf16"), *adapters("fp32")]
    variants = sampled(variants, key=_kind, ci=1)
    for variant in variants:
        compiled = compile_variant(variant)
        if variant.constants.get("PDL"):
            assert "griddepcontrol.wait" in compiled.asm["ptx"], variant.name
        if variant.kernel in (gemm_kernel, gated_gemm_kernel, grouped_kernel):
            ptx = compiled.asm["ptx"]
            assert "wgmma" in ptx or "mma.sync" in ptx, variant.name
            # Of the experts all, so that tiles of all heights sum alike.
            assert variant.kernel is not grouped_kernel or "wgmma" in ptx, variant.name
            assert compiled.metadata.shared <= 227 * 1024, variant.name
        if variant.kernel in (gemm_kernel, block_product_kernel):
            # A value carried over two steps would stop all of them.
            assert "cp.async" in compiled.asm["ptx"], variant.name
        print(variant.name, "shared", compiled.metadata.shared)
    print(f"compiled {len(variants)} variants for sm_90")


if __name__ == "__main__":
    main()
