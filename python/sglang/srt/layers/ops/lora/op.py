"""The products of LoRA adapters, for tokens with different adapters in one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sglang.srt.utils.dispatch import Op

if TYPE_CHECKING:
    from sglang.srt.forward.adapter_tiles import AdapterTiles

FEW_TILES = 64
"""Up to this many tiles several programs share a sum, to use all multiprocessors."""


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


def lora_add_ref(
    y: Tensor, x: Tensor, stack: AdapterStack, tiles: AdapterTiles
) -> Tensor:
    """y[t, shard] += (x[t] @ a[slot, shard].T) @ b[slot, shard].T for each token t of
    the tiles, in place.

    Sums are float32; the inner product and the result are rounded to the dtype.

    Args:
        y: [T, N], rows contiguous. x: [T, K] of the same dtype: float32, bfloat16 or
            float16.
        stack: of the same dtype.

    Returns:
        `y`.
    """
    rank = stack.rank
    slots, rows = (tiles.slots.long() - 1).clamp(min=0), tiles.rows.long()
    live = (rows >= 0) & (tiles.slots > 0)[:, None]
    rows = rows.clamp(min=0)
    inner = torch.bmm(x[rows].float(), stack.a[slots].float().transpose(1, 2))
    inner = inner.to(x.dtype).float()
    total = y.float()
    start = 0
    for shard, size in enumerate(stack.sizes):
        b = stack.b[slots, start : start + size].float()
        own = inner[:, :, shard * rank : (shard + 1) * rank]
        gained = torch.bmm(own, b.transpose(1, 2))
        # A token that is not there adds nothing to token 0.
        gained = torch.where(live[:, :, None], gained, 0.0)
        part = total[:, start : start + size]
        part.index_add_(0, rows.flatten(), gained.flatten(0, 1))
        start += size
    return y.copy_(total)


lora_add = Op(
    reference=lora_add_ref, triton="sglang.srt.layers.ops.lora.triton:lora_add"
)
