"""Product of many rows with a quantised weight: choice and launches.

Rows are rounded to 8 bits and multiplied as such where the device can and the weight
allows it; otherwise the weight becomes plain for one call. The latter costs a pass over
the weight, which many rows share.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from sglang.srt.layers.ops.linear.quantized import E4M3_MAX, QuantizedWeight
from sglang.srt.layers.ops.linear.triton_kernels import FORMATS, Product
from sglang.srt.layers.ops.linear.triton_quantized import (
    block_product_kernel,
    dequantize_kernel,
    round_rows_kernel,
)
from sglang.srt.utils.triton_launch import compute_capability, launch_options

logger = logging.getLogger(__name__)

_HAS_E4M3 = (8, 9)
_HOPPER = (9, 0)
_BLOCK = 128
_TILE_N = 64
_MOST_BLOCK = 16384
"""Columns that a program rounds at once: 32 of a thread."""
_warned = False


class StoredWeight(NamedTuple):
    """A weight as kernels take it.

    Fields:
        codes, scales, zeros: tensors of a quantised weight, or any where it has none.
        constants: the fields of `Product` and `GroupedProduct` about it.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    constants: dict[str, Any]


def stored_weight(weight: Tensor | QuantizedWeight) -> StoredWeight:
    """Return what kernels read of a weight."""
    if isinstance(weight, Tensor):
        return StoredWeight(weight, weight, weight, {})
    codes, format = weight.codes, str(weight.format)
    if format == "e4m3" and not has_e4m3(codes.device):
        codes, format = codes.view(torch.uint8), "e4m3_bits"
    constants = {
        "format": FORMATS[format],
        "group_rows": weight.group_rows,
        "group_columns": weight.group_columns,
        "groups": weight.scales.shape[-1],
        "has_zeros": weight.zeros is not None,
        "run": weight.run,
    }
    zeros = weight.scales if weight.zeros is None else weight.zeros
    return StoredWeight(codes, weight.scales, zeros, constants)


def has_e4m3(device: torch.device) -> bool:
    """Whether `device` has instructions for numbers of 8 bits."""
    return device.type == "cuda" and compute_capability(device.index or 0) >= _HAS_E4M3


def multiply_many(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`ops.linear.linear` of any number of rows with a quantised weight."""
    n, k = weight.shape
    if out is None:
        out = x.new_empty(*x.shape[:-1], n)
    rows, target = weight.in_order(x).reshape(-1, k), out.view(-1, n)
    if not rows.shape[0]:
        return out
    if rounds(rows.dtype, weight):
        if weight.is_scaled_by_row:
            _multiply_rounded(rows, weight, bias, target)
        else:
            multiply_blocks(rows, weight, bias, target)
        return out
    plain = dequantize_to(weight, x.dtype)
    if bias is None:
        torch.mm(rows, plain.t(), out=target)
    else:
        torch.addmm(bias, rows, plain.t(), out=target)
    return out


def rounds(dtype: torch.dtype, weight: QuantizedWeight) -> bool:
    """Whether products of many rows of `dtype` round them to 8 bits."""
    n, k = weight.shape
    if not weight.quantizes_inputs or dtype != torch.bfloat16:
        return False
    if weight.format != "e4m3" or weight.codes.device.type != "cuda":
        return False
    by_row = weight.is_scaled_by_row and weight.group_rows == 1
    by_block = weight.group_columns == weight.group_rows == _BLOCK
    capability = compute_capability(weight.codes.device.index or 0)
    if n % 16 == 0 and k % 16 == 0 and capability >= _HOPPER and (by_row or by_block):
        return True
    _warn(f"[{n}, {k}] on compute capability {'.'.join(map(str, capability))}")
    return False


def _warn(weight: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "--fp8-gemm-runner-backend auto: products of many rows with weights like "
            "%s do not run in 8 bits; the weight is dequantised for each of them",
            weight,
        )


def _multiply_rounded(
    rows: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor
) -> None:
    codes, scales = round_rows(rows, rows.shape[1])
    torch._scaled_mm(
        codes,
        weight.codes.t(),
        scale_a=scales,
        scale_b=weight.scales.view(1, -1),
        bias=bias,
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=out,
    )


def multiply_blocks(
    rows: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor
) -> None:
    """out [T, N] = rows [T, K], rounded to 8 bits by token and block of 128 columns,
    times a weight in blocks of 128 x 128. The sums of a block are scaled in float32."""
    count, k = rows.shape
    n = weight.shape[0]
    codes, scales = round_rows(rows, _BLOCK)
    tile_m = 64 if count <= 64 else 128
    tiles = triton.cdiv(count, tile_m), triton.cdiv(n, _TILE_N)
    block_product_kernel[(tiles[0] * tiles[1],)](
        codes,
        scales,
        weight.codes,
        weight.scales,
        codes if bias is None else bias,
        out,
        count,
        n,
        out.stride(0),
        K=k,
        BLOCK=_BLOCK,
        TILE_M=tile_m,
        TILE_N=_TILE_N,
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=4,
        **launch_options(rows.device),
    )


def round_rows(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of rows [T, K]: each group of columns of a row is divided
    by its largest magnitude / 448 and rounded to e4m3.

    Returns:
        codes [T, K] float8_e4m3fn; scales [T, ceil(K / group)] float32, those of a
        group side by side in memory.
    """
    count, k = rows.shape
    groups = triton.cdiv(k, group)
    codes = torch.empty(count, k, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(groups, count, dtype=torch.float32, device=rows.device)
    round_rows_kernel[(count, groups)](
        rows,
        codes,
        scales,
        rows.stride(0),
        K=k,
        GROUP=min(group, k),
        BLOCK=min(_MOST_BLOCK, triton.next_power_of_2(min(group, k))),
        MOST=E4M3_MAX,
        num_warps=1 if group <= _BLOCK else 16,
        **launch_options(rows.device),
    )
    return codes, scales.t()


def dequantize_to(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] in `dtype`, rounded once."""
    n, k = weight.shape
    plain = torch.empty(n, k, dtype=dtype, device=weight.codes.device)
    stored = stored_weight(weight)
    items = weight.codes.shape[1]
    block = min(2048, max(16, triton.next_power_of_2(items)))
    dequantize_kernel[(n, triton.cdiv(items, block))](
        stored.codes,
        stored.scales,
        stored.zeros,
        plain,
        PRODUCT=Product(
            k=k,
            block_m=1,
            block_n=1,
            block_k=block,
            gated=False,
            gelu=False,
            has_bias=False,
            has_residual=False,
            **stored.constants,
        ),
        **launch_options(plain.device),
    )
    return plain
