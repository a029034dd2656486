"""Damaged pages that are watched before they are used again.

```
blamed --> set aside, filled with a pattern --> two forwards --> intact: freed
                                                                 changed: kept
```
Owns the pages meanwhile. Knows neither requests nor why a page is here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.page_ledger import IntArray

logger = logging.getLogger(__name__)

FORWARDS_WATCHED = 2


class SlotPattern(Protocol):
    """A pattern written to everything that belongs to a slot of one pool."""

    def fill(self, slots: torch.Tensor) -> None:
        """Fill `slots` (int64 [n], host) in stream order."""

    def is_intact(self, slots: torch.Tensor) -> torch.Tensor:
        """Return bool [n] on the host: whether the slot was left alone since. Waits for
        the device."""


class PageOwner(Protocol):
    """The allocator, or `PagedSlots` for the pages of a secondary group."""

    page_size: int

    def set_aside(self, pages: IntArray) -> None:
        """Make the caller the holder of distinct free pages."""

    def page_slots(self, pages: IntArray) -> IntArray:
        """All slots of pages."""

    def free(self, slots: torch.Tensor) -> None:
        """Free pages by their slots."""


class _Watched(NamedTuple):
    due: int
    pages: IntArray


class Quarantine:
    """Keeps pages out of circulation until they have proven to be left alone.

    Args:
        patterns: patterns of all pools that share the pages' slots.

    Attributes:
        kept: pages that changed while they were watched, ascending. They stay here.
    """

    def __init__(self, allocator: PageOwner, patterns: Sequence[SlotPattern]) -> None:
        self._allocator = allocator
        self._patterns = patterns
        self._watched: deque[_Watched] = deque()
        self.kept: IntArray = np.empty(0, dtype=np.int64)

    @property
    def is_watching(self) -> bool:
        """Whether `look` has anything to do."""
        return bool(self._watched)

    @property
    def pages(self) -> IntArray:
        """Pages that are watched or kept."""
        return np.concatenate([self.kept, *(pages for _, pages in self._watched)])

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def num_slots(self) -> int:
        """Number of their slots, which are neither free nor cached."""
        return int(self.num_pages * self._allocator.page_size)

    def add(self, pages: IntArray, *, num_forwards: int) -> None:
        """Watch distinct free pages for the next `FORWARDS_WATCHED` forwards.

        Args:
            num_forwards: forwards launched so far.
        """
        if not len(pages):
            return
        self._allocator.set_aside(pages)
        for pattern in self._patterns:
            pattern.fill(self._slots(pages))
        self._watched.append(_Watched(num_forwards + FORWARDS_WATCHED, pages))

    def take_again(self) -> None:
        """Set all pages aside once more, after their owner has freed every page."""
        if self.num_pages:
            self._allocator.set_aside(self.pages)

    def look(self, *, num_forwards: int | None) -> None:
        """Free the intact pages among those that were watched long enough.

        Args:
            num_forwards: forwards launched so far, or None if nothing runs and nothing
                could write any more.
        """
        while self._watched:
            due, pages = self._watched[0]
            if num_forwards is not None and num_forwards < due:
                return
            self._watched.popleft()
            self._judge(pages)

    def _judge(self, pages: IntArray) -> None:
        slots = self._slots(pages)
        intact = torch.ones(len(slots), dtype=torch.bool)
        for pattern in self._patterns:
            intact &= pattern.is_intact(slots)
        is_good = intact.view(len(pages), -1).all(dim=1).numpy()
        good, bad = pages[is_good], pages[~is_good]
        if len(good):
            self._allocator.free(self._slots(good))
        if len(bad):
            self.kept = np.union1d(self.kept, bad)
            logger.error(
                "kv_canary: page(s) %s were written to while nobody held them; %d "
                "page(s) stay out of use",
                bad[:16].tolist(),
                len(self.kept),
            )

    def _slots(self, pages: IntArray) -> torch.Tensor:
        return torch.from_numpy(self._allocator.page_slots(pages))
