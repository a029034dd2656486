"""Native form of the matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.layers.ops.linear.op import (
    AnyWeight,
    PackedWeight,
    linear_by_panels,
    linear_ref,
)
from sglang.srt.layers.ops.linear.quantized import (
    PANEL,
    QuantizedPanels,
    QuantizedWeight,
)
from sglang_kernels import ops

FEW_ROWS = 4
"""Rows of half precision up to which this product beats torch on most shapes. For 1536
x 576, torch with AMX takes 0.1 ms for 1 to 16 rows; this takes 38 us for 1 row, 78 for
4 and 283 for 16."""


def linear(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        weight = QuantizedPanels.pack(weight)
    if isinstance(weight, QuantizedPanels):
        return linear_by_panels(x, weight, bias, out, _multiply_panels)
    if not isinstance(weight, PackedWeight):
        return _plain_linear(x, weight, bias, out)
    if weight.panel != PANEL:
        return linear_ref(x, weight, bias, out=out)
    if x.dtype != torch.float32:
        wide = linear(x.float(), weight, None if bias is None else bias.float())
        return wide.to(x.dtype) if out is None else out.copy_(wide)
    if out is None:
        # Two dimensions are the hot case, and slicing a shape is slow.
        sizes = (x.shape[0],) if x.dim() == 2 else x.shape[:-1]
        out = x.new_empty(*sizes, weight.n)
    ops.packed_linear(x, weight.data, weight.n, bias, out)
    return out


def _plain_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    rows = x.numel() // x.shape[-1]
    if rows > FEW_ROWS or x.dtype == torch.float32 or not weight.is_contiguous():
        return linear_ref(x, weight, bias, out=out)
    if out is None:
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
    ops.plain_linear(x.reshape(rows, x.shape[-1]), weight, bias, out)
    return out


def _multiply_panels(
    x: Tensor, panels: Tensor, outputs: int, bias: Tensor | None
) -> Tensor:
    """Multiply as a packed weight is, in an order that does not depend on the rows."""
    out = x.new_empty(len(x), outputs)
    ops.packed_linear(x, panels, outputs, bias, out)
    return out
