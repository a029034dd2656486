"""Compiles the Triton kernels of `draft_trees/ops` for sm_90; run by
test_tree_ops_aot. Prints one line per variant, then a summary.
"""

from __future__ import annotations

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

from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.draft_trees.ops.tree import (
    triton_build as build,
)
from sglang.srt.draft_trees.ops.tree import (
    triton_select as select,
)
from sglang.srt.draft_trees.ops.tree import (
    triton_top_k as top_k,
)
from sglang.srt.draft_trees.ops.verify import (
    triton_greedy as verify,
)
from sglang.srt.draft_trees.ops.verify import (
    triton_sampled as verify_sampled,
)
from sglang.srt.mem_cache.ops.branch_slots import triton_kernels as branch_slot_kernels
from sglang.srt.sampling.ops.triton_draw import split_size
from sglang.srt.utils.triton_launch import block_of
from sglang.test.scale import sampled

TARGET = GPUTarget("cuda", 90, 32)
SHAPES = [(1, 3, 4), (4, 5, 8), (8, 5, 32), (8, 5, 64), (16, 8, 128)]
FLOATS = ("probs", "maxima", "sums", "topk_p", "scores", "beam_scores", "totals")
BYTES = ("mask",)
INTS = ("table", "counters", "indptr")
LOGITS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
SCALARS = (
    "vocab",
    "hot_size",
    "row_width",
    "columns",
    "rows",
    "step",
    "size",
    "capacity",
    "region",
)


class Variant(NamedTuple):
    name: str
    kernel: Any
    constants: dict[str, Any]
    warps: int
    types: dict[str, str]


def candidates() -> Iterator[Variant]:
    for dtype, pointer in LOGITS.items():
        for topk, vocab in ((1, 128256), (8, 32000), (8, 2048), (16, 128256)):
            block = split_size(16, vocab)
            splits = triton.cdiv(vocab, block)
            constants = {
                "K": topk,
                "K_BLOCK": block_of(topk),
                "SPLITS": splits,
                "SPLITS_BLOCK": block_of(splits),
                "BLOCK": block,
            }
            warps = 8 if block >= 4096 else 4
            yield Variant(
                f"top_k {dtype} {topk} of {vocab}",
                top_k.top_k_kernel,
                constants,
                warps,
                {"logits": pointer},
            )


def trees() -> Iterator[Variant]:
    for topk, steps, nodes in SHAPES:
        shape = TreeShape(topk=topk, num_steps=steps, num_draft_tokens=nodes)
        sizes = {
            "CANDIDATES": shape.num_candidates,
            "GROUPS": shape.num_groups,
            "K": topk,
        }
        for is_first in (True, False):
            size = topk if is_first else topk**2
            yield Variant(
                f"select {shape} first={is_first}",
                select.select_kernel,
                {
                    **sizes,
                    "BLOCK": block_of(size),
                    "IS_FIRST": is_first,
                    "HAS_NEXT": True,
                    "HAS_HOT": True,
                },
                1 if size <= 64 else 4,
                {},
            )
        yield Variant(
            f"build {shape}",
            build.build_kernel,
            {"SIZES": build.make_sizes(shape)},
            build.build_warps(shape),
            {},
        )
        walked = {"WALK": verify.make_walk(nodes=nodes, steps=steps, topk=topk)}
        whole = {**walked, "open_rows": None}
        yield Variant(f"greedy {shape}", verify.greedy_kernel, whole, 1, {})
        yield Variant(f"path {shape}", verify.greedy_kernel, walked, 1, {})
        sampled = {**walked, "SINGLE": 0.9, "ACCUMULATED": 1.0}
        yield Variant(f"walk {shape}", verify_sampled.walk_kernel, sampled, 1, {})
        splits = {"SPLITS": 32, "SPLITS_BLOCK": 32, "BLOCK": 4096}
        yield Variant(
            f"bonus {shape}",
            verify_sampled.bonus_kernel,
            {"PATH": steps + 1, "K": topk, **splits},
            8,
            {"partials": "*fp32"},
        )
        path = {"PATH": steps + 1, "BLOCK": block_of(nodes)}
        gathered = {**path, "WIDTH": nodes}
        yield Variant(f"gather {shape}", verify.gather_kernel, gathered, 1, {})
        moves = branch_slot_kernels.accepted_moves_kernel
        yield Variant(f"moves {shape}", moves, {**path, "NODES": nodes}, 1, {})


def slots() -> Iterator[Variant]:
    kernels = branch_slot_kernels
    yield Variant("tail", kernels.tail_kernel, {"WIDTH": 6, "BLOCK": 8}, 1, {})
    shapes = ((1, 8, 5, False), (64, 1, 3, False), (64, 8, 5, False), (64, 8, 5, True))
    for page, topk, steps, has_region in shapes:
        layout = {"PAGE": page, "K": topk, "STEPS": steps, "HAS_REGION": has_region}
        name = f"page={page} topk={topk} region={has_region}"
        block = {**layout, "BLOCK": 64}
        yield Variant(f"draft {name}", kernels.draft_kernel, block, 1, {})
        yield Variant(f"tails {name}", kernels.tail_copies_kernel, block, 1, {})
        for paged in (True, False):
            flags = {**block, "IS_PAGED": paged}
            yield Variant(f"shifts {name}", kernels.shifts_kernel, flags, 1, {})
            filled = {**flags, "SKIP_PREFIX": paged}
            table = {"out": "*i32"}
            kernel = kernels.branch_table_kernel
            yield Variant(f"table {name} {paged}", kernel, filled, 4, table)
        rows = {**layout, "ROWS_BLOCK": 16, "BLOCK": 1024}
        kernel = kernels.branch_indices_kernel
        yield Variant(f"lists {name}", kernel, rows, 4, {"out": "*i32"})
        groups = {"K": topk, "GROUPS": 1 + topk * (steps - 1), "BLOCK": block_of(topk)}
        ancestors = kernels.ancestors_kernel
        yield Variant(f"ancestors {name}", ancestors, groups, 1, {"out": "*i32"})


def type_of(name: str, types: dict[str, str]) -> str:
    if name in types:
        return types[name]
    if name in SCALARS or name.endswith(("_stride", "_at")):
        return "i32"
    for kind, members in (("*fp32", FLOATS), ("*u8", BYTES), ("*i32", INTS)):
        if name in members:
            return kind
    return "*i64"


def compile_variant(variant: Variant) -> Any:
    constants = {**variant.constants, "PDL": True}
    signature, attributes = {}, {}
    for position, name in enumerate(variant.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = type_of(name, variant.types)
        if signature[name].startswith("*"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        variant.kernel, signature, constexprs=constants, attrs=attributes
    )
    options = {"num_warps": variant.warps, "launch_pdl": True}
    return triton.compile(source, target=TARGET, options=options)


def main() -> None:
    variants = sampled(
        [*candidates(), *trees(), *slots()], key=lambda v: v.kernel, ci=2
    )
    for variant in variants:
        compiled = compile_variant(variant)
        ptx = compiled.asm["ptx"]
        assert "griddepcontrol.wait" in ptx, variant.name
        assert compiled.metadata.shared <= 227 * 1024, variant.name
        print(variant.name, "shared", compiled.metadata.shared)
    print(f"compiled {len(variants)} variants for sm_90")


if __name__ == "__main__":
    main()
