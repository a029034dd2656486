"""Static inputs of graphs for batches in which tokens have adapters."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from sglang.srt.forward.adapter_tiles import TILE, AdapterTiles, most_tiles

if TYPE_CHECKING:
    from sglang.srt.forward.batch import CaptureHiddenMode, ForwardBatch, HostLens
    from sglang.srt.model_executor.input_buffers import GraphInputs


class StaticTiles:
    """Tiles at a fixed address. Padding has no adapter, but is in tiles, too, because
    some kernels compute no other tokens.

    Args:
        max_tokens: tokens of the largest graph.
        num_slots: adapters that a batch may have.
    """

    def __init__(
        self, *, max_tokens: int, num_slots: int, device: torch.device | str
    ) -> None:
        # The adapters, tokens without one, and padding.
        self._groups = num_slots + 2
        self._total = most_tiles(max_tokens, self._groups)
        # Padding that begins at token 16 i + j: entries i and later of row j.
        count = max_tokens // TILE + 1 + self._total
        tokens = torch.arange(count * TILE, dtype=torch.int32).view(1, count, TILE)
        tokens = tokens + torch.arange(TILE, dtype=torch.int32)[:, None, None]
        slots = torch.zeros(TILE, count, 1, dtype=torch.int32)
        self._padding = torch.cat((slots, tokens), dim=2).to(device)
        self._words = self._padding[0, : self._total].clone()

    def of(self, tokens: int) -> AdapterTiles:
        """Return those that a graph of `tokens` tokens reads."""
        return AdapterTiles(words=self._words[: most_tiles(tokens, self._groups)])

    def populate(self, tiles: AdapterTiles | None, tokens: int) -> None:
        """Copy those of a live batch of `tokens` tokens in; the host does not wait."""
        assert tiles is not None
        padding = self._padding[tokens % TILE, tokens // TILE :]
        padding = padding[: self._total - len(tiles.words)]
        torch.cat((tiles.words, padding), out=self._words)


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
        self._tiles = StaticTiles(
            max_tokens=max_rows * inner.tokens_per_row,
            num_slots=num_slots,
            device=device,
        )

    def static_batch(
        self,
        bs: int,
        capture_hidden_mode: CaptureHiddenMode,
        *,
        lens_cpu: HostLens | None = None,
    ) -> ForwardBatch:
        inner = self._inner.static_batch(bs, capture_hidden_mode, lens_cpu=lens_cpu)
        tiles = self._tiles.of(bs * self.tokens_per_row)
        return dataclasses.replace(inner, adapters=tiles)

    def populate(self, forward_batch: ForwardBatch) -> None:
        """Copy a live batch in; other rows become padding."""
        self._inner.populate(forward_batch)
        self._tiles.populate(forward_batch.adapters, forward_batch.num_tokens)
