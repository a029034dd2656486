"""KV bytes of a model with sliding windows: a pool of its full layers, one of others.

Everybody names a token by its slot of the full group; what belongs to sliding layers is
found through the mapping of `SwaSlots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.memory_pool import (
    CanarySource,
    KVCache,
    MHATokenToKVPool,
    TransferDescriptor,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.swa_slots import SwaSlots


class SWAKVPool(KVCache):
    """Two pools of one model.

    Args:
        size, page_size: of the full group, as everywhere.
        region_size: slots of it that are a draft region's; the window group has as
            many after its own.
        is_sliding: of every layer, whether it has a sliding window; both kinds occur.
        swa: the window slots and their mapping.

    Attributes:
        swa: the same.
        first_sliding: the first layer that has a window.
    """

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        is_sliding: Sequence[bool],
        head_num: int,
        head_dim: int,
        device: str | torch.device,
        swa: SwaSlots,
        region_size: int = 0,
    ) -> None:
        super().__init__(
            size=size,
            page_size=page_size,
            dtype=dtype,
            layer_num=len(is_sliding),
            device=device,
        )
        self.swa = swa
        self.full_pool, self.swa_pool = (
            MHATokenToKVPool(
                size=slots,
                page_size=page_size,
                dtype=dtype,
                layer_num=sum(flag is sliding for flag in is_sliding),
                head_num=head_num,
                head_dim=head_dim,
                device=device,
            )
            for slots, sliding in ((size, False), (swa.size + region_size, True))
        )
        self._place = [
            (self.pool_of(sliding), sum(flag is sliding for flag in is_sliding[:layer]))
            for layer, sliding in enumerate(is_sliding)
        ]
        self._is_sliding = tuple(is_sliding)
        self.first_sliding = self._is_sliding.index(True)

    def pool_of(self, is_sliding: bool) -> MHATokenToKVPool:
        """The pool of one group."""
        return self.swa_pool if is_sliding else self.full_pool

    def is_sliding(self, layer_id: int) -> bool:
        """Whether this layer's KV is in window slots."""
        return self._is_sliding[layer_id]

    def place_in_group(self, layer_id: int) -> int:
        """The number of a layer in the pool of its group."""
        return self._place[layer_id][1]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        pool, layer = self._place[layer_id]
        return pool.get_kv_buffer(layer)

    def set_kv_buffer(
        self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        pool, layer = self._place[layer_id]
        if self._is_sliding[layer_id]:
            slots = self.swa.full_to_swa_index_mapping[slots]
        pool.set_kv_buffer(layer, slots, k, v)

    def _move(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        mapping = self.swa.full_to_swa_index_mapping
        self.full_pool.move_kv_cache(dst, src)
        self.swa_pool.move_kv_cache(mapping[dst], mapping[src])

    def canary_sources(self) -> tuple[CanarySource, ...]:
        return (*self.full_pool.canary_sources(), *self.swa_pool.canary_sources())

    def _own_transfer_descriptors(self) -> list[TransferDescriptor]:
        raise NotImplementedError(
            "a pool with window slots cannot be transferred: the two groups have "
            "different slots"
        )
