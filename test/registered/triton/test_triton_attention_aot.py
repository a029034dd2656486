"""The attention kernels compile ahead of time for the H200, in the shipped variants.

The interpreter replaces `triton.jit` in its process, so the compiler runs in another:
this file, run as `python test_triton_attention_aot.py --compile`, prints one JSON list.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from kv_canary.kernels.triton.args import State
from kv_canary.state import ARENA_PARTS
from sglang.srt.layers.ops.attention.decode.kernels import (
    decode_combine_kernel,
    decode_split_kernel,
)
from sglang.srt.layers.ops.attention.decode.launch import combine_launch, decode_launch
from sglang.srt.layers.ops.attention.decode_hopper.kernels import decode_hopper_kernel
from sglang.srt.layers.ops.attention.decode_hopper.launch import (
    TILES as DECODE_HOPPER_TILES,
)
from sglang.srt.layers.ops.attention.decode_hopper.launch import (
    StoredHead,
    decode_hopper_launch,
)
from sglang.srt.layers.ops.attention.extend.kernels import extend_kernel
from sglang.srt.layers.ops.attention.extend.table import (
    FLOAT_TILES,
    HALF_TILES,
    ExtendTile,
    LaunchShape,
    choose_tile,
    extend_launch,
)
from sglang.srt.layers.ops.attention.extend_dense.kernels import extend_dense_kernel
from sglang.srt.layers.ops.attention.extend_dense.launch import dense_launch
from sglang.srt.layers.ops.attention.extend_split.kernels import (
    extend_combine_kernel,
    extend_split_kernel,
)
from sglang.srt.layers.ops.attention.extend_split.launch import split_combine_launch
from sglang.srt.layers.ops.attention.latent.kernels import latent_kernel
from sglang.srt.layers.ops.attention.latent.launch import latent_launch
from sglang.srt.layers.ops.attention.latent_expanded.kernels import (
    latent_expanded_kernel,
)
from sglang.srt.layers.ops.attention.latent_expanded.table import (
    choose_expanded_tile,
    expanded_launch,
    expanded_shape,
)
from sglang.srt.layers.ops.attention.shared.args import (
    ByteCheck,
    Compares,
    Lens,
    NewKV,
    PageArgs,
    Partials,
    Pool,
    Scale,
    TokenArgs,
    padded_head,
)
from sglang.srt.layers.ops.attention.shared.launch import KernelLaunch
from sglang.test.ahead_of_time import compile_in_a_process
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count, sampled

register_cpu_ci(est_time=24, suite="cpu", full_time=1500)

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY_LIMIT = 232448
TYPES = {2: "*bf16", 4: "*fp32"}
EXTEND_KERNELS = (
    extend_kernel,
    extend_split_kernel,
    extend_dense_kernel,
    latent_kernel,
    latent_expanded_kernel,
)
DESCRIPTOR_KERNELS = (extend_dense_kernel, latent_expanded_kernel)
# A number that is a multiple of 16, as strides mostly are.
ALIGNED = "i32:16"


class Variant(NamedTuple):
    """A kernel as one launch compiles it; `itemsize` is of q, K, V and the result.
    `kv` is the type of stored K and V, if it has 8 bits."""

    kernel: Any
    launch: KernelLaunch
    itemsize: int
    has_window: bool = False
    has_tree: bool = False
    has_sinks: bool = False
    has_cap: bool = False
    is_decode: bool = False
    kv: str | None = None


def arguments(variant: Variant) -> dict[str, Any]:
    """Types of the parameters, in the tuples of `args`; numbers that are not listed are
    lengths: i32. A stride of one and None are constants to the compiler."""
    element = TYPES[variant.itemsize]
    stored = variant.kv or element
    tokens = TokenArgs(element, ALIGNED)
    partials = Partials("*fp32", "*fp32")
    tile = variant.launch.constants.get("TILE")
    shape = variant.launch.constants.get("SHAPE")
    found = {
        "q": tokens,
        "out": tokens,
        "pool": Pool(stored, stored, *[ALIGNED] * 4),
        "pages": PageArgs("*i32", "i32", 1, "*i64"),
        "lens": Lens(None if variant.is_decode else "*i64", "*i64"),
        "cache": stored,
        "slot_stride": ALIGNED,
        "new_kv": NewKV(element, element, ALIGNED, ALIGNED),
        "partials": partials,
        "counters": "*i32",
        "read_lens": "*i64",
        "qo_indptr": None if variant.is_decode else "*i64",
        "tree_mask": "*u8" if variant.has_tree else None,
        "positions": "*i64" if variant.has_tree and variant.has_window else None,
        "window": "i32" if variant.has_window else None,
        "sinks": element if variant.has_sinks else None,
        "scale": Scale("fp32", "fp32" if variant.has_cap else None),
        "check": None,
        "layer": None,
    }
    if variant.launch.constants.get("COMPARES"):
        found |= {"check": check_types(variant.has_window), "layer": "i32"}
    if variant.kernel is latent_kernel:
        found["scale"] = "fp32"
    if variant.kernel is extend_dense_kernel:
        descriptor = f"tensordesc<{element[1:]}{[tile.block_n, shape.block_d]}>"
        found |= {"k_tiles": descriptor, "v_tiles": descriptor}
    if variant.kernel is latent_expanded_kernel:
        found["running"] = partials if has_running(variant.launch) else None
        found["indptr"] = None if variant.launch.constants["CAUSAL"] else "*i64"
        for name in ("nope", "rope", "value"):
            size = [tile.block_n, getattr(shape, f"block_{name}")]
            found[f"{name}_tiles"] = f"tensordesc<{element[1:]}{size}>"
    return found


def check_types(has_window: bool) -> ByteCheck:
    """Of `ByteCheck`, in the types of its tensors."""
    parts = [f"*i{8 * part.dtype.itemsize}" for part in ARENA_PARTS.values()]
    return ByteCheck(
        state=State(*parts, "i32", ALIGNED),
        sums="*i32",
        slot_stride=ALIGNED,
        layers=ALIGNED,
        req_rows="*i64",
        serials="*i64",
        prefix_lens="*i64",
        first_position="*i64" if has_window else None,
        tag="i32",
    )


def has_running(launch: KernelLaunch) -> bool:
    """Whether an expanded launch reads or writes results of prefixes."""
    return launch.constants["HAS_PAST"] or not launch.constants["CAUSAL"]


class Signature:
    """Types as the compiler takes them, with what it knows of numbers and pointers."""

    def __init__(self) -> None:
        self.constants: dict[tuple[int, ...], Any] = {}
        self.attributes: dict[tuple[int, ...], list[list[object]]] = {}

    def type_of(self, value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            parts = (self.type_of(part, (*path, i)) for i, part in enumerate(value))
            return type(value)(*parts)
        if not isinstance(value, str):
            return self.constant(value, path)
        kind, _, is_aligned = value.partition(":")
        if is_aligned or kind.startswith("*"):
            self.attributes[path] = [["tt.divisibility", 16]]
        return kind

    def constant(self, value: Any, path: tuple[int, ...]) -> str:
        self.constants[path] = value
        return "constexpr"


def compile_kernel(variant: Variant) -> dict[str, Any]:
    """Compile one variant; what it takes of a multiprocessor."""
    kernel, launch = variant.kernel, variant.launch
    options = {k: v for k, v in launch.options().items() if k not in launch.constants}
    types, given = Signature(), arguments(variant)
    signature = {
        name: types.constant(launch.constants[name], (position,))
        if name in launch.constants
        else types.type_of(given.get(name, "i32"), (position,))
        for position, name in enumerate(kernel.arg_names)
    }
    source = GluonASTSource if kernel is decode_hopper_kernel else ASTSource
    compiled = triton.compile(
        source(kernel, signature, types.constants, types.attributes),
        target=HOPPER,
        options=options,
    )
    ptx = compiled.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "itemsize": variant.itemsize,
        "warps": launch.num_warps,
        "stages": launch.num_stages,
        "constants": str(launch.constants),
        "has_copies": kernel in DESCRIPTOR_KERNELS,
        "queries": launch.constants["TILE"].block_m if kernel in EXTEND_KERNELS else 0,
        "shared": compiled.metadata.shared,
        **resources(compiled.asm["cubin"]),
        "copies": ptx.count("cp.async.bulk.tensor"),
        "waits": ptx.count("griddepcontrol.wait"),
        "wgmma": ptx.count("wgmma.mma_async"),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes of a program, where Triton carries a cuobjdump."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True).stdout
    pairs = (word.split(":") for word in text.split() if word.count(":") == 1)
    values = {key: value for key, value in pairs if value.isdigit()}
    return {key: int(values[key]) for key in ("REG", "STACK") if key in values}


def variants() -> list[Variant]:
    """The launches that models bring along."""
    shapes = [(32, 8, 128, 2), (8, 2, 64, 2), (4, 2, 256, 2), (8, 2, 64, 4)]
    shapes += [(32, 32, 96, 2), (16, 8, 128, 2), (32, 8, 128, 4), (4, 2, 256, 4)]
    shapes += [(32, 8, 80, 2), (16, 16, 192, 2)]
    found: list[Variant] = []
    for q_heads, kv_heads, head_dim, itemsize in shapes[: count(ci=2, full=10)]:
        heads = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        for page_size, has_window in ((1, False), (16, True)):
            found += paged_variants(heads, itemsize, page_size, has_window)
        for splits in (2, 6, 64):
            combine = split_combine_launch(
                q_heads=q_heads, head_dim=head_dim, splits=splits
            )
            found.append(Variant(extend_combine_kernel, combine, itemsize))
    plain = sampled(found, key=lambda v: (v.kernel.__name__, v.itemsize), ci=1)
    latent = sampled(latent_variants(), key=lambda v: v.kernel.__name__, ci=1)
    expanded = sampled(expanded_variants(), key=lambda v: v.kernel, ci=2)
    return plain + special_variants() + latent + expanded + stored_variants()


def stored_variants() -> list[Variant]:
    """The launches that read KV of 8 bits."""
    # Narrow heads compile in half the time.
    heads = {"q_heads": 32, "kv_heads": 8, "head_dim": count(ci=64, full=128)}
    kernels = (decode_split_kernel, extend_kernel, extend_split_kernel)
    found = [
        v._replace(kv=kv)
        for kv in ("*fp8e4nv", "*fp8e5")
        for v in (*paged_variants(heads, 2, 1, has_window=False), *latent_variants())
        if (v.kernel in kernels and not v.launch.constants.get("COMPARES"))
        or (v.kernel is latent_kernel and v.itemsize == 2)
    ]
    return sampled(found, key=lambda v: v.kernel.__name__, ci=1)


def special_variants() -> list[Variant]:
    """The launches of models with capped scores (Gemma 2: heads of 256 channels, the
    widest), with sinks (gpt-oss), and with windows over trees."""
    wide = {"q_heads": 8, "kv_heads": 4, "head_dim": 256}
    many = {"q_heads": 64, "kv_heads": 8, "head_dim": 64}
    capped = paged_variants(wide, 2, page_size=1, has_window=True)
    found = [v._replace(has_cap=True) for v in capped]
    sunk = paged_variants(many, 2, page_size=16, has_window=True)
    found += [v._replace(has_sinks=True) for v in sunk]
    with_trees = (extend_kernel, extend_split_kernel)
    trees = [v._replace(has_tree=True) for v in found if v.kernel in with_trees]
    # CI compiles the first of a kernel; the widest of this one takes ten seconds.
    trees.sort(key=lambda v: v.kernel is extend_kernel and v.has_cap)
    return sampled(trees + found, key=lambda v: v.kernel.__name__, ci=1)


def latent_variants() -> list[Variant]:
    """Latents of DeepSeek: all heads of V3, those of one rank of eight, float32."""
    found = []
    for q_heads, itemsize, page_size in ((128, 2, 64), (16, 2, 1), (16, 4, 1)):
        for is_decode in (True, False):
            launch = latent_launch(
                q_heads=q_heads,
                rank=512,
                rope=64,
                page_size=page_size,
                rows=8,
                itemsize=itemsize,
                is_decode=is_decode,
            )
            has_tree = not is_decode and page_size == 1
            variant = Variant(latent_kernel, launch, itemsize, has_tree=has_tree)
            found.append(variant._replace(is_decode=is_decode))
    combine = split_combine_launch(q_heads=16, head_dim=512, splits=64)
    return [*found, Variant(extend_combine_kernel, combine, 2, is_decode=True)]


def expanded_variants() -> list[Variant]:
    """Prompts, blocks of prefixes and what follows them: of DeepSeek, of the widest
    channels, in float32."""
    found = []
    deepseek = {"nope": 128, "rope": 64, "value": 128}
    wide = {"nope": 256, "rope": 64, "value": 256}
    for sizes, itemsize in ((deepseek, 2), (wide, 2), (deepseek, 4)):
        shape = expanded_shape(q_heads=16, rank=512, **sizes)
        tile = choose_expanded_tile(shape, itemsize)
        for rows, is_causal, has_past in (
            (1, True, False),
            (8, False, True),
            (1, False, False),
            (8, True, True),
        ):
            launch = expanded_launch(
                shape,
                tile,
                rows=rows,
                is_causal=is_causal,
                has_past=has_past,
                pdl=True,
            )
            found.append(Variant(latent_expanded_kernel, launch, itemsize))
    return found


def paged_variants(
    heads: dict[str, int], itemsize: int, page_size: int, has_window: bool
) -> Iterator[Variant]:
    head_dim = heads["head_dim"]
    split = decode_launch(splits=8, itemsize=itemsize, page_size=page_size, **heads)
    yield Variant(decode_split_kernel, split, itemsize, has_window)
    for compares in (Compares.ALWAYS, Compares.IN_TURN):
        compared = decode_launch(
            splits=8, itemsize=itemsize, page_size=page_size, compares=compares, **heads
        )
        yield Variant(decode_split_kernel, compared, itemsize, has_window)
    if StoredHead(head_dim, itemsize) in DECODE_HOPPER_TILES[Compares.NEVER]:
        for compares in Compares:
            hopper = decode_hopper_launch(
                rows=8,
                splits=8,
                itemsize=itemsize,
                page_size=page_size,
                compares=compares,
                **heads,
            )
            yield Variant(decode_hopper_kernel, hopper, itemsize, has_window)
    combine = combine_launch(split)
    yield Variant(decode_combine_kernel, combine, itemsize, has_window)
    for tokens, rows, has_tree in (
        (8192, 1, False),
        (512, 2, False),
        (64, 8, not has_window),
    ):
        shape = LaunchShape(tokens=tokens, rows=rows, **heads)
        tile = choose_tile(shape, itemsize=itemsize)
        extend = extend_launch(tile, shape, page_size=page_size)
        yield Variant(extend_kernel, extend, itemsize, has_window, has_tree)
    for tile in split_tiles(head_dim, itemsize):
        shape = LaunchShape(tokens=4, rows=4, **heads)
        extend = extend_launch(tile, shape, page_size=page_size)
        yield Variant(extend_split_kernel, extend, itemsize, has_window, not has_window)
    if itemsize == 2 and head_dim <= 128:
        # A prompt alone, and some.
        shape = LaunchShape(tokens=8192, rows=page_size, **heads)
        dense = dense_launch(shape, page_size=page_size, pdl=True)
        yield Variant(extend_dense_kernel, dense, itemsize, has_window)


def split_tiles(head_dim: int, itemsize: int) -> list[ExtendTile]:
    """The tiles that the table splits rows with, each once."""
    table = HALF_TILES if itemsize == 2 else FLOAT_TILES
    tiles = (choice.tile for choice in table[max(padded_head(head_dim), 64)])
    shapes = {tile._replace(programs=1): None for tile in tiles if tile.programs}
    return list(shapes)


def test_every_shipped_variant_compiles_for_the_h200() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    output = compile_in_a_process([__file__, "--compile"], env=environment)
    reports = json.loads(output.splitlines()[-1])
    assert len(reports) == len(variants())
    for report in reports:
        assert report["shared"] <= SHARED_MEMORY_LIMIT, report
        # A matrix instruction of a warp group takes 64 queries.
        is_matrix_bound = report["queries"] >= 64
        if is_matrix_bound and report["itemsize"] == 2:
            assert report["wgmma"] > 0, report
        if report["kernel"] == decode_hopper_kernel.__name__:
            assert report.get("STACK", 0) == 0, report
        if report["has_copies"]:
            assert report["copies"] > 0, report
            assert report["waits"] > 0, report


if __name__ == "__main__":
    if "--compile" in sys.argv:
        reports = []
        for variant in variants():
            reports.append(compile_kernel(variant))
            print(reports[-1], file=sys.stderr, flush=True)
        print(json.dumps(reports))
        raise SystemExit(0)
    raise SystemExit(pytest.main([__file__]))
