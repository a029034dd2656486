"""The blocks of each request, on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from kv_canary.runtime.uploads import upload, upload_rows


class NewBlocks(NamedTuple):
    """Blocks that a row gets from index `begin` on. If that is 0, its others go."""

    row: int
    begin: int
    blocks: Sequence[int]


class BlockTable:
    """What lies in the blocks of each row: slots, or the blocks themselves.

    Args:
        rows: number of rows. blocks: most blocks of one; later ones are left out.
        size: entries of a block, which are `block * size + i`.
        empty: entry where no block is.

    Attributes:
        entries: [rows, blocks * size] int32.
    """

    def __init__(
        self, rows: int, blocks: int, *, size: int, empty: int, device: torch.device
    ) -> None:
        shape = (rows, blocks * size)
        self.entries = torch.full(shape, empty, dtype=torch.int32, device=device)
        self._of_blocks = self.entries.view(rows * blocks, size)
        self._offsets = torch.arange(size, device=device)
        self._blocks, self._size, self._empty = blocks, size, empty

    def set(self, changes: Iterable[NewBlocks]) -> None:
        """Set the blocks of all rows in one copy. Rows of equal length need a new block
        in the same step."""
        device, began = self.entries.device, []
        places: list[int] = []
        values: list[int] = []
        for row, begin, blocks in changes:
            if begin == 0:
                began.append(row)
            first, count = row * self._blocks + begin, max(self._blocks - begin, 0)
            values += blocks[:count]
            places += range(first, first + min(len(blocks), count))
        if began:
            rows = upload(torch.tensor(began), device)
            self.entries.index_fill_(0, rows, self._empty)
        if places:
            at, found = upload_rows([places, values], device)
            entries = found[:, None] * self._size + self._offsets
            self._of_blocks.index_copy_(0, at, entries.to(torch.int32))
