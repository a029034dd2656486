"""Root-mean-square norm with an optional fused residual addition."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sglang.srt.distributed.parallel_state import Addend, Unsummed
from sglang.srt.layers.linear import LoadableParameter
from sglang.srt.layers.module import Module
from sglang.srt.layers.ops.norm.op import (
    fused_add_rmsnorm,
    norm_add_rmsnorm,
    rmsnorm,
    sum_add_rmsnorm,
)


class RMSNorm(Module):
    """x / rms(x) * weight (Zhang and Sennrich, 2019).

    Args:
        offset: added to the weight; checkpoints store the weight minus this (Gemma: 1).
            The sum is rounded to the dtype once; in bfloat16 it may be off by 2 ** -9
            of its value, where transformers multiplies by the unrounded sum.
    """

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = LoadableParameter.create(torch.empty(size))
        self.weight.added = offset
        self.eps = eps

    def forward(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """[..., size] -> `out`, which may be `x` and defaults to a new tensor."""
        return rmsnorm(x, self.weight, self.eps, out=out)

    def add_and_norm(
        self, x: Addend | None, residual: Tensor, inner: RMSNorm | None = None
    ) -> Tensor:
        """residual += x, in place; returns norm(residual), in the memory of `x`.

        Args:
            x: None if it was added already; the result is then a new tensor.
            inner: norm of `x` before it is added, with the same `eps`, or None.
        """
        if x is None:
            return rmsnorm(residual, self.weight, self.eps)
        assert inner is None or inner.eps == self.eps
        if isinstance(x, Unsummed):
            of_inner = None if inner is None else inner.weight
            x, memory = x
            sum_add_rmsnorm(x, residual, of_inner, self.weight, self.eps, memory)
        elif inner is None:
            fused_add_rmsnorm(x, residual, self.weight, self.eps)
        else:
            norm_add_rmsnorm(x, residual, inner.weight, self.weight, self.eps)
        return x


class GatedRMSNorm(RMSNorm):
    """norm(x) * silu(gate), with the gate in float32 (Qwen3-Next)."""

    def forward_gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """[..., size] each -> [..., size]."""
        normed = rmsnorm(x, self.weight, self.eps)
        return functional.silu(gate.float()).mul_(normed).to(x.dtype)
