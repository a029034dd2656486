"""Operations on pool, allocator and prefix cache together.

Evict then allocate, extend the rows of a batch, release a request, check for leaks.
It never decides which request to serve or drop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.mem_cache.allocator import Lens, host_array

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, CacheableReq
    from sglang.srt.mem_cache.groups.runs import GroupRuns
    from sglang.srt.mem_cache.page_ledger import IntArray


def ensure_available(cache: BasePrefixCache, num_slots: int) -> bool:
    """Evict until the allocator has `num_slots` free, and every group what they cost
    there. Return False, with nothing evicted, if that is impossible."""
    missing = num_slots - cache.allocator.available_size()
    if missing > cache.evictable_size():
        return False
    costs = [group.slots.cost(num_slots) for group in cache.groups]
    if any(c > g.usable_size() for c, g in zip(costs, cache.groups, strict=True)):
        return False
    # Primary slots first, because slots of the other groups go with them.
    if missing > 0 and cache.evict(missing) < missing:
        return False
    for cost, group in zip(costs, cache.groups, strict=True):
        missing = cost - group.slots.available_size()
        if missing > 0 and group.evict(missing) < missing:
            return False
    return True


def extend_rows(
    cache: BasePrefixCache, *, rows: Lens, prefix_lens: Lens, seq_lens: Lens
) -> torch.Tensor | None:
    """Give every row slots for positions [prefix_len, seq_len) and record them in it.

    Args:
        rows: request rows, distinct.
        prefix_lens: positions of each row that hold slots already.
        seq_lens: positions that need slots, at most the row width.

    Returns:
        int64 [sum(seq_lens - prefix_lens)] on the pool's device, request after request
        (`out_cache_loc`), or None, with nothing evicted or taken, if memory does not
        suffice even after eviction.

    Raises:
        RuntimeError: a seq_len is beyond the row width; nothing was taken.
    """
    row_ids = np.asarray(rows, dtype=np.int64)
    prefix = np.asarray(prefix_lens, dtype=np.int64)
    seq = np.asarray(seq_lens, dtype=np.int64)
    allocator, req_to_token_pool = cache.allocator, cache.req_to_token_pool
    if len(seq) and int(seq.max()) > req_to_token_pool.row_width:
        # Before anything is taken: a slot that no row records cannot be freed.
        raise RuntimeError(
            f"{int(seq.max())} positions do not fit a row of width "
            f"{req_to_token_pool.row_width}"
        )
    last_locs = req_to_token_pool.last_locs(row_ids, prefix)
    slots = allocator.alloc_extend(
        prefix_lens=prefix, seq_lens=seq, last_locs=last_locs
    )
    if slots is None:
        if not ensure_available(cache, allocator.extend_cost(prefix, seq)):
            return None
        slots = allocator.alloc_extend(
            prefix_lens=prefix, seq_lens=seq, last_locs=last_locs
        )
        if slots is None:
            return None
    for group in allocator.secondary:
        group.sync()
    return req_to_token_pool.write_batch(row_ids, prefix, seq - prefix, slots)


def release_unread(
    cache: BasePrefixCache, requests: Iterable[CacheableReq], *, step: int = 0
) -> None:
    """Free slots in the secondary groups that no later token of these requests reads.

    Requests free their own slots. They give up their lock on a cached prefix once they
    read none of it.

    Args:
        step: decode steps of the batch so far. Each group is served every
            `release_every` steps.
    """
    rows = cache.req_to_token_pool
    due = [
        (index, group)
        for index, group in enumerate(cache.allocator.secondary)
        if step % group.release_every == 0
    ]
    if not due:
        return
    for req in requests:
        for index, group in due:
            hold, page_size = req.holds[index], cache.page_size
            begin, end = hold.kept_from, group.first_kept(req.committed_len)
            if end <= begin:
                continue
            slots = host_array(rows.row_slots(req.req_pool_idx, begin, end))
            group.drop(slots[::page_size] // page_size)
            hold.kept_from = end
            if hold.has_lock:
                assert req.last_node is not None
                cache.groups[index].unlock(req.last_node)
                hold.has_lock = False


def release_req(req: CacheableReq, *, cache: BasePrefixCache) -> None:
    """Release a request's memory: cache or free its slots, then free its row. Where the
    draft has no KV, a cached prefix would not be whole."""
    ready = req.committed_len - req.unready_len
    req.committed_len = max(ready, req.cache_protected_len)
    cache.cache_finished_req(req)
    cache.req_to_token_pool.free([req.req_pool_idx])


def check_idle(
    cache: BasePrefixCache, *, fenced: int = 0, fenced_in_groups: Sequence[int] = ()
) -> None:
    """Check an engine without requests for leaks: slots are free, cached or fenced.

    Args:
        fenced: primary slots that another holder still has. fenced_in_groups: slots of
            the allocator's secondary groups, none by default.

    Raises:
        RuntimeError: the sum is wrong (names each term), or a row or lock is held.
    """
    allocator, pool = cache.allocator, cache.req_to_token_pool
    free, cached = allocator.available_size(), cache.total_size()
    difference = allocator.size - free - cached - fenced
    if difference:
        what = "leaked" if difference > 0 else "counted twice"
        raise RuntimeError(
            f"KV pool does not balance at idle: {abs(difference)} slots {what} "
            f"(size {allocator.size}, free {free}, cached {cached}, fenced {fenced})"
        )
    fenced_of = [*fenced_in_groups, *[0] * (len(cache.groups) - len(fenced_in_groups))]
    for group, slots in zip(cache.groups, fenced_of, strict=True):
        _check_idle_group(group, slots)
    if cache.protected_size():
        raise RuntimeError(
            f"{cache.protected_size()} cached slots are still locked at idle"
        )
    if pool.available_size() != pool.size:
        rows = pool.size - pool.available_size()
        raise RuntimeError(f"{rows} request rows are still in use at idle")


def _check_idle_group(group: GroupRuns, fenced: int) -> None:
    slots, cached = group.slots, group.evictable_size()
    free, locked = slots.available_size(), group.protected_size()
    if free + cached + fenced != slots.size or locked:
        raise RuntimeError(
            f"{slots.name} slots do not balance at idle: size {slots.size}, free "
            f"{free}, cached {cached}, locked {locked}, fenced {fenced}"
        )


def start_over(cache: BasePrefixCache) -> None:
    """Free every slot and row of an engine without requests, whatever its records say:
    for records that contradict each other."""
    cache.forget()
    cache.allocator.clear()
    cache.req_to_token_pool.clear()


def check_busy(
    cache: BasePrefixCache,
    requests: Iterable[CacheableReq],
    *,
    aside: IntArray | None = None,
) -> None:
    """Check that every owned page has exactly one holder, the cache or one request.

    For use while requests run. O(pool size) on the host.

    Args:
        requests: all requests that hold slots.
        aside: pages that neither the cache nor a request holds.

    Raises:
        RuntimeError: names the pages without a holder or with more than one.
    """
    allocator = cache.allocator
    page_size, num_pages = allocator.page_size, allocator.num_pages
    holders = np.zeros(num_pages + 1, dtype=np.int64)
    holders[np.unique(host_array(cache.cached_slots()) // page_size)] += 1
    requests = list(requests)
    for req in requests:
        own = cache.req_to_token_pool.row_slots(
            req.req_pool_idx, req.cache_protected_len, req.allocated_len
        )
        holders[np.unique(host_array(own) // page_size)] += 1
    aside = np.empty(0, dtype=np.int64) if aside is None else aside
    for index in range(len(allocator.secondary)):
        _check_busy_group(cache, requests, index, aside)
    holders[aside] += 1
    owned = np.zeros(num_pages + 1, dtype=np.int64)
    owned[allocator.owned_pages()] = 1
    for what, pages in (
        ("leaked (no request and no cache node holds them)", holders < owned),
        ("held more than once or free while held", holders > owned),
    ):
        if pages.any():
            named = np.flatnonzero(pages)
            raise RuntimeError(f"{len(named)} pages {what}: {named[:16].tolist()}")


def _check_busy_group(
    cache: BasePrefixCache,
    requests: Iterable[CacheableReq],
    index: int,
    aside: IntArray,
) -> None:
    """Check that exactly the pages that should have a page in a secondary group do."""
    group, rows = cache.allocator.secondary[index], cache.req_to_token_pool
    parts = cache.groups[index].kept_slots()
    for req in requests:
        begin = req.holds[index].kept_from
        parts.append(
            host_array(rows.row_slots(req.req_pool_idx, begin, req.allocated_len))
        )
    held = np.unique(np.concatenate([np.empty(0, np.int64), *parts]) // cache.page_size)
    wrong = np.setxor1d(held, np.setdiff1d(group.mapped_pages(), aside))
    if len(wrong):
        raise RuntimeError(
            f"{len(wrong)} pages have a page in group {group.name} that no "
            f"request reads, or lack one: {wrong[:16].tolist()}"
        )


def usable_size(cache: BasePrefixCache) -> int:
    """Return how many slots could be allocated now: free ones and evictable ones."""
    return cache.allocator.available_size() + cache.evictable_size()
