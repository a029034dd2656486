"""Root-mean-square norm, alone and fused with the residual addition.

Knows rows of channels; knows nothing of layers or heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.layers.ops.dispatch import (
    native,
    triton_ops,
    use_native,
    use_triton,
)


def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
) -> Tensor:
    """out = x / sqrt(mean(x ** 2) + eps) * weight, over the last dimension.

    Args:
        x: [..., H]; float32, bfloat16 or float16; the last dimension contiguous.
        weight: [H], the dtype of `x`.
        eps: added to the mean square.
        out: [..., H] of the dtype of `x`, contiguous; may be `x`. Allocated if None.

    Returns:
        `out`. Sums are float32 whatever the dtype.
    """
    if use_native(x):
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        native.rmsnorm(x, weight, eps, out)
        return out
    if use_triton(x):
        result: Tensor = triton_ops.rmsnorm(x, weight, eps, out=out)
        return result
    return rmsnorm_ref(x, weight, eps, out=out)


def rmsnorm_ref(
    x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
) -> Tensor:
    """Torch oracle of `rmsnorm`."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    result = (wide * scale * weight.float()).to(x.dtype)
    return result if out is None else out.copy_(result)


def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """residual += x; x = rmsnorm(residual) * weight; both in place.

    The norm sees the residual as stored, that is rounded to its dtype.

    Args:
        x, residual: [..., H] of one dtype, contiguous, not overlapping.
        weight: [H], the same dtype.
        eps: added to the mean square.
    """
    if use_native(x):
        native.fused_add_rmsnorm(x, residual, weight, eps)
        return
    if use_triton(x):
        triton_ops.fused_add_rmsnorm(x, residual, weight, eps)
        return
    fused_add_rmsnorm_ref(x, residual, weight, eps)


def fused_add_rmsnorm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> None:
    """Torch oracle of `fused_add_rmsnorm`."""
    residual.copy_(residual.float() + x.float())
    rmsnorm_ref(residual, weight, eps, out=x)
