"""Triton kernels of the root-mean-square norm, alone and with the residual addition.

One program per row. The ops in `layers/ops/norm/op.py` describe the functions.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.srt.utils.triton_launch import (
    let_next_start,
    supports_dependent_launch,
    wait_for_inputs,
)


@triton.jit
def normed(value, scale, eps, WIDTH: tl.constexpr):
    """Normalise a row, float32; zeros beyond WIDTH."""
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    return value * inverse * scale


@triton.jit
def rmsnorm_kernel(
    x,
    weight,
    out,
    eps,
    outer_stride,
    inner_stride,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    mask = channel < WIDTH
    let_next_start(PDL)
    scale = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    start = x + (row // INNER) * outer_stride + (row % INNER) * inner_stride
    value = tl.load(start + channel, mask=mask, other=0.0).to(tl.float32)
    result = normed(value, scale, eps, WIDTH)
    tl.store(out + row * WIDTH + channel, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def fused_add_rmsnorm_kernel(
    x,
    residual,
    inner,
    weight,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`fused_add_rmsnorm`, or `norm_add_rmsnorm` if there is an `inner`."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    mask = channel < WIDTH
    let_next_start(PDL)
    scale = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    if inner is not None:
        inner_scale = tl.load(inner + channel, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x_row = x + row * WIDTH + channel
    residual_row = residual + row * WIDTH + channel
    added = tl.load(x_row, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
    if inner is not None:
        added = normed(added, inner_scale, eps, WIDTH)
        added = added.to(x.dtype.element_ty).to(tl.float32)
    stored = (added + before).to(residual.dtype.element_ty)
    tl.store(residual_row, stored, mask=mask)
    result = normed(stored.to(tl.float32), scale, eps, WIDTH)
    tl.store(x_row, result.to(x.dtype.element_ty), mask=mask)


def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
) -> Tensor:
    """`ops.norm.rmsnorm`. x: [..., H], any strides if the last dimension is
    contiguous."""
    width = x.shape[-1]
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x.numel() // width if width else 0
    if rows == 0:
        return out
    # Heads of a packed qkv tensor have two strides; anything deeper is copied.
    if x.dim() == 3 and not x.is_contiguous():
        inner, outer_stride, inner_stride = x.shape[1], x.stride(0), x.stride(1)
    else:
        x = x.reshape(-1, width)
        inner, outer_stride, inner_stride = 1, x.stride(0), 0
    pdl = supports_dependent_launch(x.device)
    rmsnorm_kernel[(rows,)](
        x,
        weight,
        out,
        eps,
        outer_stride,
        inner_stride,
        INNER=inner,
        WIDTH=width,
        PDL=pdl,
        **row_options(width, pdl),
    )
    return out


def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """`ops.norm.fused_add_rmsnorm`; x and residual contiguous."""
    _add_and_norm(x, residual, None, weight, eps)


def norm_add_rmsnorm(
    x: Tensor, residual: Tensor, inner: Tensor, weight: Tensor, eps: float
) -> None:
    """`ops.norm.norm_add_rmsnorm`; x and residual contiguous."""
    _add_and_norm(x, residual, inner, weight, eps)


def _add_and_norm(
    x: Tensor, residual: Tensor, inner: Tensor | None, weight: Tensor, eps: float
) -> None:
    width = x.shape[-1]
    if x.numel() == 0:
        return
    pdl = supports_dependent_launch(x.device)
    fused_add_rmsnorm_kernel[(x.numel() // width,)](
        x,
        residual,
        inner,
        weight,
        eps,
        WIDTH=width,
        PDL=pdl,
        **row_options(width, pdl),
    )


def row_options(width: int, pdl: bool) -> dict[str, int | bool]:
    """Return block and launch options for one row of `width` elements per program."""
    block = triton.next_power_of_2(width)
    options: dict[str, int | bool] = {
        "BLOCK": block,
        "num_warps": min(max(block // 512, 1), 16),
    }
    if pdl:
        options["launch_pdl"] = True
    return options
