"""Root-mean-square norm, alone and fused with the residual addition.

Knows rows of channels; knows nothing of layers or heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.distributed.peer_ops import sum_rows
from sglang.srt.utils.dispatch import Op

if TYPE_CHECKING:
    from sglang.srt.distributed.peer_memory import PeerMemory

_TRITON = "sglang.srt.layers.ops.norm.triton:"


def rmsnorm_ref(
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
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    result = (wide * scale * weight.float()).to(x.dtype)
    return result if out is None else out.copy_(result)


rmsnorm = Op(
    reference=rmsnorm_ref,
    native="sglang.srt.layers.ops.norm.native:rmsnorm",
    triton=_TRITON + "rmsnorm",
)


def fused_add_rmsnorm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> None:
    """residual += x; x = rmsnorm(residual) * weight; both in place.

    The norm reads the residual as stored, that is, rounded to its dtype.

    Args:
        x, residual: [..., H] of one dtype, contiguous, not overlapping.
        weight: [H], the same dtype.
        eps: added to the mean square.
    """
    residual.copy_(residual.float() + x.float())
    rmsnorm_ref(residual, weight, eps, out=x)


fused_add_rmsnorm = Op(
    reference=fused_add_rmsnorm_ref,
    native="sglang_kernels.ops:fused_add_rmsnorm",
    triton=_TRITON + "fused_add_rmsnorm",
)


def norm_add_rmsnorm_ref(
    x: Tensor, residual: Tensor, inner: Tensor, weight: Tensor, eps: float
) -> None:
    """residual += rmsnorm(x) * inner; x = rmsnorm(residual) * weight; both in place.

    Like `rmsnorm` followed by `fused_add_rmsnorm`, with the same rounding.

    Args:
        x, residual: [..., H] of one dtype, contiguous, not overlapping.
        inner, weight: [H], the same dtype.
        eps: added to both mean squares.
    """
    rmsnorm(x, inner, eps, out=x)
    fused_add_rmsnorm(x, residual, weight, eps)


norm_add_rmsnorm = Op(
    reference=norm_add_rmsnorm_ref, triton=_TRITON + "norm_add_rmsnorm"
)


def sum_add_rmsnorm_ref(
    x: Tensor,
    residual: Tensor,
    inner: Tensor | None,
    weight: Tensor,
    eps: float,
    memory: PeerMemory,
) -> None:
    """Sum `x` over the ranks like `peer_ops.sum_rows`, then do the work of
    `norm_add_rmsnorm`, or without an `inner` of `fused_add_rmsnorm`.

    Args: as for these.
    """
    sum_rows(x, memory)
    if inner is None:
        fused_add_rmsnorm(x, residual, weight, eps)
    else:
        norm_add_rmsnorm(x, residual, inner, weight, eps)


sum_add_rmsnorm = Op(
    reference=sum_add_rmsnorm_ref,
    triton="sglang.srt.layers.ops.norm.triton_ranks:sum_add_rmsnorm",
)
