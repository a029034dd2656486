"""A pattern in the slots of one pool, by which a stray write is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.records import POISON_WORD, Record
from sglang.srt.kv_canary.kernels import poison

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_canary.state import CanaryState
    from sglang.srt.mem_cache.memory_pool import KVCache

PATTERN_BYTE = 0xB5
"""A small negative number in every float format: attention that reads past a row, and
masks what it read, must not meet a NaN."""

SLOTS_AT_ONCE = 256
"""Slots whose bytes are gathered at once: those of large models are megabytes."""


class PoolPattern:
    """`SlotPattern` of a pool and its records, which are poisoned.

    Args:
        buffers: uint8 [layers, slots, ...] each.
    """

    def __init__(self, state: CanaryState, buffers: Sequence[Tensor]) -> None:
        self._state = state
        self._buffers = buffers

    @classmethod
    def of(cls, state: CanaryState, pool: KVCache) -> PoolPattern:
        """Return the pattern of a KV pool."""
        sources = pool.canary_sources()
        return cls(state, [source.buffer.view(torch.uint8) for source in sources])

    def fill(self, slots: Tensor) -> None:
        """Fill `slots` (int64 [n], host) in stream order."""
        where = slots.to(self._state.head.device)
        poison(self._state, where)
        for buffer in self._buffers:
            buffer[:, where] = PATTERN_BYTE

    def is_intact(self, slots: Tensor) -> Tensor:
        """bool [n] on the host: neither bytes nor records have changed since."""
        where = slots.to(self._state.head.device)
        parts = [self._is_intact(part) for part in where.split(SLOTS_AT_ONCE)]
        return torch.cat(parts).cpu()

    def _is_intact(self, where: Tensor) -> Tensor:
        intact = torch.ones_like(where, dtype=torch.bool)
        for records in (self._state.head, self._state.tail):
            intact &= records[where, Record.WORD0] == POISON_WORD
        for buffer in self._buffers:
            same = buffer[:, where] == PATTERN_BYTE
            intact &= same.flatten(2).all(dim=2).all(dim=0)
        return intact
