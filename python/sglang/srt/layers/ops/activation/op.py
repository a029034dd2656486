"""Gated activations of the feed-forward block."""

from __future__ import annotations

import math

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
    gate, up = _halves("silu_and_mul", x)
    result = (functional.silu(gate) * up).to(x.dtype)
    return result if out is None else torch.Tensor.copy_(out, result)


def gelu_and_mul_ref(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = gelu(x[:, :I]) * x[:, I:], with the arguments of `silu_and_mul_ref`.

    gelu(g) = g / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (g + 0.044715 * g ** 3)
    (Hendrycks and Gimpel, 2016), computed as g * sigmoid(2 u), so nothing cancels.
    """
    gate, up = _halves("gelu_and_mul", x)
    twice = math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)
    result = (gate * torch.sigmoid(twice) * up).to(x.dtype)
    return result if out is None else torch.Tensor.copy_(out, result)


def _halves(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up in float32."""
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"{name}: x is {tuple(x.shape)}, expected [T, 2 * I]")
    gate, up = x.float().chunk(2, dim=-1)
    return gate, up


silu_and_mul = Op(
    reference=silu_and_mul_ref,
    native="sglang.srt.layers.ops.activation.native:silu_and_mul",
    triton="sglang.srt.layers.ops.activation.triton:silu_and_mul",
)

gelu_and_mul = Op(
    reference=gelu_and_mul_ref,
    native="sglang.srt.layers.ops.activation.native:gelu_and_mul",
    triton="sglang.srt.layers.ops.activation.triton:gelu_and_mul",
)

GATED = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_and_mul}
"""By the activation's name in config.json."""
