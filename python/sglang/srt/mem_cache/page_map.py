"""Who holds each page of the KV pool, as one array, from the host's records.

For people who inspect the pool, not for decisions. Reads allocator, prefix cache and
rows; changes nothing and never waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang.srt.mem_cache.allocator import host_array
from sglang.srt.mem_cache.base_prefix_cache import CacheableReq

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.tree_node import TreeNode

STATE_MASK = 7
GROUP_BIT = 8
OWNER_SHIFT = 4
SERIAL_MASK = (1 << 27) - 1
"""Bits of a serial in a cell: the rest of 32 bits, with a sign."""


class PageState(IntEnum):
    """The state of a page; three bits of its cell.

    FREE: not held. RUNNING: a request's own, with committed tokens. CACHED: in the
        prefix
    cache, may be evicted. LOCKED: cached, and a request relies on it. DRAFT: a
    request's reserve for drafts. QUARANTINED: damaged, watched or kept out of use.
    POISONED: free, and its records name the last holder. UNKNOWN: allocated, but its
        holder is unknown.
    """

    FREE = 0
    RUNNING = 1
    CACHED = 2
    LOCKED = 3
    DRAFT = 4
    QUARANTINED = 5
    POISONED = 6
    UNKNOWN = 7


class PageHolder(CacheableReq, Protocol):
    """A request with its serial."""

    serial: int


def page_cells(
    cache: BasePrefixCache,
    holders: Iterable[PageHolder],
    *,
    has_drafts: bool,
    set_aside: IntArray,
    is_poisoned: NDArray[np.bool_] | None = None,
) -> NDArray[np.int32]:
    """Return the cell of every page but scratch, int32 [num_pages]; page p is at p - 1.

    A cell is `holder << 4 | in_group << 3 | state`. The holder is the serial of a
    request, minus the serial of a cached run (both modulo 2^27), or 0. `in_group` says
    whether the page has a page in a secondary group.

    Args:
        holders: requests, including those without memory.
        has_drafts: whether pages after the committed tokens are for drafts.
        set_aside: damaged pages.
        is_poisoned: [num_pages], whether records say that a page was freed, or None if
            there are no records.
    """
    allocator = cache.allocator
    cells = np.zeros(allocator.num_pages + 1, dtype=np.int32)
    if is_poisoned is not None:
        cells[1:][is_poisoned] = PageState.POISONED
    cells[allocator.owned_pages()] = PageState.UNKNOWN
    _mark_cached(cells, list(cache.iter_nodes()), page_size=cache.page_size)
    for holder in holders:
        if holder.req_pool_idx:
            _mark_own(cells, holder, cache, has_drafts=has_drafts)
    cells[set_aside] = PageState.QUARANTINED
    for group in allocator.secondary:
        cells[group.mapped_pages()] |= GROUP_BIT
    return cells[1:]


def _mark_cached(
    cells: NDArray[np.int32], nodes: list[TreeNode], *, page_size: int
) -> None:
    if not nodes:
        return
    # A run is whole pages, so every page_size-th slot begins one.
    slots = np.concatenate([node.slots for node in nodes])
    codes = np.fromiter((_cached_cell(node) for node in nodes), np.int32, len(nodes))
    lengths = np.fromiter((len(node.slots) for node in nodes), np.int64, len(nodes))
    cells[slots[::page_size] // page_size] = np.repeat(codes, lengths // page_size)


def _cached_cell(node: TreeNode) -> int:
    state = PageState.LOCKED if node.lock_ref else PageState.CACHED
    return -((node.serial & SERIAL_MASK) << OWNER_SHIFT) | state


def _mark_own(
    cells: NDArray[np.int32],
    holder: PageHolder,
    cache: BasePrefixCache,
    *,
    has_drafts: bool,
) -> None:
    """Mark the pages of a request's row that do not belong to the cache."""
    begin, page_size = holder.cache_protected_len, cache.page_size
    slots = cache.req_to_token_pool.row_slots(
        holder.req_pool_idx, begin, holder.allocated_len
    )
    pages = host_array(slots)[::page_size] // page_size
    code = (holder.serial & SERIAL_MASK) << OWNER_SHIFT
    cells[pages] = code | PageState.RUNNING
    if has_drafts:
        committed = -(-(holder.committed_len - begin) // page_size)
        cells[pages[max(committed, 0) :]] = code | PageState.DRAFT
