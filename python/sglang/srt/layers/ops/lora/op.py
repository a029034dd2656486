"""The products of LoRA adapters, for tokens with different adapters in one batch.

A product has two halves: A, then B (`lora_expand`). The A of all slots may be rows
behind those of the layer's weight; then the layer's own product computes the first half
as further outputs. Otherwise `lora_shrink` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sglang.srt.layers.ops.activation.op import GATED
from sglang.srt.utils.dispatch import Op

if TYPE_CHECKING:
    from sglang.srt.forward.adapter_tiles import AdapterTiles


class AdapterStack(NamedTuple):
    """The adapters of one layer, by slot; slot s is entry s - 1.

    A layer may pack several checkpoint tensors, its shards (q, k and v), each of which
    has its own adapter.

    Fields:
        a: [slots, shards * R, K]; rows beyond an adapter's rank are 0. Slots may have
            any stride.
        b: [slots, N, R], scaled; row n belongs to the shard that output n is in.
        ranks: int32 [1 + slots], rank of each slot's adapter; 0 for slot 0 and empty
            slots.
        sizes: outputs of each shard, N in all; at most three shards.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    sizes: tuple[int, ...]

    @property
    def rank(self) -> int:
        """R, to which all ranks are padded; a multiple of 16."""
        return self.b.shape[2]

    @property
    def width(self) -> int:
        """Columns of a slot's inner product."""
        return len(self.sizes) * self.rank


def lora_shrink_ref(x: Tensor, stack: AdapterStack, tiles: AdapterTiles) -> Tensor:
    """inner[tile, m] = x[token m of the tile] @ a[slot of the tile].T

    Args:
        x: [T, K], rows contiguous; float32, bfloat16 or float16.
        stack: of the same dtype.

    Returns:
        float32 [parts, tiles, TILE, shards * R], whose sum over the parts is the
        product. Undefined where there is no token and beyond an adapter's rank.
    """
    slots = (tiles.slots.long() - 1).clamp(min=0)
    rows = tiles.rows.long().clamp(min=0, max=len(x) - 1)
    return torch.bmm(x[rows].float(), stack.a[slots].float().transpose(1, 2))[None]


lora_shrink = Op(
    reference=lora_shrink_ref, triton="sglang.srt.layers.ops.lora.triton:lora_shrink"
)


def lora_expand_ref(
    y: Tensor,
    inner: Tensor | None,
    stack: AdapterStack,
    tiles: AdapterTiles,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """out[t, shard] = y[t, shard] + inner[t, shard] @ b[slot, shard].T for each token t
    that has an adapter, and y[t] for the others.

    Sums are float32; the inner product and the result are rounded to the dtype.

    Args:
        y: [T, N], rows contiguous, of the dtype of the stack.
        inner: from `lora_shrink` with the same tiles. If None, y is [T, N + slots *
            width], with the inner products of all slots behind the outputs.
        out: [T, N], contiguous. If None, `y` with `inner` and a new tensor without.

    Returns:
        `out`.
    """
    rank = stack.rank
    if out is None:
        out = y if inner is not None else y.new_empty(len(y), sum(stack.sizes))
    slots, rows = (tiles.slots.long() - 1).clamp(min=0), tiles.rows.long()
    live = (rows >= 0) & (tiles.slots > 0)[:, None]
    rows = rows.clamp(min=0, max=len(y) - 1)
    if inner is None:
        behind = y[:, out.shape[1] :].unflatten(1, (-1, stack.width))
        rounded = behind[rows, slots[:, None]].float()
    else:
        rounded = inner.sum(0).to(y.dtype).float()
    total = y[:, : out.shape[1]].to(torch.float32, copy=True)
    start = 0
    for shard, size in enumerate(stack.sizes):
        b = stack.b[slots, start : start + size].float()
        own = rounded[:, :, shard * rank : (shard + 1) * rank]
        gained = torch.bmm(own, b.transpose(1, 2))
        # A token that is not there adds nothing to token 0.
        gained = torch.where(live[:, :, None], gained, 0.0)
        part = total[:, start : start + size]
        part.index_add_(0, rows.flatten(), gained.flatten(0, 1))
        start += size
    return out.copy_(total)


lora_expand = Op(
    reference=lora_expand_ref, triton="sglang.srt.layers.ops.lora.triton:lora_expand"
)


def lora_expand_gated_ref(
    y: Tensor,
    inner: Tensor | None,
    stack: AdapterStack,
    tiles: AdapterTiles,
    activation: str,
) -> Tensor:
    """activation(gate) * up, where [gate | up] is `lora_expand` of the same.

    Args:
        y: may be overwritten. Every row must be in a tile.
        activation: a key of `GATED`.

    Returns:
        [T, I].
    """
    return GATED[activation](lora_expand_ref(y, inner, stack, tiles))


lora_expand_gated = Op(
    reference=lora_expand_gated_ref,
    triton="sglang.srt.layers.ops.lora.triton:lora_expand_gated",
)
