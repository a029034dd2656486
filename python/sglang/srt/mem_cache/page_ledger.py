"""Ownership of pages, and the order in which free pages are reused.

Pages 1..num_pages can be allocated; page 0 is scratch and never is. Everything is host
memory. Knows no slots, devices or requests.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class PageJournal:
    """The pages that were taken and given back since the last `drain`, kept as the
    arrays they came in."""

    def __init__(self) -> None:
        self.taken: list[IntArray] = []
        self.given: list[IntArray] = []

    def drain(self) -> tuple[list[IntArray], list[IntArray]]:
        """Return (taken, given), each in order, and empty the journal."""
        drained = self.taken, self.given
        self.taken, self.given = [], []
        return drained


class PageLedger:
    """Free stack and ownership bits of `num_pages` pages.

    Reuse is last-in first-out by batch: the pages of the latest `give` are taken first,
    in the order they were given. So a fresh ledger yields 1, 2, 3, ..., and a freed run
    of pages is reused as the same run. Early reuse keeps caches warm and soon reveals a
    use after free.

    Attributes:
        journal: records what is taken and given, or None to record nothing.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.journal: PageJournal | None = None
        self._stack: IntArray = np.empty(num_pages, dtype=np.int64)
        self._owned = np.zeros(num_pages + 1, dtype=np.bool_)
        self._top = 0
        self.clear()

    @property
    def num_free(self) -> int:
        """Pages that `take` can allocate now."""
        return self._top

    def clear(self) -> None:
        """Make every page free, in ascending order of reuse."""
        self._stack[:] = np.arange(self.num_pages, 0, -1)
        self._owned[:] = False
        self._top = self.num_pages

    def take(self, count: int) -> IntArray | None:
        """Take ownership of `count` pages, int64 [count], or None if there are too
        few."""
        if count > self._top:
            return None
        low = self._top - count
        pages: IntArray = self._stack[low : self._top][::-1].copy()
        self._top = low
        self._owned[pages] = True
        if self.journal is not None:
            self.journal.taken.append(pages)
        return pages

    def take_these(self, pages: IntArray) -> None:
        """Take ownership of these distinct free pages, wherever they are in the
        stack."""
        free = self._stack[: self._top]
        left = free[~np.isin(free, pages)]
        self._top = len(left)
        self._stack[: self._top] = left
        self._owned[pages] = True
        if self.journal is not None:
            self.journal.taken.append(pages)

    def disown(self, pages: IntArray) -> None:
        """Drop ownership of distinct owned pages; `give` makes them available."""
        self._owned[pages] = False

    def give(self, pages: IntArray) -> None:
        """Put distinct disowned pages on the free stack."""
        high = self._top + len(pages)
        self._stack[self._top : high] = pages[::-1]
        self._top = high
        if self.journal is not None:
            self.journal.given.append(pages)

    def save(self) -> IntArray:
        """Return the free pages in reverse order of reuse, for `load`."""
        free: IntArray = self._stack[: self._top].copy()
        return free

    def load(self, free: IntArray) -> None:
        """Make exactly these pages free; all others are owned.

        Raises:
            ValueError: these are not distinct pages of this ledger.
        """
        is_valid = len(free) <= self.num_pages and bool(
            ((free >= 1) & (free <= self.num_pages)).all()
        )
        if not is_valid or len(np.unique(free)) != len(free):
            raise ValueError(f"not a free stack of {self.num_pages} pages")
        self._stack[: len(free)] = free
        self._top = len(free)
        self._owned[1:] = True
        self._owned[free] = False

    def owns(self, pages: IntArray) -> NDArray[np.bool_]:
        """Return whether a caller owns each of these pages (0..num_pages)."""
        return self._owned[pages]

    def owned_pages(self) -> IntArray:
        """Return all owned pages, ascending."""
        return np.flatnonzero(self._owned)


class LastSeen:
    """Duplicate finder in O(n) without sorting: one int64 cell per possible value."""

    def __init__(self, num_values: int) -> None:
        self._cell: IntArray = np.zeros(num_values, dtype=np.int64)

    def is_last(self, values: IntArray) -> NDArray[np.bool_]:
        """Return bool [n]: True where a value occurs for the last time in `values`."""
        index = np.arange(len(values), dtype=np.int64)
        self._cell[values] = index
        last: NDArray[np.bool_] = self._cell[values] == index
        return last


def page_divider(page_size: int) -> Callable[[IntArray], IntArray]:
    """Return the fastest exact `values // page_size` for non-negative int64 arrays."""
    if page_size == 1:
        return lambda values: values
    if page_size & (page_size - 1) == 0:
        shift = page_size.bit_length() - 1
        return lambda values: values >> shift
    return lambda values: values // page_size
