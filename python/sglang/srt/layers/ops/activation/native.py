"""Native forms of the gated activations."""

from __future__ import annotations

from torch import Tensor

from sglang_kernels import ops


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
    ops.silu_and_mul(x, out)
    return out


def gelu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
    ops.gelu_and_mul(x, out)
    return out
