"""KV slots of draft branches: a tail of the draft's pool, with slots for each row.

```
draft's pool | scratch | slots of the allocator | row 1 | row 2 | ... | filling |
```
They follow the allocator's last slot, so the allocator, the prefix cache, sweeps and
quarantine never see them, and only the draft's pool has bytes for them. Host
arithmetic; knows no pools or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRegion:
    """The draft slots of all rows.

    Fields:
        first_slot: first slot after the allocator's last, at a page boundary.
        rows: request rows, 1 .. rows.
        columns: slots per row.
        page_size: page size of the pool.

    Raises:
        ValueError: a region without slots, or one that does not begin a page.
    """

    first_slot: int
    rows: int
    columns: int
    page_size: int

    def __post_init__(self) -> None:
        if min(self.rows, self.columns, self.first_slot) < 1:
            raise ValueError(f"a draft region needs slots: {self}")
        if self.first_slot % self.page_size:
            raise ValueError(f"a draft region must begin at a page boundary: {self}")

    @property
    def size(self) -> int:
        """Slots that the pool needs for it: whole pages."""
        return region_size(
            rows=self.rows, columns=self.columns, page_size=self.page_size
        )

    def table(self) -> NDArray[np.int32]:
        """Return [rows + 1, columns], the slots of every row. Row 0, padding, has
        scratch slots."""
        slots = np.zeros((self.rows + 1, self.columns), dtype=np.int32)
        count = self.rows * self.columns
        slots[1:].ravel()[:] = self.first_slot + np.arange(count, dtype=np.int32)
        return slots

    def rows_to_slots(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Return all slots of these rows, row after row."""
        firsts = self.first_slot + (np.asarray(rows, dtype=np.int64) - 1) * self.columns
        slots: NDArray[np.int64] = firsts[:, None] + np.arange(self.columns)
        return slots.ravel()

    def slot_to_row(self, slot: int) -> int:
        """Return the request row that a slot belongs to, or 0 if none."""
        place = slot - self.first_slot
        if not 0 <= place < self.rows * self.columns:
            return 0
        return 1 + place // self.columns


def region_size(*, rows: int, columns: int, page_size: int) -> int:
    """Return the slots of a region in whole pages; 0 for no columns."""
    return -(-rows * columns // page_size) * page_size
