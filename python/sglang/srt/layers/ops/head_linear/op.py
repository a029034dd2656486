"""Products of each head's channels with that head's own matrix.

Latent attention can read latents directly if each head's query is first multiplied by
the head's key projection, and its result afterwards by the head's value projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kv_canary.op import native_available
from sglang.srt.layers.ops.linear.op import (
    PackedWeight,
    pack_panels,
    unpack_weight,
)
from sglang.srt.layers.ops.linear.quantized import PANEL
from sglang.srt.utils.dispatch import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedHeads:
    """Weights [H, N, K] in the order in which the native product reads them.

    Fields:
        n: outputs per head.
        data: [H, ceil(N / PANEL), K, PANEL]: for each head, as in `PackedWeight`.
    """

    n: int
    data: Tensor


def pack_heads(weight: Tensor) -> Tensor | PackedHeads:
    """Prepare weights [H, N, K] for `head_linear`. They are packed if the native
    kernels compute in float32, and otherwise returned unchanged."""
    is_native = weight.is_cpu and weight.dtype == torch.float32 and native_available()
    if not is_native:
        return weight
    heads, n, k = weight.shape
    panels = -(-n // PANEL)
    rows = functional.pad(weight, (0, 0, 0, panels * PANEL - n)).reshape(-1, k)
    data = pack_panels(rows, torch.bfloat16)
    if data is None:
        data = pack_panels(rows, torch.float32)
    assert data is not None
    return PackedHeads(n=n, data=data.view(heads, panels, k, PANEL))


def unpack_heads(weight: PackedHeads) -> Tensor:
    """Return the packed weights as float32 [H, N, K]."""
    heads, panels, k, _ = weight.data.shape
    rows = heads * panels * PANEL
    data = weight.data.view(-1, k, PANEL)
    flat = unpack_weight(PackedWeight(n=rows, k=k, panel=PANEL, data=data))
    return flat.view(heads, -1, k)[:, : weight.n]


def head_linear_ref(
    x: Tensor, weight: Tensor | PackedHeads, *, out: Tensor | None = None
) -> Tensor:
    """out[:, h] = x[:, h] @ weight[h].T.

    With packed weights each output is one float32 sum in ascending order of k, so a
    token's result does not depend on the batch, bit by bit. Plain weights make no such
    promise.

    Args:
        x: [T, H, K], channels contiguous; float32, bfloat16 or float16.
        weight: [H, N, K] of the dtype of `x`, any strides, or packed.
        out: [T, H, N] of the dtype of `x`, channels contiguous. Allocated if None.

    Returns:
        `out`.
    """
    if isinstance(weight, PackedHeads):
        weight = unpack_heads(weight)
    if out is None:
        out = x.new_empty(*x.shape[:2], weight.shape[1])
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out


head_linear = Op(
    reference=head_linear_ref,
    native="sglang.srt.layers.ops.head_linear.native:head_linear",
    triton="sglang.srt.layers.ops.head_linear.triton:head_linear",
)
