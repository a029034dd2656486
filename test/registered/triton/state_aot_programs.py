"""Compiles the kernels of recurrent state for sm_90; run by test_triton_state_aot.

Prints one line per variant with its shared memory in bytes, then a summary.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import torch

# Sets the path of the package, and leaves the interpreter.
from aot_programs import POINTERS, Variant, compile_variant

from sglang.srt.layers.ops.state.gated_delta import step_kernels, tree_kernel
from sglang.srt.layers.ops.state.gated_delta import triton as delta
from sglang.srt.layers.ops.state.gated_delta.inputs import DeltaInputs
from sglang.srt.layers.ops.state.gated_delta.prepare_kernel import prepare_kernel
from sglang.srt.layers.ops.state.gated_delta.scan_kernel import scan_kernel
from sglang.srt.layers.ops.state.shared.rows import search_steps
from sglang.srt.layers.ops.state.short_conv import triton as conv
from sglang.srt.layers.ops.state.short_conv import triton_kernels as conv_kernels
from sglang.srt.layers.ops.state.short_conv.conv_filter import ConvFilter
from sglang.srt.mem_cache.ops.copy_slots import triton as copy_slots
from sglang.test.scale import sampled

SHARED_BYTES = 227 * 1024
RAGGED = {"qo_indptr": "*i64", "has_state": "*u8"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PATH = {"path": "*i64", "path_lens": "*i64"}
TRACKS = {"track_lens": "*i64", "track_slots": "*i64"}
UNTRACKED = {**dict.fromkeys(TRACKS), "TRACKS": 0}
FOLDED = {"folded": "*i32"}
UNCOUNTED = {"folded": None, "folded_stride": None}
SUMS = {"checksums": "*i64", "marks": "*i32"}
UNSUMMED = dict.fromkeys(("checksums", "checksums_stride", "marks", "marks_stride"))


def convolutions() -> Iterator[Variant]:
    """Those of Qwen3-Next, with SiLU, and of LFM2, with a bias and without counts."""
    for dtype, channels, width in (("bf16", 8192, 4), ("fp32", 2048, 3)):
        p = POINTERS[dtype]
        weight = torch.empty(channels, width)
        silu = width == 4
        sizes = conv.conv_sizes(ConvFilter(weight=weight, bias=None, silu=silu))
        pointers = {**dict.fromkeys(("x", "weight", "bias", "state", "out"), p)}
        pointers["slots"] = "*i64"
        constants = {"SIZES": sizes, "PDL": True}
        counts = FOLDED if silu else {}
        uncounted = {} if silu else UNCOUNTED
        if silu:
            constants |= {"bias": None}
        kernel = conv_kernels.decode_kernel
        args, decode = pointers | counts, constants | uncounted
        yield Variant(f"conv decode {dtype}", kernel, args, decode, 1)
        constants = constants | {"TOKENS": conv.TOKENS, "STEPS": search_steps(8)}
        kernel = conv_kernels.conv_kernel
        prefill = constants | {"parent_index": None, "NODES": 0}
        args = pointers | RAGGED
        yield Variant(f"conv prefill {dtype}", kernel, args, prefill, 4)
        tree = constants | {"NODES": 64, **dict.fromkeys(RAGGED)}
        args = pointers | {"parent_index": "*i64"}
        yield Variant(f"conv tree {dtype}", kernel, args, tree, 4)
        constants = {
            "CHANNELS": channels,
            "CHANNEL_BLOCK": conv.CHANNELS,
            "WIDTH": width,
            "PDL": True,
            **uncounted,
        }
        pointers |= counts
        kernel = conv_kernels.fold_kernel
        without = constants | dict.fromkeys(PATH)
        args = pointers | RAGGED
        yield Variant(f"conv fold {dtype}", kernel, args, without | UNTRACKED, 1)
        args, tracked = args | TRACKS, without | {"TRACKS": 2}
        yield Variant(f"conv fold tracked {dtype}", kernel, args, tracked, 1)
        without = constants | dict.fromkeys(RAGGED) | UNTRACKED
        yield Variant(f"conv commit {dtype}", kernel, pointers | PATH, without, 1)


def delta_rules() -> Iterator[Variant]:
    """Those of Qwen3-Next, with states of each dtype, and odd heads. float16 is
    without counts."""
    for dtype, state_dtype, d_k, d_v in (
        ("bf16", "fp32", 128, 128),
        ("bf16", "bf16", 128, 128),
        ("fp16", "fp16", 64, 128),
        ("fp32", "fp32", 24, 40),
    ):
        name = f"{dtype} {state_dtype} {d_k} {d_v}"
        pointers = {
            **dict.fromkeys(("q", "k", "v", "out"), POINTERS[dtype]),
            **dict.fromkeys(("matrices", "decays", "g", "beta"), "*fp32"),
            **dict.fromkeys(("node_keys", "node_u"), "*fp32"),
            "state": POINTERS[state_dtype],
            "slots": "*i64",
            "mask": "*u8",
            "scale": "fp32",
            **(FOLDED if dtype != "fp16" else {}),
        }
        state = torch.empty(1, 32, d_k, d_v, device="meta")

        sizes = {
            "SIZES": delta.delta_sizes(state, key_heads=16, normalise=True),
            "PDL": True,
        }
        uncounted = {} if "folded" in pointers else UNCOUNTED
        kernel = step_kernels.decode_kernel
        yield Variant(f"decode {name}", kernel, pointers, sizes | uncounted, 4)
        heads = torch.empty(1, 1, 1, dtype=DTYPES[dtype], device="meta")
        precision = delta.scan_precision(heads.dtype)
        yield from _chunk_kernels(name, pointers, sizes, precision)
        kernel = tree_kernel.tree_kernel
        gates = torch.empty(1, 1, device="meta")
        inputs = DeltaInputs(
            q=heads, k=heads, v=heads, g=gates, beta=gates, scale=1.0, normalise=True
        )
        for nodes in (6, 20, delta.MOST_NODES):
            form = delta.tree_form(inputs, nodes=nodes)
            constants = sizes | {"FORM": form}
            warps = delta.tree_warps(form)
            yield Variant(f"{form} {name}", kernel, pointers, constants, warps)
        kernel = step_kernels.commit_kernel
        constants = sizes | {"PATH": 16} | uncounted
        yield Variant(f"commit {name}", kernel, pointers | PATH, constants, 4)


def _chunk_kernels(
    name: str, pointers: dict[str, str], sizes: dict[str, object], precision: str
) -> Iterator[Variant]:
    constants = {**sizes, "PRECISION": precision, "STEPS": search_steps(8)}
    constants |= {} if "folded" in pointers else UNCOUNTED
    scan = scan_kernel, delta.SCAN_OPTIONS[precision]
    for kernel, options, tracks in (
        (prepare_kernel, {"num_warps": 4}, 0),
        (*scan, 0),
        (*scan, 2),
    ):
        given = constants | ({"TRACKS": tracks} if tracks else UNTRACKED)
        yield Variant(
            f"{kernel.__name__} {name}{' tracked' if tracks else ''}",
            kernel,
            pointers | RAGGED | (TRACKS if tracks else {}),
            {key: value for key, value in given.items() if key in kernel.arg_names},
            options["num_warps"],
            options.get("num_stages", 3),
        )


def copies() -> Iterator[Variant]:
    for dtype, torch_dtype in DTYPES.items():
        pool = torch.empty(2, 8 * copy_slots.MOST_LINES, dtype=torch_dtype)
        yield Variant(
            f"copy slots {dtype}",
            copy_slots.copy_kernel,
            {"tensor": POINTERS[dtype], "dst": "*i64", "src": "*i64"},
            {
                "LINE": copy_slots.line_size(pool),
                "BLOCK": copy_slots.MOST_LINES,
                "PDL": True,
            },
            4,
        )


def with_sums(variants: Iterator[Variant]) -> Iterator[Variant]:
    """Yield kernels without checksums, and with them."""
    for variant in variants:
        if "checksums" not in variant.kernel.arg_names:
            yield variant
            continue
        constants, pointers = variant.constants, variant.pointers
        yield variant._replace(constants=constants | UNSUMMED)
        name = f"{variant.name} summed"
        yield variant._replace(name=name, pointers=pointers | SUMS)


def main() -> None:
    kernels = itertools.chain(convolutions(), delta_rules(), copies())
    variants = list(with_sums(kernels))
    # The first of a kernel is one of 16 bits without checksums, the last one of 32 bits
    # with them.
    chosen = sampled(
        variants, key=lambda v: (v.kernel, v.constants.get("TRACKS")), ci=1
    )
    for variant in chosen:
        compiled = compile_variant(variant)
        assert "griddepcontrol.wait" in compiled.asm["ptx"], variant.name
        shared = compiled.metadata.shared
        assert shared <= SHARED_BYTES, f"{variant.name}: {shared} bytes"
        is_product = variant.kernel in (
            prepare_kernel,
            scan_kernel,
            step_kernels.commit_kernel,
            tree_kernel.tree_kernel,
        )
        ptx = compiled.asm["ptx"]
        form = variant.constants.get("FORM")
        is_product &= form is None or form.precision != "ieee"
        assert not is_product or "wgmma" in ptx or "mma.sync" in ptx, variant.name
        if variant.kernel is copy_slots.copy_kernel:
            wide = re.findall(r"(?:ld|st)\.global\.v4\.b32", ptx)
            assert len(wide) == 2 * 8, f"{variant.name}: not 16 bytes per thread"
        print(variant.name, "shared", shared)
    print(f"compiled {len(variants)} variants for sm_90")


if __name__ == "__main__":
    main()
