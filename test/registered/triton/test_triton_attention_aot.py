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
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang.srt.layers.attention.triton_ops.decode_attention import (
    combine_launch,
    decode_launch,
)
from sglang.srt.layers.attention.triton_ops.decode_kernels import (
    decode_combine_kernel,
    decode_split_kernel,
)
from sglang.srt.layers.attention.triton_ops.extend_dense import dense_launch
from sglang.srt.layers.attention.triton_ops.extend_dense_kernels import (
    extend_dense_kernel,
)
from sglang.srt.layers.attention.triton_ops.extend_kernels import extend_kernel
from sglang.srt.layers.attention.triton_ops.extend_split import split_combine_launch
from sglang.srt.layers.attention.triton_ops.extend_split_kernels import (
    extend_combine_kernel,
    extend_split_kernel,
)
from sglang.srt.layers.attention.triton_ops.extend_table import (
    FLOAT_TILES,
    HALF_TILES,
    ExtendTile,
    choose_tile,
    extend_launch,
    padded_head,
)
from sglang.srt.layers.attention.triton_ops.launch import Launch
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count, sampled

register_cpu_ci(est_time=95, suite="cpu", full_time=550)

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY_LIMIT = 232448
TYPES = {2: "*bf16", 4: "*fp32"}
# Parameters that are not listed are strides or lengths: i32.
POINTERS = {
    "page_table": "*i32",
    "row_index": "*i64",
    "read_lens": "*i64",
    "qo_indptr": "*i64",
    "prefix_lens": "*i64",
    "tree_mask": "*u8",
    "partial": "*fp32",
    "lse": "*fp32",
}
CACHE_NAMES = ("q", "k_cache", "v_cache", "k_new", "v_new", "out")
DESCRIPTORS = ("k_tiles", "v_tiles")
NOT_ALIGNED = (
    "tokens",
    "rows",
    "tiles",
    "tree_tokens",
    "splits",
    "window",
    "table_row_stride",
)


def compile_kernel(kernel: Any, launch: Launch, itemsize: int) -> dict[str, Any]:
    """Compile one variant; what it takes of a multiprocessor."""
    signature: dict[str, str] = {}
    options = {k: v for k, v in launch.options().items() if k not in launch.constants}
    # A stride of one is a constant to the compiler, as it is at run time.
    constants: dict[str, Any] = dict(launch.constants)
    if "table_column_stride" in kernel.arg_names:
        constants["table_column_stride"] = 1
    attrs: dict[tuple[int], list[list[Any]]] = {}
    unused = {
        "row_index": not constants.get("HAS_ROW_INDEX", True),
        "tree_mask": not constants.get("HAS_TREE", True),
    }
    for position, name in enumerate(kernel.arg_names):
        if unused.get(name, False):
            constants[name] = None
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in DESCRIPTORS:
            block = [constants["BLOCK_N"], constants["BLOCK_D"]]
            signature[name] = f"tensordesc<{TYPES[itemsize][1:]}{block}>"
            continue
        kind = TYPES[itemsize] if name in CACHE_NAMES else POINTERS.get(name, "i32")
        signature[name] = "fp32" if name == "score_scale" else kind
        if name not in NOT_ALIGNED and signature[name] != "fp32":
            attrs[(position,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attrs),
        target=HOPPER,
        options=options,
    )
    report: dict[str, Any] = {
        "kernel": kernel.__name__,
        "itemsize": itemsize,
        "warps": launch.num_warps,
        "stages": launch.num_stages,
        "shared": compiled.metadata.shared,
        **{
            name: launch.constants.get(name)
            for name in ("HEAD_DIM", "BLOCK_M", "BLOCK_N")
        },
        **resources(compiled.asm["cubin"]),
    }
    report["copies"] = compiled.asm["ptx"].count("cp.async.bulk.tensor")
    report["waits"] = compiled.asm["ptx"].count("griddepcontrol.wait")
    report["wgmma"] = compiled.asm["ptx"].count("wgmma.mma_async")
    return report


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


def variants() -> list[tuple[Any, Launch, int]]:
    """Kernels, their parameters and item sizes: the ones that models bring along."""
    found: list[tuple[Any, Launch, int]] = []
    shapes = [(32, 8, 128, 2), (8, 2, 64, 2), (4, 2, 256, 2), (8, 2, 64, 4)]
    shapes += [(32, 32, 96, 2), (16, 8, 128, 2), (32, 8, 128, 4), (4, 2, 256, 4)]
    for q_heads, kv_heads, head_dim, itemsize in shapes[: count(ci=3, full=8)]:
        heads = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        for page_size, has_window in ((1, False), (16, True)):
            common: dict[str, Any] = {
                **heads,
                "page_size": page_size,
                "has_row_index": True,
                "has_window": has_window,
            }
            split = decode_launch(splits=8, itemsize=itemsize, **common)
            found.append((decode_split_kernel, split, itemsize))
            found.append((decode_combine_kernel, combine_launch(split), itemsize))
            for tokens, rows, has_tree in (
                (8192, 1, False),
                (512, 2, False),
                (64, 8, not has_window),
            ):
                tile = choose_tile(tokens=tokens, rows=rows, itemsize=itemsize, **heads)
                extend = extend_launch(tile, rows=rows, has_tree=has_tree, **common)
                found.append((extend_kernel, extend, itemsize))
            for tile in split_tiles(head_dim, itemsize):
                extend = extend_launch(tile, rows=4, has_tree=not has_window, **common)
                found.append((extend_split_kernel, extend, itemsize))
            if itemsize == 2 and head_dim <= 128:
                dense = dense_launch(
                    # A prompt alone, and some.
                    rows=page_size,
                    page_size=page_size,
                    has_row_index=True,
                    has_window=has_window,
                    pdl=True,
                    **heads,
                )
                found.append((extend_dense_kernel, dense, itemsize))
        for splits in (2, 6, 64):
            combine = split_combine_launch(
                q_heads=q_heads, head_dim=head_dim, splits=splits
            )
            found.append((extend_combine_kernel, combine, itemsize))
    return sampled(found, key=lambda v: (v[0].__name__, v[2]), ci=1)


def split_tiles(head_dim: int, itemsize: int) -> list[ExtendTile]:
    """The tiles that the table splits rows with, each once."""
    table = HALF_TILES if itemsize == 2 else FLOAT_TILES
    tiles = (choice.tile for choice in table[max(padded_head(head_dim), 64)])
    shapes = {tile._replace(programs=1): None for tile in tiles if tile.programs}
    return list(shapes)


def test_every_shipped_variant_compiles_for_the_h200() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, __file__, "--compile"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    reports = json.loads(result.stdout.splitlines()[-1])
    assert len(reports) == len(variants())
    for report in reports:
        assert report["shared"] <= SHARED_MEMORY_LIMIT, report
        # A matrix instruction of a warp group takes 64 queries.
        is_matrix_bound = (report["BLOCK_M"] or 0) >= 64
        if is_matrix_bound and report["itemsize"] == 2:
            assert report["wgmma"] > 0, report
        if report["kernel"] == "extend_dense_kernel":
            assert report["copies"] > 0, report
            assert report["waits"] > 0, report


if __name__ == "__main__":
    if "--compile" in sys.argv:
        reports = []
        for variant in variants():
            reports.append(compile_kernel(*variant))
            print(reports[-1], file=sys.stderr, flush=True)
        print(json.dumps(reports))
        raise SystemExit(0)
    raise SystemExit(pytest.main([__file__]))
