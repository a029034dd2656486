"""Static inputs of graphs for batches in which tokens have adapters."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from sglang.srt.forward.adapter_tiles import TILE, AdapterTiles, most_tiles

if TYPE_CHECKING:
    from sglang.srt.forward.batch import CaptureHiddenMode, ForwardBatch, HostLens
    from sglang.srt.model_executor.input_buffers import GraphInputs


class AdapterInputs:
    """Other static inputs, and the tiles of their tokens.

    Args:
        inner: the other inputs.
        num_slots: adapters that a batch may have.
    """

    def __init__(
        self,
        inner: GraphInputs,
        *,
        max_rows: int,
        num_slots: int,
        device: torch.device | str,
    ) -> None:
        self._inner = inner
        self.forward_mode = inner.forward_mode
        self.tokens_per_row = inner.tokens_per_row
        self._num_slots = num_slots
        self._words = torch.zeros(
            self._count(max_rows), 1 + TILE, dtype=torch.int32, device=device
        )
        self._filled = 0

    def _count(self, rows: int) -> int:
        return most_tiles(rows * self.tokens_per_row, self._num_slots)

    def static_batch(
        self,
        bs: int,
        capture_hidden_mode: CaptureHiddenMode,
        *,
        lens_cpu: HostLens | None = None,
    ) -> ForwardBatch:
        inner = self._inner.static_batch(bs, capture_hidden_mode, lens_cpu=lens_cpu)
        tiles = AdapterTiles(words=self._words[: self._count(bs)])
        return dataclasses.replace(inner, adapters=tiles)

    def populate(self, forward_batch: ForwardBatch) -> None:
        """Copy a live batch in; the tiles after its own become unused."""
        self._inner.populate(forward_batch)
        tiles = forward_batch.adapters
        assert tiles is not None
        count = len(tiles.words)
        self._words[:count].copy_(tiles.words)
        if count < self._filled:
            self._words[count : self._filled].zero_()
        self._filled = count
