"""The slots of a group besides the primary ones, and the part that a request holds.

The allocator's pages are the primary group: their slots name a token's position
everywhere. A secondary group keeps the KV of other layers in slots of its own, which it
allots beside those pages and may free earlier (`PagedSlots`). Checkpoints of recurrent
state have slots that belong to no page (`groups/state_slots.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    import numpy as np

    from sglang.srt.mem_cache.groups.runs import GroupRuns
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.radix_cache import RadixCache


class GroupHold:
    """One request's hold on the slots of a group.

    Attributes:
        kept_from: positions before it have no slot of this request: either it freed
            them or they belong to the prefix cache. At least the cached prefix.
        has_lock: whether the request still reads the cached prefix in this group.
    """

    __slots__ = ("has_lock", "kept_from")

    def __init__(self, kept_from: int) -> None:
        self.kept_from = kept_from
        self.has_lock = True

    def cuts(self) -> Iterable[int]:
        """Return the positions that no run of the prefix cache may contain, because
        what the request gives it differs on both sides."""
        return (self.kept_from,)


class GroupSlots(ABC):
    """Host records of the slots of one group.

    Draft and target share them, but each has its own bytes for them (`KVGroup`).

    Attributes:
        name: name of the group, in reports and errors.
        size: usable slots.
        unsaved: why a checkpoint of the engine cannot hold this group; empty if it can.
    """

    name: str
    size: int
    unsaved: str

    # -- capacity ------------------------------------------------------------------

    @abstractmethod
    def available_size(self) -> int:
        """Slots that can be taken now."""

    @abstractmethod
    def cost(self, num_slots: int) -> int:
        """Return how many slots are taken with `num_slots` primary ones."""

    @abstractmethod
    def need_of_running(self, hold: GroupHold, length: int, slots: int) -> int:
        """Return the slots that a running request will take beyond those it has.

        Args:
            length: its tokens with KV.
            slots: primary slots that it will take.
        """

    @abstractmethod
    def need_of_new(self, extend_len: int, slots: int) -> int:
        """Return the most slots that a request takes at one time.

        Args:
            extend_len: tokens of its next prefill.
            slots: primary slots that it takes until its end.
        """

    @abstractmethod
    def clear(self) -> None:
        """Free every slot."""

    # -- lifetime ------------------------------------------------------------------

    def hold(self, length: int) -> GroupHold:
        """Return the hold of a request whose first `length` positions are cached."""
        return GroupHold(length)

    def renew(self, hold: GroupHold, length: int) -> GroupHold:
        """Return the hold that follows `hold` once `length` positions are cached."""
        return self.hold(length)

    def release(self, hold: GroupHold) -> None:
        """Take back what the ended request still has of its own, if that is not in its
        row."""
        return

    @abstractmethod
    def create_runs(self, cache: RadixCache, index: int) -> GroupRuns:
        """Create the group's part of a prefix cache.

        Args:
            index: place of the group among the cache's groups.
        """


class PagedSlots(GroupSlots):
    """Slots in pages, each beside a page of the primary group.

    Attributes:
        page_size: slots per page, the allocator's.
        mapping: int64 [primary slots, scratch included] on the device; the group's slot
            for each, or 0. Current as of the last `sync`.
        release_every: decode steps after which `first_kept` is applied to requests.
    """

    page_size: int
    mapping: torch.Tensor
    release_every: int

    @abstractmethod
    def first_kept(self, length: int) -> int:
        """Return the first position whose slot a request keeps once `length` tokens
        have KV, at a page boundary."""

    # -- capacity ------------------------------------------------------------------

    @property
    @abstractmethod
    def num_free_pages(self) -> int:
        """Pages that can be taken now."""

    def available_size(self) -> int:
        return self.num_free_pages * self.page_size

    def cost(self, num_slots: int) -> int:
        return num_slots

    # -- pages of the primary group ------------------------------------------------

    @abstractmethod
    def take(self, pages: IntArray) -> None:
        """Give a page to each of these primary pages, which have none.

        Raises:
            RuntimeError: too few pages are free.
        """

    @abstractmethod
    def drop(self, pages: IntArray) -> int:
        """Free the pages of these distinct primary pages and return how many there
        were. Primary pages without one are skipped."""

    @abstractmethod
    def move(self, *, dst: IntArray, src: IntArray) -> None:
        """Hand the pages of primary pages `src` over to `dst`, which hold the same
        tokens.

        Raises:
            RuntimeError: a source has none, or a target already has one.
        """

    @abstractmethod
    def has(self, pages: IntArray) -> NDArray[np.bool_]:
        """Return whether each of these primary pages has a page."""

    @abstractmethod
    def mapped_pages(self) -> IntArray:
        """Return the primary pages that have a page, ascending."""

    @abstractmethod
    def map_pages(self, pages: IntArray) -> IntArray:
        """Return the page of each of these primary pages, or 0."""

    @abstractmethod
    def map_slots(self, slots: IntArray) -> IntArray:
        """Return the slot of each of these primary slots, or 0."""

    @abstractmethod
    def primary_slot(self, slot: int) -> int:
        """Return the primary slot that has this slot, or -1."""

    # -- quarantine ----------------------------------------------------------------

    @abstractmethod
    def owns(self, pages: IntArray) -> NDArray[np.bool_]:
        """Return whether each of these pages is in use."""

    @abstractmethod
    def set_aside(self, pages: IntArray) -> None:
        """Take these distinct free pages out of use.

        Raises:
            RuntimeError: one of them is not free; the message names it.
        """

    @abstractmethod
    def page_slots(self, pages: IntArray) -> IntArray:
        """Return all slots of these pages, page after page."""

    @abstractmethod
    def free(self, slots: torch.Tensor) -> None:
        """Free pages that were set aside, given by all of their slots (int64, host)."""

    @abstractmethod
    def register_on_free(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Call `hook(slots)` at every free with all slots (int64, host) of the freed
        pages, before any of them can be taken again."""

    # -- the device ----------------------------------------------------------------

    @abstractmethod
    def sync(self) -> None:
        """Bring `mapping` up to date on the current stream. Call it before every
        forward that follows a change."""

    @abstractmethod
    def expected_mapping(self) -> torch.Tensor:
        """Return what the host's records say `mapping` must hold, int64 on the host.
        Pages that the next `sync` changes keep their value on the device."""
