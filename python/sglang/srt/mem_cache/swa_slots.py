"""Window slots: KV slots of sliding-window layers, which outlive no window.

A token has a slot of the full group for as long as its request or the prefix cache
keeps it, and a slot of the window group while a later token may still read it there:

```
full group    | p0 | p1 | p2 | p3 | p4 | p5 |      pages of a request
window group    --   --  | w2 | w0 | w7 | w1 |     after p0 and p1 left the window
```

Host records, like those of the allocator; the mapping alone is on the device, too.
Knows pages and lengths, no requests and no bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from sglang.srt.mem_cache.page_ledger import IntArray, PageLedger

FREE_EVERY = 16
"""Decode steps after which the slots outside of the windows are freed."""


class SwaSlots:
    """Window pages of an allocator's pages.

    Args:
        num_pages: pages of the full group; num_window_pages: of the window group; both
            without their scratch page 0.
        window: positions that a token reads, its own among them.
        slack: positions that are kept beyond the window, for tokens in flight and so
            that a finished request can be cached whole.

    Attributes:
        full_to_swa_index_mapping: int64 [full slots, scratch included] on the device;
            slot of the window group, 0: none. As of the last `sync`.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        num_window_pages: int,
        page_size: int,
        window: int,
        slack: int,
        device: str | torch.device,
        region_size: int = 0,
    ) -> None:
        if not 0 < num_window_pages <= num_pages:
            raise ValueError(
                f"{num_window_pages} window pages beside {num_pages} pages: there must "
                "be at least one, and no more than those"
            )
        self.page_size = page_size
        self.size = num_window_pages * page_size
        self.window = window
        self.slack = slack
        self._ledger = PageLedger(num_window_pages)
        self._num_pages = num_pages
        of_region = num_window_pages + 1 + np.arange(region_size // page_size)
        self._page_of: IntArray = np.concatenate(
            [np.zeros(num_pages + 1, dtype=np.int64), of_region]
        )
        self._stale: list[IntArray] = []
        self._on_free: list[Callable[[torch.Tensor], None]] = []
        self._offsets = torch.arange(page_size, device=device)
        # Scratch is scratch.
        self.full_to_swa_index_mapping = self.expected_mapping().to(device)

    # -- capacity ------------------------------------------------------------------

    def available_size(self) -> int:
        """Slots in free window pages."""
        return self._ledger.num_free * self.page_size

    @property
    def num_free_pages(self) -> int:
        return self._ledger.num_free

    @property
    def span(self) -> int:
        """Slots that one decoding request keeps at most, beside those in flight."""
        return self.window + self.slack + FREE_EVERY + 2 * self.page_size

    def first_kept(self, length: int) -> int:
        """First position whose window page is kept once `length` tokens have KV."""
        begin = max(length - self.window + 1 - self.slack, 0)
        return begin - begin % self.page_size

    def first_read(self, length: int) -> int:
        """First position, at a page boundary, that a token after `length` reads."""
        begin = max(length - self.window + 1, 0)
        return begin - begin % self.page_size

    # -- pages ---------------------------------------------------------------------

    def has(self, pages: IntArray) -> NDArray[np.bool_]:
        """Whether each of these pages has a window page."""
        return self._page_of[pages] > 0

    def mapped_pages(self) -> IntArray:
        """All pages of the allocator that have one, ascending."""
        return np.flatnonzero(self._page_of[: self._num_pages + 1])

    def window_pages(self, pages: IntArray) -> IntArray:
        """The window page of each of these pages, 0: none."""
        return self._page_of[pages]

    def window_slots(self, slots: IntArray) -> IntArray:
        """The window slot of each of these slots, 0: none."""
        pages = slots // self.page_size
        window_pages = self._page_of[pages]
        found = window_pages * self.page_size + (slots - pages * self.page_size)
        return np.where((window_pages > 0) | (pages == 0), found, 0)

    def full_slot(self, window_slot: int) -> int:
        """The slot that has this window slot, -1: none has."""
        page, offset = divmod(window_slot, self.page_size)
        if page == 0:
            return offset
        holders = np.flatnonzero(self._page_of == page)
        return int(holders[0]) * self.page_size + offset if len(holders) else -1

    def take(self, pages: IntArray) -> None:
        """Give each of these pages, which have none, a window page.

        Raises:
            RuntimeError: there are too few; to be asked before.
        """
        taken = self._ledger.take(len(pages))
        if taken is None:
            raise RuntimeError(
                f"{len(pages)} window pages wanted, {self._ledger.num_free} are free"
            )
        self._page_of[pages] = taken
        self._stale.append(pages)

    def drop(self, pages: IntArray) -> int:
        """Free the window pages of those of these distinct pages that have one.

        Returns:
            How many were freed.
        """
        mapped = pages[self._page_of[pages] > 0]
        if len(mapped):
            freed = self._page_of[mapped]
            self._page_of[mapped] = 0
            self._notify(freed)
            self._ledger.disown(freed)
            self._ledger.give(freed)
            self._stale.append(mapped)
        return len(mapped)

    def move(self, *, dst: IntArray, src: IntArray) -> None:
        """Hand the window pages of `src` over to `dst`, which hold the same tokens.

        Raises:
            RuntimeError: a source has none, or a target has one already.
        """
        if not self.has(src).all() or self.has(dst).any():
            raise RuntimeError(
                f"window pages of {src[:8].tolist()} cannot become those of "
                f"{dst[:8].tolist()}: a source has none or a target has one"
            )
        self._page_of[dst] = self._page_of[src]
        self._page_of[src] = 0
        self._stale += [dst, src]

    def owns(self, pages: IntArray) -> NDArray[np.bool_]:
        """Whether each of these window pages is in use."""
        return self._ledger.owns(pages)

    def set_aside(self, pages: IntArray) -> None:
        """Keep these distinct free window pages, which belong to no page.

        Raises:
            RuntimeError: one of them is not free; names it.
        """
        taken = pages[self._ledger.owns(pages)]
        if len(taken):
            raise RuntimeError(f"window page {int(taken[0])} is not free")
        self._ledger.take_these(pages)

    def free(self, slots: torch.Tensor) -> None:
        """Free window pages that were set aside, by all of their slots."""
        pages = np.unique(slots.numpy() // self.page_size)
        self._notify(pages)
        self._ledger.disown(pages)
        self._ledger.give(pages)

    def page_slots(self, pages: IntArray) -> IntArray:
        """All window slots of these window pages, page after page."""
        slots: IntArray = pages[:, None] * self.page_size + np.arange(self.page_size)
        return slots.ravel()

    def clear(self) -> None:
        """Free every window page."""
        self.drop(self.mapped_pages())

    def register_on_free(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Call `hook(slots)` at every free with all window slots (int64, host) of the
        pages, before any of them can be taken again."""
        self._on_free.append(hook)

    def _notify(self, pages: IntArray) -> None:
        if self._on_free:
            slots = torch.from_numpy(self.page_slots(pages))
            for hook in self._on_free:
                hook(slots)

    def expected_mapping(self) -> torch.Tensor:
        """The mapping by the host's records, int64 [full slots] on the host, but for
        pages that the next `sync` changes: those as they are."""
        slots = np.arange(len(self._page_of) * self.page_size, dtype=np.int64)
        expected = torch.from_numpy(self.window_slots(slots))
        if self._stale:
            pages = torch.from_numpy(np.concatenate(self._stale))
            given = self.full_to_swa_index_mapping.cpu().view(-1, self.page_size)
            expected.view(-1, self.page_size)[pages] = given[pages]
        return expected

    # -- the device ----------------------------------------------------------------

    def sync(self) -> None:
        """Bring the mapping up to date, on the current stream: before every forward
        that follows a change."""
        if not self._stale:
            return
        pages = np.unique(np.concatenate(self._stale))
        self._stale = []
        both = torch.from_numpy(np.stack([pages, self._page_of[pages]]))
        device = self.full_to_swa_index_mapping.device
        if device.type != "cpu":
            both = both.pin_memory().to(device, non_blocking=True)
        firsts = both[1, :, None] * self.page_size
        slots = torch.where(firsts > 0, firsts + self._offsets, 0)
        self.full_to_swa_index_mapping.view(-1, self.page_size)[both[0]] = slots
