"""Operations on pool, allocator and prefix cache together.

Evict then allocate, extend the rows of a batch, release a request, check for leaks.
It decides nothing about which request to serve or to drop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.mem_cache.allocator import Lens, host_array

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, CacheableReq
    from sglang.srt.mem_cache.page_ledger import IntArray


def ensure_available(cache: BasePrefixCache, num_slots: int) -> bool:
    """Evict until the allocator has `num_slots` free, with their window slots; False,
    with nothing evicted, if it cannot."""
    swa = cache.allocator.swa
    missing = num_slots - cache.allocator.available_size()
    if missing > cache.evictable_size():
        return False
    if swa is not None and num_slots > usable_swa_size(cache):
        return False
    # Slots first: their window slots go with them.
    if missing > 0 and cache.evict(missing) < missing:
        return False
    if swa is None:
        return True
    missing = num_slots - swa.available_size()
    return missing <= 0 or cache.evict_swa(missing) >= missing


def extend_rows(
    cache: BasePrefixCache, *, rows: Lens, prefix_lens: Lens, seq_lens: Lens
) -> torch.Tensor | None:
    """Give every row slots for positions [prefix_len, seq_len) and write them to it.

    Args:
        rows: request rows, distinct.
        prefix_lens: positions of each row that hold slots already.
        seq_lens: positions that need slots, at most the row width.

    Returns:
        int64 [sum(seq_lens - prefix_lens)] on the pool's device, request after request
        (`out_cache_loc`); None, with nothing evicted or taken, if there is not enough
        memory even after eviction.

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
    if allocator.swa is not None:
        allocator.swa.sync()
    return req_to_token_pool.write_batch(row_ids, prefix, seq - prefix, slots)


def free_outside_windows(
    cache: BasePrefixCache, requests: Iterable[CacheableReq]
) -> None:
    """Free the window slots that no later token of these requests reads.

    The requests' own; of their cached prefixes they give up the lock, once it lies
    outside as a whole. Nothing to do without sliding windows.
    """
    allocator, rows = cache.allocator, cache.req_to_token_pool
    swa = allocator.swa
    if swa is None:
        return
    for req in requests:
        begin, end = req.swa_freed_len, swa.first_kept(req.committed_len)
        if end <= begin:
            continue
        slots = host_array(rows.row_slots(req.req_pool_idx, begin, end))
        swa.drop(slots[:: swa.page_size] // swa.page_size)
        req.swa_freed_len = end
        if req.has_swa_lock:
            assert req.last_node is not None
            cache.dec_swa_lock_ref(req.last_node)
            req.has_swa_lock = False


def release_req(req: CacheableReq, *, cache: BasePrefixCache) -> None:
    """Release a request's memory: cache or free its slots, then free its row."""
    cache.cache_finished_req(req)
    cache.req_to_token_pool.free([req.req_pool_idx])


def check_idle(
    cache: BasePrefixCache, *, fenced: int = 0, fenced_windows: int = 0
) -> None:
    """Check an engine without requests for leaks: slots are free, cached or fenced.

    Args:
        fenced: slots that somebody else still holds; fenced_windows: window slots.

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
    _check_idle_windows(cache, fenced_windows)
    if cache.protected_size():
        raise RuntimeError(
            f"{cache.protected_size()} cached slots are still locked at idle"
        )
    if pool.available_size() != pool.size:
        rows = pool.size - pool.available_size()
        raise RuntimeError(f"{rows} request rows are still in use at idle")


def _check_idle_windows(cache: BasePrefixCache, fenced: int) -> None:
    swa = cache.allocator.swa
    if swa is None:
        return
    free, cached = swa.available_size(), cache.swa_evictable_size()
    locked = cache.swa_protected_size()
    if free + cached + fenced != swa.size or locked:
        raise RuntimeError(
            f"window slots do not balance at idle: size {swa.size}, free {free}, "
            f"cached {cached}, locked {locked}, fenced {fenced}"
        )


def check_busy(
    cache: BasePrefixCache,
    requests: Iterable[CacheableReq],
    *,
    aside: IntArray | None = None,
) -> None:
    """Check that every owned page has exactly one holder, the cache or one request.

    For use while requests run; O(pool size) on the host.

    Args:
        requests: all requests that hold slots.
        aside: pages that are neither's.

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
    _check_busy_windows(cache, requests)
    if aside is not None:
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


def _check_busy_windows(
    cache: BasePrefixCache, requests: Iterable[CacheableReq]
) -> None:
    """Check that exactly those pages have window pages that should."""
    swa = cache.allocator.swa
    if swa is None:
        return
    rows = cache.req_to_token_pool
    parts = [node.slots for node in cache.iter_nodes() if node.has_swa]
    parts += [
        host_array(rows.row_slots(r.req_pool_idx, r.swa_freed_len, r.allocated_len))
        for r in requests
    ]
    held = np.unique(np.concatenate([np.empty(0, np.int64), *parts]) // swa.page_size)
    wrong = np.setxor1d(held, swa.mapped_pages())
    if len(wrong):
        raise RuntimeError(
            f"{len(wrong)} pages have a window page that nobody reads, or lack one: "
            f"{wrong[:16].tolist()}"
        )


def usable_swa_size(cache: BasePrefixCache) -> int:
    """Return how many window slots could be allocated now: free and evictable ones."""
    swa = cache.allocator.swa
    assert swa is not None
    return swa.available_size() + cache.swa_evictable_size()


def usable_size(cache: BasePrefixCache) -> int:
    """Return how many slots could be allocated now: free ones and evictable ones."""
    return cache.allocator.available_size() + cache.evictable_size()
