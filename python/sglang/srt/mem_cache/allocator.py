"""Allocators: ownership of KV slots. A slot is `page * page_size + offset`.

Their records are on the host and they return host tensors, so that neither allocating
nor freeing ever waits for a device; they know nothing of requests, caches or KV bytes.

Frees are stream-ordered: a freed page may be allocated again at once, because any later
writer is enqueued on the forward stream after the forwards in flight. If another stream
still uses a page (a transfer, a host tier), its holder must keep the page and free it
when that stream is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.mem_cache.page_ledger import (
    IntArray,
    LastSeen,
    PageJournal,
    PageLedger,
    page_divider,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.groups.slots import PagedSlots

OnFree = Callable[[torch.Tensor], None]
Lens = Sequence[int] | IntArray

_MAX_SLOTS = 2**31


def host_array(slots: torch.Tensor) -> IntArray:
    """Return a 1-D slot tensor as int64 in numpy; a device tensor costs a sync."""
    array: IntArray = slots.detach().cpu().numpy()
    return array if array.dtype == np.int64 else array.astype(np.int64)


class BaseAllocator(ABC):
    """Base of all allocators: page ownership, frees, hooks.

    Args:
        size: usable slots, a multiple of `page_size`; the KV tensors have
            `size + page_size` rows because page 0 is scratch.
        page_size: slots per page.
        secondary: slots of the other groups. Each group allots its own slots for every
            page that is allocated, and frees them with the page or earlier.

    Slots are int64 host tensors. Mistakes of the caller (double free, free of scratch,
    free out of range, an inconsistent `last_locs`) are always checked; they raise
    RuntimeErrors that name slot and page.
    """

    def __init__(
        self, *, size: int, page_size: int, secondary: Sequence[PagedSlots] = ()
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: must be at least 1")
        if size < 1 or size % page_size:
            raise ValueError(
                f"size={size}: must be a positive multiple of page_size={page_size}"
            )
        if size + page_size > _MAX_SLOTS:
            raise ValueError(
                f"size={size}: slots are stored as int32, at most "
                f"{_MAX_SLOTS - page_size} fit"
            )
        self.size = size
        self.page_size = page_size
        for group in secondary:
            if group.page_size != page_size:
                raise ValueError(
                    f"group {group.name}: its pages have {group.page_size} slots, the "
                    f"pool's {page_size}; a group takes the page size of the pool"
                )
        self.secondary = tuple(secondary)
        self._ledger = PageLedger(size // page_size)
        self._to_page = page_divider(page_size)
        self._offsets = np.arange(page_size, dtype=np.int64)
        self._slots_seen = LastSeen(size + page_size)
        self._on_free: list[OnFree] = []
        self._group: list[IntArray] | None = None

    # -- capacity ------------------------------------------------------------------

    def available_size(self) -> int:
        """Slots in free pages."""
        return self._ledger.num_free * self.page_size

    @property
    def num_free_pages(self) -> int:
        """Pages that can be allocated now."""
        return self._ledger.num_free

    @property
    def num_pages(self) -> int:
        """Usable pages, not counting scratch."""
        return self._ledger.num_pages

    def owned_pages(self) -> IntArray:
        """Pages held by callers, ascending int64 (for leak checks)."""
        return self._ledger.owned_pages()

    @abstractmethod
    def extend_cost(self, prefix_lens: Lens, seq_lens: Lens) -> int:
        """Return the slots (a page multiple) that `alloc_extend` takes for these."""

    def keep_journal(self) -> PageJournal:
        """Return a journal of the pages that are taken and given back from now on."""
        self._ledger.journal = PageJournal()
        return self._ledger.journal

    def save(self) -> IntArray:
        """Return the free pages in reverse order of reuse, for `load`."""
        return self._ledger.save()

    def load(self, free: IntArray) -> None:
        """Make exactly these pages free and all others owned. Calls no hook.

        Raises:
            ValueError: these are not distinct pages of this pool.
        """
        self._ledger.load(free)

    def owns(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Return whether a caller holds each of these pages."""
        return self._ledger.owns(pages)

    def page_slots(self, pages: IntArray) -> IntArray:
        """Return all slots of these pages, page after page."""
        return self._page_slots(pages)

    # -- allocation ----------------------------------------------------------------

    def set_aside(self, pages: IntArray) -> None:
        """Make the caller the holder of these distinct free pages.

        Raises:
            RuntimeError: one of them is not free; the message names it.
        """
        taken = pages[self._ledger.owns(pages)]
        if len(taken):
            raise RuntimeError(f"page {int(taken[0])} cannot be set aside: not free")
        self._ledger.take_these(pages)

    def alloc_pages(self, count: int) -> torch.Tensor | None:
        """Allocate `count` pages; return their first slots, int64 [count].

        Returns None and takes nothing if there are too few.
        """
        pages = self._take(count)
        return None if pages is None else torch.from_numpy(pages * self.page_size)

    def alloc(self, num_slots: int) -> torch.Tensor | None:
        """Allocate whole pages; return all their slots, int64 [num_slots].

        Returns None and takes nothing if there are too few.

        Raises:
            ValueError: `num_slots` is not a multiple of the page size.
        """
        if num_slots % self.page_size:
            raise ValueError(
                f"num_slots={num_slots}: must be a multiple of "
                f"page_size={self.page_size}; use alloc_extend for other lengths"
            )
        pages = self._take(num_slots // self.page_size)
        return None if pages is None else torch.from_numpy(self._page_slots(pages))

    @abstractmethod
    def alloc_extend(
        self, *, prefix_lens: Lens, seq_lens: Lens, last_locs: torch.Tensor
    ) -> torch.Tensor | None:
        """Allocate slots for positions [prefix_len, seq_len) of every request.

        Each request first fills the page of its last slot, then takes new pages. It
        owns the rest of its last page, although those slots are not returned: the next
        call that continues there hands them out, and any slot of the page frees them.

        Args:
            prefix_lens: tokens that have slots already, one per request.
            seq_lens: tokens that need slots, at least the prefix.
            last_locs: int64 [requests], the slot of position prefix_len - 1. Not read
                if the prefix is empty or ends at a page boundary.

        Returns:
            int64 [sum(seq_lens - prefix_lens)], request after request, on the host;
            or None, with nothing taken, if there are too few free pages.

        Raises:
            RuntimeError: seq_len below prefix_len, or a last slot that does not fit.
        """

    # -- frees ---------------------------------------------------------------------

    def free(self, slots: torch.Tensor) -> None:
        """Free the pages of `slots` (int64 [n]); several slots of a page free it once.

        Raises:
            RuntimeError: a slot is scratch, out of range, already free or given twice.
        """
        if slots.numel() == 0:
            return
        pages = self._checked_pages(host_array(slots))
        self._ledger.disown(pages)
        if self._group is None:
            self._release(pages)
        else:
            self._group.append(pages)

    def free_group_begin(self) -> None:
        """Collect frees until `free_group_end`.

        They are checked at once but take effect together: one batch on the free list,
        one call of each hook.
        """
        if self._group is not None:
            raise RuntimeError("free_group_begin: a group is open already")
        self._group = []

    def free_group_end(self) -> None:
        """Release everything freed since `free_group_begin`."""
        if self._group is None:
            raise RuntimeError("free_group_end: no group is open")
        group, self._group = self._group, None
        if group:
            self._release(np.concatenate(group))

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """`free_group_begin` / `free_group_end` as a scope; nests as a no-op."""
        if self._group is not None:
            yield
            return
        self.free_group_begin()
        try:
            yield
        finally:
            self.free_group_end()

    def register_on_free(self, hook: OnFree) -> None:
        """Call `hook(slots)` at every free with all slots (int64, host) of the pages.

        The call comes before any of them can be allocated again.
        """
        self._on_free.append(hook)

    def clear(self) -> None:
        """Free every page, to flush an idle engine. Hooks see the owned pages."""
        owned = self._ledger.owned_pages()
        self._group = None
        self._ledger.clear()
        for group in self.secondary:
            group.clear()
        if len(owned):
            self._notify(owned)

    # -- internals -----------------------------------------------------------------

    def _take(self, count: int) -> IntArray | None:
        if count < 0:
            raise RuntimeError(f"cannot allocate {count} pages")
        if any(count > group.num_free_pages for group in self.secondary):
            return None
        pages = self._ledger.take(count)
        if pages is not None:
            for group in self.secondary:
                group.take(pages)
        return pages

    def _page_slots(self, pages: IntArray) -> IntArray:
        if self.page_size == 1:
            return pages
        slots: IntArray = (pages[:, None] * self.page_size + self._offsets).ravel()
        return slots

    def _release(self, pages: IntArray) -> None:
        self._notify(pages)
        for group in self.secondary:
            group.drop(pages)
        self._ledger.give(pages)

    def _notify(self, pages: IntArray) -> None:
        if self._on_free:
            slots = torch.from_numpy(self._page_slots(pages))
            for hook in self._on_free:
                hook(slots)

    def _checked_pages(self, slots: IntArray) -> IntArray:
        """Return the distinct pages of `slots`; RuntimeError unless all are owned."""
        low, high = self.page_size, self.size + self.page_size
        if slots.min() < low or slots.max() >= high:
            bad = int(slots[(slots < low) | (slots >= high)][0])
            what = "scratch" if 0 <= bad < low else "out of range"
            raise RuntimeError(
                f"free of slot {bad} (page {bad // self.page_size}): {what}, "
                f"allocatable slots are {low}..{high - 1}"
            )
        pages = self._to_page(slots)
        owned = self._ledger.owns(pages)
        if not owned.all():
            bad = int(slots[int(owned.argmin())])
            raise RuntimeError(
                f"double free of slot {bad} (page {bad // self.page_size}): "
                "the page is free already"
            )
        last = self._slots_seen.is_last(slots)
        if not last.all():
            bad = int(slots[int(last.argmin())])
            raise RuntimeError(
                f"double free of slot {bad} (page {bad // self.page_size}): "
                "given twice in one call"
            )
        return self._distinct(pages)

    @abstractmethod
    def _distinct(self, pages: IntArray) -> IntArray:
        """Return `pages`, which belong to distinct slots, without repetition."""


def _int64(lens: Lens) -> IntArray:
    return np.asarray(lens, dtype=np.int64)


def _bad_lens(prefix_lens: Lens, seq_lens: Lens) -> RuntimeError:
    pairs = zip(prefix_lens, seq_lens, strict=True)
    row, (prefix, seq) = next((i, p) for i, p in enumerate(pairs) if p[1] < p[0])
    return RuntimeError(f"alloc_extend: request {row} shrinks from {prefix} to {seq}")


class TokenToKVPoolAllocator(BaseAllocator):
    """Allocator of single slots (page size 1)."""

    def __init__(self, *, size: int, secondary: Sequence[PagedSlots] = ()) -> None:
        super().__init__(size=size, page_size=1, secondary=secondary)

    def extend_cost(self, prefix_lens: Lens, seq_lens: Lens) -> int:
        return int(_int64(seq_lens).sum() - _int64(prefix_lens).sum())

    def alloc_extend(
        self, *, prefix_lens: Lens, seq_lens: Lens, last_locs: torch.Tensor
    ) -> torch.Tensor | None:
        lens = _int64(seq_lens) - _int64(prefix_lens)
        if len(lens) and int(lens.min()) < 0:
            raise _bad_lens(prefix_lens, seq_lens)
        pages = self._take(int(lens.sum()))
        return None if pages is None else torch.from_numpy(pages)

    def _distinct(self, pages: IntArray) -> IntArray:
        return pages


class PagedTokenToKVPoolAllocator(BaseAllocator):
    """Allocator of whole pages, for any page size, including 1."""

    def __init__(
        self, *, size: int, page_size: int, secondary: Sequence[PagedSlots] = ()
    ) -> None:
        super().__init__(size=size, page_size=page_size, secondary=secondary)
        self._pages_seen = LastSeen(self.num_pages + 1)

    def extend_cost(self, prefix_lens: Lens, seq_lens: Lens) -> int:
        round_up = self.page_size - 1
        before = self._to_page(_int64(prefix_lens) + round_up)
        after = self._to_page(_int64(seq_lens) + round_up)
        return int((after - before).sum()) * self.page_size

    def alloc_extend(
        self, *, prefix_lens: Lens, seq_lens: Lens, last_locs: torch.Tensor
    ) -> torch.Tensor | None:
        prefix, seq = _int64(prefix_lens), _int64(seq_lens)
        last = host_array(last_locs)
        if not len(prefix) == len(seq) == len(last):
            raise RuntimeError(
                f"alloc_extend: {len(prefix)} prefix lengths, {len(seq)} lengths, "
                f"{len(last)} last slots"
            )
        if len(prefix) == 0:
            return torch.empty(0, dtype=torch.int64)
        lens = seq - prefix
        shortest = int(lens.min())
        if shortest < 0:
            raise _bad_lens(prefix_lens, seq_lens)
        prefix_pages = self._to_page(prefix)
        fill = prefix - prefix_pages * self.page_size
        self._check_last_locs(last, prefix, fill)
        if shortest == 1 and int(lens.max()) == 1:
            slots = self._extend_by_one(last, fill)
        else:
            slots = self._extend(last, prefix_pages, fill, seq, lens)
        return None if slots is None else torch.from_numpy(slots)

    def _extend_by_one(self, last: IntArray, fill: IntArray) -> IntArray | None:
        """Extend each request by one slot (decode): the next one, or one on a new
        page."""
        slots = last + 1
        crossing = np.flatnonzero(fill == 0)
        if len(crossing):
            pages = self._take(len(crossing))
            if pages is None:
                return None
            slots[crossing] = pages * self.page_size
        return slots

    def _extend(
        self,
        last: IntArray,
        prefix_pages: IntArray,
        fill: IntArray,
        seq: IntArray,
        lens: IntArray,
    ) -> IntArray | None:
        """Extend each request by any length.

        Lays out the pages that each request writes to (its tail page if partly filled,
        then the new ones) and cuts one window per request.
        """
        has_tail = fill > 0
        touched = self._to_page(seq + (self.page_size - 1)) - prefix_pages
        fresh = touched - has_tail
        pages = self._take(int(fresh.sum()))
        if pages is None:
            return None
        ends = np.cumsum(touched)
        firsts = ends - touched
        layout = np.empty(int(ends[-1]), dtype=np.int64)
        is_tail = np.zeros(len(layout), dtype=np.bool_)
        tails = firsts[has_tail]
        is_tail[tails] = True
        layout[tails] = self._to_page(last[has_tail])
        layout[~is_tail] = pages
        flat = self._page_slots(layout)
        begin = firsts * self.page_size + fill
        if len(lens) == 1:
            window: IntArray = flat[int(begin[0]) : int(begin[0] + lens[0])].copy()
            return window
        before = np.cumsum(lens) - lens
        index = np.repeat(begin - before, lens)
        index += np.arange(len(index))
        gathered: IntArray = flat[index]
        return gathered

    def _check_last_locs(
        self, last: IntArray, prefix: IntArray, fill: IntArray
    ) -> None:
        """Check that each last slot to continue from is owned and at its offset."""
        pages = self._to_page(last)
        offset_ok = last - pages * self.page_size == fill - 1
        in_range = (pages >= 1) & (pages <= self.num_pages)
        owned = self._ledger.owns(np.where(in_range, pages, 0))
        good = (offset_ok & owned) | (fill == 0)
        if not good.all():
            row = int(good.argmin())
            slot = int(last[row])
            raise RuntimeError(
                f"alloc_extend: request {row} has {int(prefix[row])} tokens and cannot "
                f"continue after slot {slot} (page {slot // self.page_size}, "
                f"offset {slot % self.page_size}): wrong offset or page not owned"
            )

    def _distinct(self, pages: IntArray) -> IntArray:
        return pages[self._pages_seen.is_last(pages)]


def create_allocator(
    *, size: int, page_size: int, secondary: Sequence[PagedSlots] = ()
) -> BaseAllocator:
    """Create the allocator for this page size."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size=size, secondary=secondary)
    return PagedTokenToKVPoolAllocator(
        size=size, page_size=page_size, secondary=secondary
    )
