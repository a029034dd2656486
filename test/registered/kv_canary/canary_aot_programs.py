"""Compiles the canary's Triton kernels for sm_90; run by test_canary_kernels_aot."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))

import triton
import triton.language as tl
from canary_aot_checks import lonely_branches, unguarded_stores
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang.srt.kv_canary.kernels import triton_books, triton_launch
from sglang.srt.kv_canary.kernels.state import FingerprintMode
from sglang.srt.kv_canary.kernels.triton_before import before_kernel
from sglang.srt.kv_canary.kernels.triton_common import told_to_all
from sglang.srt.kv_canary.kernels.triton_verify import verify_kernel
from sglang.srt.kv_canary.kernels.triton_write import write_kernel
from sglang.test.scale import sampled

TARGET = GPUTarget("cuda", 90, 32)
INT32_POINTERS = {"verdict", "phase", "ticket", "req_to_token", "tokens"}
# K and V of Llama-3.1-8B: 2048 bytes per slot and layer.
POOL = {"LAYERS": 32, "K_WORDS": 256, "V_WORDS": 256}


class Variant(NamedTuple):
    name: str
    kernel: Any
    constants: dict[str, Any]
    warps: int = 4
    int32: frozenset[str] = frozenset(INT32_POINTERS | {"entries"})


def flags(kernel: Any, **chosen: Any) -> dict[str, Any]:
    """All HAS_ and IS_ switches off but those chosen."""
    names = kernel.arg_names
    off = {n: False for n in names if n.startswith(("HAS_", "IS_")) or n == "SWEEP"}
    return {**off, **chosen}


def verifies() -> Iterator[Variant]:
    shapes = (
        ("tokens", {"PAGE_SIZE": 1, "PAGED": True, "HAS_ROW_INDEX": True}),
        ("pages", {"PAGE_SIZE": 16, "PAGED": True, "HAS_ROW_INDEX": True}),
        ("flat", {"PAGE_SIZE": 1, "PAGED": False}),
        ("numbers", {"PAGE_SIZE": 16, "ENTRY_SIZE": 16, "PAGED": False}),
        (
            "draft window",
            {
                "PAGE_SIZE": 4,
                "PAGED": True,
                "HAS_SEEDS": True,
                "HAS_SEED_TABLE": True,
                "HAS_SHIFT": True,
                "HAS_LINEAGE_ROWS": True,
                "HAS_FIRST": True,
                "HAS_QO_INDPTR": True,
                "HAS_TOKENS": True,
            },
        ),
        (
            "sweep",
            {"PAGE_SIZE": 1, "PAGED": False, "SWEEP": True, "HAS_PREV": True},
        ),
    )
    for mode in FingerprintMode:
        block, chunk = triton_launch.verify_block(mode)
        for name, chosen in shapes:
            constants = {"MODE": int(mode), "BLOCK": block, "CHUNK": chunk}
            constants |= POOL | {"ENTRY_SIZE": 1} | flags(verify_kernel, **chosen)
            yield Variant(f"verify {name} {mode.name}", verify_kernel, constants)


def befores() -> Iterator[Variant]:
    """Verify and head in one: of every shape of a view, decodes and extends."""
    for variant in verifies():
        chosen = variant.constants
        is_default = chosen["MODE"] == FingerprintMode.PARTIAL
        if chosen["SWEEP"] or not (is_default or "tokens" in variant.name):
            continue
        for is_extend in (False, True):
            block, _ = triton_launch.write_block(
                FingerprintMode.NONE, one_token=not is_extend
            )
            extra = {"HAS_QO_INDPTR": is_extend, "HEAD_BLOCK": block}
            constants = flags(before_kernel, HAS_COLUMNS=True) | chosen | extra
            yield Variant(
                f"before {variant.name} {is_extend}", before_kernel, constants
            )


def writes() -> Iterator[Variant]:
    shapes = (
        ("decode", {}),
        ("extend", {"HAS_QO_INDPTR": True}),
        ("tree", {"HAS_QO_INDPTR": True, "IS_TREE": True}),
        (
            "draft",
            {
                "HAS_SEEDS": True,
                "HAS_SEED_TABLE": True,
                "HAS_SHIFT": True,
                "HAS_LINEAGE_ROWS": True,
                "HAS_PUBLISH_ROWS": True,
            },
        ),
        (
            "draft extend",
            {
                "HAS_SEEDS": True,
                "HAS_SEED_TABLE": True,
                "HAS_QO_INDPTR": True,
                "HAS_STAY_LENS": True,
            },
        ),
    )
    for is_tail in (False, True):
        for mode in FingerprintMode if is_tail else (FingerprintMode.NONE,):
            for name, chosen in shapes:
                one = "HAS_QO_INDPTR" not in chosen
                block, chunk = triton_launch.write_block(mode, one_token=one)
                constants = {
                    "IS_TAIL": is_tail,
                    "ADVANCES": is_tail and name != "tree",
                    "HAS_FINDINGS": is_tail and name in ("decode", "extend"),
                    "MODE": int(mode),
                    "BLOCK": block,
                    "CHUNK": chunk,
                }
                constants = flags(write_kernel, **chosen, HAS_COLUMNS=True) | constants
                constants |= POOL | {"HAS_ORACLE": name == "extend"}
                warps = 1 if one and chunk == 1 else 4
                name = f"{'tail' if is_tail else 'head'} {name} {mode.name}"
                yield Variant(name, write_kernel, constants, warps)


def books() -> Iterator[Variant]:
    for live in (False, True):
        kernel = triton_books.poison_kernel
        yield Variant(f"poison {live}", kernel, {"HAS_LIVE": live, "BLOCK": 128})
    for moves in (1, 64, triton_launch.MAX_MOVES):
        yield Variant(f"move {moves}", triton_books.move_kernel, {"MOVES": moves})
    for advances in (False, True):
        kernel = triton_books.finish_kernel
        constants = {"ADVANCES": advances} | flags(kernel, HAS_QO_INDPTR=advances)
        yield Variant(f"finish {advances}", kernel, constants, warps=1)


def compile_variant(variant: Variant) -> Any:
    signature = {}
    attributes = {}
    kernel = variant.kernel
    for position, name in enumerate(kernel.arg_names):
        is_scalar = name in SCALARS or "stride" in name
        if name in variant.constants:
            signature[name] = "constexpr"
        elif is_scalar:
            signature[name] = "i64" if "layer_stride" in name else "i32"
        else:
            signature[name] = "*i32" if name in variant.int32 else "*i64"
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel, signature, constexprs=variant.constants, attrs=attributes
    )
    options = {"num_warps": variant.warps, "launch_pdl": True}
    return triton.compile(source, target=TARGET, options=options)


@triton.jit
def lonely_kernel(head, clock, BLOCK: tl.constexpr, AGREED: tl.constexpr):
    """Each warp decides for itself, unless AGREED: a control of the check."""
    word = tl.load(head + tl.arange(0, BLOCK))
    if AGREED:
        word = told_to_all(word)
    if tl.sum(word, axis=0) != 0:
        tl.store(clock, tl.load(clock) + 1)


def controls() -> Iterator[tuple[Variant, bool]]:
    """Variants, and whether their warps may part ways."""
    for block in (1, 8, 32, 128):
        for agreed in (False, True):
            name = f"lonely {block} {agreed}"
            constants = {"BLOCK": block, "AGREED": agreed}
            is_lonely = block < 128 and not agreed
            yield Variant(name, lonely_kernel, constants), is_lonely


# Whose warps look at the same elements; in the others a thread has its own.
GUARDED = (verify_kernel, before_kernel, write_kernel)
# Records, which other programs of the launch may be writing.
VOLATILE = ("head", "tail")

SCALARS = {
    "num_rows",
    "num_slots",
    "num_tokens",
    "capacity",
    "table_rows",
    "table_columns",
    "columns_width",
    "tokens_width",
    "token_offset",
    "period",
    "page_size",
    "max_depth",
    "kind",
    "manager",
    "tag",
    "head_tag",
    "verify_splits",
    "count",
}


def main() -> None:
    variants = sampled(
        [*writes(), *books(), *verifies(), *befores()], key=lambda v: v.kernel, ci=3
    )
    for variant in variants:
        compiled = compile_variant(variant)
        if variant.kernel in GUARDED and variant.warps > 1:
            stores = unguarded_stores(compiled.asm["ttir"])
            assert not stores, f"{variant.name}: {stores}"
            # Nothing writes heads beside a tail launch, which reads no tails.
            volatile = () if variant.constants.get("IS_TAIL") else VOLATILE
            branches = lonely_branches(compiled.asm["ttgir"], volatile)
            assert not branches, f"{variant.name}: {branches}"
        print(variant.name, "shared", compiled.metadata.shared, flush=True)
    for variant, is_lonely in controls():
        ttgir = compile_variant(variant).asm["ttgir"]
        assert bool(lonely_branches(ttgir, VOLATILE)) == is_lonely, variant.name
    print(f"compiled {len(variants)} variants for sm_90")


if __name__ == "__main__":
    main()
