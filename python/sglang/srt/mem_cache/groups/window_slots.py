"""Window slots: KV slots of sliding-window layers, freed once out of the window.

A token has a slot of the primary group as long as its request or the prefix cache keeps
it, and a slot of the window group as long as a later token may read it there:

```
primary group | p0 | p1 | p2 | p3 | p4 | p5 |      pages of a request
window group    --   --  | w2 | w0 | w7 | w1 |     after p0 and p1 left the window
```

These are host records, like the allocator's; only the mapping is also on the device.
Knows pages and lengths, but no requests and no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from sglang.srt.mem_cache.groups.slots import GroupHold, PagedSlots
from sglang.srt.mem_cache.groups.window_runs import WindowRuns
from sglang.srt.mem_cache.page_ledger import IntArray, PageLedger

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixCache

RELEASE_EVERY = 16


class WindowSlots(PagedSlots):
    """Window pages for an allocator's pages.

    Args:
        num_pages: pages of the primary group; num_window_pages: pages of the window
            group; both without their scratch page 0.
        window: positions that a token reads, its own included.
        slack: positions kept beyond the window, for tokens in flight and so that a
            finished request can be cached whole.
        reserve: slots that a request takes beyond its tokens (speculation).
        region_size: slots of a draft region; each has a permanent window slot.
    """

    name = "swa"
    release_every = RELEASE_EVERY
    unsaved = "checkpoints of window slots are not supported"

    def __init__(
        self,
        *,
        num_pages: int,
        num_window_pages: int,
        page_size: int,
        window: int,
        slack: int,
        device: str | torch.device,
        reserve: int = 0,
        region_size: int = 0,
    ) -> None:
        if not 0 < num_window_pages <= num_pages:
            raise ValueError(
                f"{num_window_pages} window pages beside {num_pages} pages: there must "
                "be at least one, and no more than there are pages"
            )
        self.page_size = page_size
        self.size = num_window_pages * page_size
        self.window = window
        self.slack = slack
        self._reserve = reserve
        self._ledger = PageLedger(num_window_pages)
        self._num_pages = num_pages
        of_region = num_window_pages + 1 + np.arange(region_size // page_size)
        self._page_of: IntArray = np.concatenate(
            [np.zeros(num_pages + 1, dtype=np.int64), of_region]
        )
        self._stale: list[IntArray] = []
        self._on_free: list[Callable[[torch.Tensor], None]] = []
        self._offsets = torch.arange(page_size, device=device)
        # The scratch page maps to scratch.
        self.mapping = self.expected_mapping().to(device)

    # -- capacity ------------------------------------------------------------------

    @property
    def num_free_pages(self) -> int:
        return self._ledger.num_free

    @property
    def span(self) -> int:
        """Most slots that one decoding request keeps, besides those in flight."""
        return self.window + self.slack + RELEASE_EVERY + 2 * self.page_size

    def need_of_running(self, hold: GroupHold, length: int, slots: int) -> int:
        most = self.span + self._reserve
        return min(slots, most - min(length - hold.kept_from, most))

    def need_of_new(self, extend_len: int, slots: int) -> int:
        return min(slots, extend_len + self.span + self._reserve)

    # -- lifetime ------------------------------------------------------------------

    def create_runs(self, cache: RadixCache, index: int) -> WindowRuns:
        return WindowRuns(cache, self, index=index)

    def first_kept(self, length: int) -> int:
        begin = max(length - self.window + 1 - self.slack, 0)
        return begin - begin % self.page_size

    def first_read(self, length: int) -> int:
        """Return the first position, at a page boundary, that a token after `length`
        reads."""
        begin = max(length - self.window + 1, 0)
        return begin - begin % self.page_size

    # -- pages ---------------------------------------------------------------------

    def has(self, pages: IntArray) -> NDArray[np.bool_]:
        return self._page_of[pages] > 0

    def mapped_pages(self) -> IntArray:
        return np.flatnonzero(self._page_of[: self._num_pages + 1])

    def map_pages(self, pages: IntArray) -> IntArray:
        return self._page_of[pages]

    def map_slots(self, slots: IntArray) -> IntArray:
        pages = slots // self.page_size
        window_pages = self._page_of[pages]
        found = window_pages * self.page_size + (slots - pages * self.page_size)
        return np.where((window_pages > 0) | (pages == 0), found, 0)

    def primary_slot(self, slot: int) -> int:
        page, offset = divmod(slot, self.page_size)
        if page == 0:
            return offset
        holders = np.flatnonzero(self._page_of == page)
        return int(holders[0]) * self.page_size + offset if len(holders) else -1

    def take(self, pages: IntArray) -> None:
        taken = self._ledger.take(len(pages))
        if taken is None:
            raise RuntimeError(
                f"{len(pages)} window pages wanted, {self._ledger.num_free} are free"
            )
        self._page_of[pages] = taken
        self._stale.append(pages)

    def drop(self, pages: IntArray) -> int:
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
        if not self.has(src).all() or self.has(dst).any():
            raise RuntimeError(
                f"window pages of {src[:8].tolist()} cannot move to "
                f"{dst[:8].tolist()}: a source has none or a target already has one"
            )
        self._page_of[dst] = self._page_of[src]
        self._page_of[src] = 0
        self._stale += [dst, src]

    def owns(self, pages: IntArray) -> NDArray[np.bool_]:
        return self._ledger.owns(pages)

    def set_aside(self, pages: IntArray) -> None:
        taken = pages[self._ledger.owns(pages)]
        if len(taken):
            raise RuntimeError(f"window page {int(taken[0])} is not free")
        self._ledger.take_these(pages)

    def free(self, slots: torch.Tensor) -> None:
        pages = np.unique(slots.numpy() // self.page_size)
        self._notify(pages)
        self._ledger.disown(pages)
        self._ledger.give(pages)

    def page_slots(self, pages: IntArray) -> IntArray:
        slots: IntArray = pages[:, None] * self.page_size + np.arange(self.page_size)
        return slots.ravel()

    def clear(self) -> None:
        # Whatever the records say: they may be why everything is freed.
        owned = self._ledger.owned_pages()
        pages = self._page_of[: self._num_pages + 1]
        pages[:] = 0
        if len(owned):
            self._notify(owned)
        self._ledger.clear()
        self._stale.append(np.arange(1, len(pages)))

    def register_on_free(self, hook: Callable[[torch.Tensor], None]) -> None:
        self._on_free.append(hook)

    def _notify(self, pages: IntArray) -> None:
        if self._on_free:
            slots = torch.from_numpy(self.page_slots(pages))
            for hook in self._on_free:
                hook(slots)

    def expected_mapping(self) -> torch.Tensor:
        slots = np.arange(len(self._page_of) * self.page_size, dtype=np.int64)
        expected = torch.from_numpy(self.map_slots(slots))
        if self._stale:
            pages = torch.from_numpy(np.concatenate(self._stale))
            given = self.mapping.cpu().view(-1, self.page_size)
            expected.view(-1, self.page_size)[pages] = given[pages]
        return expected

    # -- the device ----------------------------------------------------------------

    def sync(self) -> None:
        if not self._stale:
            return
        pages = np.unique(np.concatenate(self._stale))
        self._stale = []
        both = torch.from_numpy(np.stack([pages, self._page_of[pages]]))
        device = self.mapping.device
        if device.type != "cpu":
            both = both.pin_memory().to(device, non_blocking=True)
        firsts = both[1, :, None] * self.page_size
        slots = torch.where(firsts > 0, firsts + self._offsets, 0)
        self.mapping.view(-1, self.page_size)[both[0]] = slots
