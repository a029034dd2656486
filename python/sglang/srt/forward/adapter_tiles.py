"""Which tokens of a forward have which adapter, in tiles of one adapter each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TILE = 16
"""Tokens per tile: the least number of rows that a tensor core multiplies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTiles:
    """All tokens of a forward, sorted by adapter.

    Fields:
        words: int32 [tiles, 1 + TILE]. Word 0 is the slot of the tile's adapter, or 0
            for tokens without one; the others are indices of tokens, or -1. Tokens
            without an adapter may be beyond the end of the forward.
        groups: of the tokens with an adapter, on the host for the CPU: (slot, int64
            indices of its tokens). None on a GPU.
        slots_read: slots of its adapters, if the host knows them.
    """

    words: Tensor
    groups: tuple[tuple[int, Tensor], ...] | None = None
    slots_read: frozenset[int] = frozenset()

    @property
    def slots(self) -> Tensor:
        """int32 [tiles]."""
        return self.words[:, 0]

    @property
    def rows(self) -> Tensor:
        """int32 [tiles, TILE]."""
        return self.words[:, 1:]

    @classmethod
    def on_cpu(cls, words: npt.NDArray[np.int32]) -> AdapterTiles:
        """Wrap planned tiles for the CPU."""
        groups = []
        for slot in np.unique(words[words[:, 0] > 0, 0]).tolist():
            rows = words[words[:, 0] == slot, 1:].ravel()
            groups.append((slot, torch.from_numpy(rows[rows >= 0].astype(np.int64))))
        return cls(words=torch.from_numpy(words), groups=tuple(groups))


def plan_tiles(
    slots: npt.NDArray[np.int64], lens: npt.NDArray[np.int64] | int
) -> npt.NDArray[np.int32] | None:
    """Plan the tiles of a batch, or return None if no row has an adapter.

    Args:
        slots: int64 [R], slot of each row's adapter, 0 for none.
        lens: int64 [R] or one number, new tokens of each row.
    """
    if not slots.any():
        return None
    of_tokens = np.repeat(slots, lens)
    tiles = []
    for slot in np.unique(slots).tolist():
        rows = np.flatnonzero(of_tokens == slot)
        count = -(-len(rows) // TILE)
        words = np.full((count, 1 + TILE), -1, dtype=np.int32)
        words[:, 0] = slot
        padded = np.full(count * TILE, -1, dtype=np.int32)
        padded[: len(rows)] = rows
        words[:, 1:] = padded.reshape(count, TILE)
        tiles.append(words)
    return np.concatenate(tiles)


def most_tiles(tokens: int, groups: int) -> int:
    """Return how many tiles `tokens` tokens make that are sorted into up to `groups`
    groups."""
    return min(tokens, tokens // TILE + groups)
