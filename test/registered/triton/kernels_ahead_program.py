"""Compiles launches ahead for sm_90 without a GPU; run by test_kernels_ahead.

A driver that names the target takes the place of CUDA's; nothing is ever launched.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kv_canary.kernels import triton_launch
from kv_canary.state import create_state
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention
from sglang.srt.layers.triton_ops.gemm import choose, gemm
from sglang.srt.layers.triton_ops.norm import rmsnorm
from sglang.srt.sampling.triton_ops.choose_tokens import choose_tokens
from sglang.srt.utils.kernels_ahead import compiled_ahead


class TargetAlone:
    """The properties that Triton asks of its driver before a launch."""

    def __init__(self) -> None:
        self.launchers: list[Any] = []

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        self.launchers.append(source)


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def launch() -> None:
    """One launch or two of kernels whose arguments are of every kind."""
    x, weight = halves(3, 1024), halves(2048, 1024)
    normed = rmsnorm(x, halves(1024), 1e-6)
    assert not normed.any(), "memory that no kernel has filled"
    for rows in (x, x[:1]):
        config = choose(rows, weight)
        assert config is not None
        gemm(rows, weight, config=config)
    assert choose_tokens(torch.randn(3, 5000)).tolist() == [0, 0, 0]
    for tokens in (4, 256):  # from the pool, and with descriptors of the new ones
        extend_attention(
            halves(tokens, 8, 64),
            halves(512, 2, 64),
            halves(512, 2, 64),
            page_table=torch.zeros(1, 512, dtype=torch.int32),
            row_index=longs(0),
            qo_indptr=longs(0, tokens),
            prefix_lens=longs(0),
            page_size=1,
            sm_scale=0.1,
            k_new=halves(tokens, 2, 64),
            v_new=halves(tokens, 2, 64),
            out=halves(tokens, 8, 64),
        )
    state = create_state(
        num_slots=64, req_rows=4, ring_capacity=8, num_managers=1, device="cpu"
    )
    triton_launch.poison(state, longs(1, 2, 3), None)
    triton_launch.gather_findings(state, longs(1, 2), torch.zeros(64).long())


KINDS = 8


def main() -> None:
    target = TargetAlone()
    driver.set_active(target)
    runtime = triton.knobs.runtime
    compiled: list[bool] = []
    triton.knobs.compilation.listener = lambda **about: compiled.append(
        about["cache_hit"]
    )
    with compiled_ahead():
        launch()
        launch()
    assert runtime.jit_cache_hook is None
    assert compiled == [False] * KINDS, compiled
    assert len(target.launchers) == KINDS
    compiled.clear()
    with compiled_ahead():
        launch()
    assert compiled == [True] * KINDS, "it is not what a launch would ask for"

    try:
        with compiled_ahead():
            launch()
            raise KeyError
    except KeyError:
        pass
    assert runtime.jit_cache_hook is None
    assert torch.empty(3).numel() == 3
    print(f"{KINDS} kernels were ahead")


main()
