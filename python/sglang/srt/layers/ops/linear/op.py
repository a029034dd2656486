"""Matrix product with a weight that is packed once for the CPU.

Owns the packed format; knows nothing of layers or sharding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kv_canary.op import native_available
from sglang.srt.layers.ops.activation.op import GATED
from sglang.srt.layers.ops.linear.quantized import (
    PANEL,
    QuantizedPanels,
    QuantizedWeight,
)
from sglang.srt.utils.dispatch import Op

_TRITON = "sglang.srt.layers.ops.linear.triton:"

ADD_ROWS = 1024
"""From this many rows on cuBLAS adds the residual. With few rows it would then stop
splitting the sum over K: a decode step of 256 rows of the 8B shape took 16.95 ms
instead of 16.5 (H200)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [N, K] in the order that the CPU product reads.

    Fields:
        n, k: outputs and inputs.
        panel: output columns per panel; `n` (one panel) in the torch fallback.
        data: [ceil(n / panel), k, panel]; columns beyond n are zero. bfloat16 if every
            weight is exactly a bfloat16, else float32. A native bfloat16 panel
            alternates columns j and j + panel / 2, so that one 32-bit lane holds both.
    """

    n: int
    k: int
    panel: int
    data: Tensor


AnyWeight = Tensor | PackedWeight | QuantizedWeight | QuantizedPanels
"""A weight [N, K] of a product."""

TILE = 1 << 18
"""Weights that a product on the CPU dequantises at a time."""


def pack_weight(weight: Tensor) -> PackedWeight:
    """Pack weight [N, K] (float32, bfloat16 or float16) for `linear`; copies it.

    Raises:
        ValueError: the weight is not a floating-point matrix, or it is empty.
    """
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise ValueError(
            f"pack_weight: got {weight.dtype} {tuple(weight.shape)}, expected a "
            "non-empty floating-point [N, K]"
        )
    n, k = weight.shape
    weight = weight.detach()
    if not (weight.is_cpu and native_available()):
        wide = weight.float().t().contiguous()
        return PackedWeight(n=n, k=k, panel=n, data=wide[None])
    data = pack_panels(weight, torch.bfloat16)
    if data is None:
        data = pack_panels(weight, torch.float32)
    assert data is not None
    return PackedWeight(n=n, k=k, panel=PANEL, data=data)


def pack_panels(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return `PackedWeight.data` of a weight [N, K] in the native format.

    Returns None unless every weight is exactly of `dtype`, bfloat16 or float32.
    """
    n, k = weight.shape
    panels = -(-n // PANEL)
    if dtype == torch.bfloat16 and weight.dtype != dtype:
        # A float32 is a bfloat16 if the lower half of its bits is zero.
        weight = weight.float()
        if bool((weight.view(torch.int32) & 0xFFFF).any()):
            return None
    padded = functional.pad(weight.to(dtype), (0, 0, 0, panels * PANEL - n))
    if dtype == torch.float32:
        return padded.view(panels, PANEL, k).transpose(1, 2).contiguous()
    halves = padded.view(panels, 2, PANEL // 2, k).permute(0, 3, 2, 1)
    return halves.reshape(panels, k, PANEL)


def unpack_weight(weight: PackedWeight) -> Tensor:
    """Return the packed weight as float32 [N, K]."""
    data = weight.data
    if data.dtype == torch.bfloat16:
        pairs = data.view(data.shape[0], weight.k, weight.panel // 2, 2)
        data = pairs.transpose(2, 3).reshape(data.shape).float()
    return data.transpose(1, 2).reshape(-1, weight.k)[: weight.n]


def linear_ref(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """out = x @ weight.T + bias.

    With a `PackedWeight` on the native kernels each output is one float32 sum in
    ascending order of k, so a row's result does not depend on the rows of the batch,
    bit by bit. In torch it is a float32 product, rounded to the dtype of `x`. A plain
    weight makes no such promise: a few rows of half precision go to dedicated kernels
    where those measured faster, everything else goes to torch.

    A `QuantizedWeight` stands for its float32 values. Many rows of a GPU may be rounded
    to 8 bits as well, if it says so (`quantizes_inputs`).

    Args:
        x: [..., K]; float32, bfloat16 or float16.
        weight: [N, K] of the dtype of `x`, packed, or quantised.
        bias: [N] of the dtype of `x`, or None.
        out: [..., N] of the dtype of `x`, contiguous. Allocated if None.

    Returns:
        `out`.
    """
    if isinstance(weight, PackedWeight):
        # In the fallback format this is a view: torch is fastest with [K, N] in memory.
        result = torch.matmul(x.float(), unpack_weight(weight).t())
        if bias is not None:
            result = result + bias.float()
        result = result.to(x.dtype)
        return result if out is None else out.copy_(result)
    if isinstance(weight, QuantizedWeight):
        weight = QuantizedPanels.pack(weight)
    if isinstance(weight, QuantizedPanels):
        return linear_by_panels(x, weight, bias, out, _multiply_panels)
    if out is None:
        return functional.linear(x, weight, bias)
    rows, target = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=target)
    else:
        torch.addmm(bias, rows, weight.t(), out=target)
    return out


def linear_by_panels(
    x: Tensor,
    weight: QuantizedPanels,
    bias: Tensor | None,
    out: Tensor | None,
    multiply: Callable[[Tensor, Tensor, int, Tensor | None], Tensor],
) -> Tensor:
    """`linear` that dequantises some panels at a time.

    Args:
        multiply: returns rows [T, K] times panels [p, K, 32], of which the first
            outputs are kept, plus their biases; float32.
    """
    n, step = weight.n, max(TILE // (weight.k * PANEL), 1)
    if out is None:
        out = x.new_empty(*x.shape[:-1], n)
    wide, target = weight.in_order(x).reshape(-1, weight.k).float(), out.view(-1, n)
    for panel in range(0, len(weight.codes), step):
        panels = weight.dequantize(panel, panel + step)
        first, last = panel * PANEL, min((panel + step) * PANEL, n)
        part = None if bias is None else bias[first:last].float()
        target[:, first:last] = multiply(wide, panels, last - first, part)
    return out


def _multiply_panels(
    x: Tensor, panels: Tensor, outputs: int, bias: Tensor | None
) -> Tensor:
    rows = panels.transpose(1, 2).flatten(0, 1)[:outputs]
    return functional.linear(x, rows, bias)


linear = Op(
    reference=linear_ref,
    native="sglang.srt.layers.ops.linear.native:linear",
    triton=_TRITON + "linear",
)


def linear_into(
    x: Tensor, weight: AnyWeight, bias: Tensor | None, residual: Tensor
) -> Tensor | None:
    """residual += x @ weight.T + bias, if the library can add while it multiplies.

    That saves a pass over the residual whenever cuBLAS multiplies many rows. The sum is
    then rounded once instead of twice.

    Args:
        x: [T, K]. weight: [N, K] as in `linear`. bias: [N] or None.
        residual: [T, N] of the dtype of `x`, contiguous; overwritten or left alone.

    Returns:
        None if the product was added, else the product [T, N], which the caller adds.
    """
    if not isinstance(weight, Tensor):
        return linear(x, weight, bias)
    if bias is None and x.is_cuda and x.shape[0] >= ADD_ROWS:
        residual.addmm_(x, weight.t())
        return None
    return linear(x, weight, bias)


def linear_add_ref(x: Tensor, weight: AnyWeight, residual: Tensor) -> Tensor:
    """residual += x @ weight.T, in place.

    One launch on CUDA if `linear` would use the weight-streaming kernels, which round
    the product before they add it, or if cuBLAS adds, which does not round it first.

    Args:
        x: [T, K]; float32, bfloat16 or float16.
        weight: [N, K] as in `linear`.
        residual: [T, N] of the dtype of `x`, contiguous.

    Returns:
        `residual`.
    """
    pending = linear_into(x, weight, None, residual)
    return residual if pending is None else residual.add_(pending)


linear_add = Op(reference=linear_add_ref, triton=_TRITON + "linear_add")


def linear_gated_ref(
    x: Tensor,
    weight: AnyWeight,
    activation: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """out = activation(x @ gate.T) * (x @ up.T), where `weight` is [gate | up] rows.

    One launch on CUDA if `linear` would also use the weight-streaming kernels; two ops
    everywhere else.

    Args:
        x: [T, K]; float32, bfloat16 or float16.
        weight: [2 * I, K] as in `linear`.
        activation: a key of `GATED`.
        out: [T, I] of the dtype of `x`, contiguous. Allocated if None.

    Returns:
        `out`; equals the activation of `linear(x, weight)` except for rounding.
    """
    return GATED[activation](linear(x, weight), out=out)


linear_gated = Op(reference=linear_gated_ref, triton=_TRITON + "linear_gated")
