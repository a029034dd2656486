"""Compiles Gluon kernels for the H200 ahead of time. Needs no GPU; not under the
interpreter, so in a process of its own: `python test_*.py --compile` prints JSON."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from typing import Any

import torch

from sglang.srt.layers.ops.attention.extend_hopper.launch import _layout
from sglang.test.ahead_of_time import compile_in_a_process

SHARED_BYTES = 232448


@functools.cache
def compiled(file: str) -> list[dict[str, Any]]:
    """The list that `file`, run with `--compile`, prints last."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    output = compile_in_a_process([file, "--compile"], env=env)
    found: list[dict[str, Any]] = json.loads(output.splitlines()[-1])
    return found


def assert_all_fit(file: str, head_dims: Iterable[int]) -> None:
    """For each head size products and copies are asynchronous, nothing is spilled, and
    it fits."""
    found = compiled(file)
    assert {each["head_dim"] for each in found} == set(head_dims)
    for each in found:
        assert each["wgmma"] > 0
        assert each["copies"] > 0
        assert each["shared"] <= SHARED_BYTES
        assert each.get("STACK", 0) == 0


def compile_for_hopper(
    kernel: Any,
    *,
    constants: dict[str, Any],
    tiles: dict[str, int],
    types: dict[str, Any],
) -> dict[str, Any]:
    """Compile a Gluon kernel; what it takes of a multiprocessor.

    Args:
        tiles: rows of the descriptors' blocks, of `constants["D"]` channels each.
        types: of the other parameters; pointers are aligned to 16 bytes.
    """
    import triton
    from test_triton_attention_aot import HOPPER, resources
    from triton.experimental.gluon._runtime import GluonASTSource

    head_dim = constants["D"]
    types = types | dict.fromkeys(constants, "constexpr")
    for name, rows in tiles.items():
        layout = _layout(rows, head_dim, torch.bfloat16)
        types[name] = f"tensordesc<bf16{[rows, head_dim]},{layout!r}>"
    names = kernel.arg_names
    pointers = [n for n, kind in types.items() if str(kind).startswith("*")]
    source = GluonASTSource(
        kernel,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": 4})
    return {
        "head_dim": head_dim,
        "shared": compiled.metadata.shared,
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
        "copies": compiled.asm["ptx"].count("cp.async.bulk.tensor"),
        **resources(compiled.asm["cubin"]),
    }
