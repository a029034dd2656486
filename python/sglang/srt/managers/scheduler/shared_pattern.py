"""Judges quarantined slots, identically on every tensor parallel rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import TensorParallelGroup
    from sglang.srt.mem_cache.quarantine import SlotPattern


class SharedPattern:
    """A slot is intact if no rank has seen a change in its part of it."""

    def __init__(self, pattern: SlotPattern, group: TensorParallelGroup) -> None:
        self._pattern = pattern
        self._group = group

    def fill(self, slots: Tensor) -> None:
        self._pattern.fill(slots)

    def is_intact(self, slots: Tensor) -> Tensor:
        """Return the verdict of all ranks; all ranks must call this."""
        own = self._pattern.is_intact(slots)
        every = self._group.all_gather_bytes(own.numpy().tobytes())
        parts = [torch.frombuffer(bytearray(of), dtype=torch.bool) for of in every]
        return torch.stack(parts).all(dim=0)
