"""Gated activations of the feed-forward block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sglang.srt.utils.dispatch import Op


def silu_and_mul_ref(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = silu(x[:, :I]) * x[:, I:].

    Args:
        x: [T, 2 * I]; float32, bfloat16 or float16; rows contiguous.
        out: [T, I] of the dtype of `x`, contiguous. Allocated if None.

    Returns:
        `out`. Arithmetic is float32 whatever the dtype.
    """
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"silu_and_mul: x is {tuple(x.shape)}, expected [T, 2 * I]")
    gate, up = x.chunk(2, dim=-1)
    result = (functional.silu(gate.float()) * up.float()).to(x.dtype)
    return result if out is None else torch.Tensor.copy_(out, result)


silu_and_mul = Op(
    reference=silu_and_mul_ref,
    native="sglang.srt.layers.ops.native:silu_and_mul",
    triton="sglang.srt.layers.triton_ops.activation:silu_and_mul",
)
