"""Memory of whole requests: chunks, decode with reserve, finish, abort, leak checks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from request_world import (
    ROW_WIDTH,
    Req,
    RequestMachine,
    admit,
    held_slots,
    make_cache,
)

from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.common import (
    check_busy,
    check_idle,
    ensure_available,
    extend_rows,
    release_req,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=15, suite="cpu")


@pytest.mark.timeout(1800)
def test_requests_read_their_own_kv_and_leave_the_pool_empty() -> None:
    run_state_machine_as_test(
        RequestMachine,
        settings=settings(
            max_examples=count(ci=30, full=1000),
            stateful_step_count=80,
            deadline=None,
            derandomize=True,
            phases=[
                Phase.generate
            ],  # a failure prints its steps; shrinking takes minutes
        ),
    )


def grown(cache: BasePrefixCache, tokens: list[int], reserve: int = 0) -> Req:
    """A request whose tokens are all committed, with `reserve` more allocated."""
    req = admit(cache, tokens)
    req.allocated_len = len(tokens) + reserve
    slots = extend_rows(
        cache,
        rows=[req.req_pool_idx],
        prefix_lens=[req.committed_len],
        seq_lens=[req.allocated_len],
    )
    assert slots is not None
    req.committed_len = len(tokens)
    return req


def test_finished_request_keeps_whole_pages_and_frees_the_rest() -> None:
    cache = make_cache(pages=10, page_size=4)
    req = grown(cache, list(range(10)), reserve=7)
    row = cache.req_to_token_pool.row_slots(req.req_pool_idx, 0, 17).tolist()
    release_req(req, cache=cache)
    assert cache.cached_slots().tolist() == row[:8]
    assert cache.allocator.available_size() == 40 - 8
    check_idle(cache)


def test_duplicates_of_the_cache_are_freed() -> None:
    cache = make_cache(pages=20, page_size=1)
    first, second = (grown(cache, [1, 2, 3, 4, 5]) for _ in range(2))
    kept = cache.req_to_token_pool.row_slots(first.req_pool_idx, 0, 5)
    own = cache.req_to_token_pool.row_slots(second.req_pool_idx, 0, 5)
    assert not set(kept.tolist()) & set(own.tolist())
    release_req(first, cache=cache)
    cache.cache_unfinished_req(second)
    row = cache.req_to_token_pool.row_slots(second.req_pool_idx, 0, 5)
    assert row.tolist() == kept.tolist(), "the row must point to the tree's slots"
    assert cache.allocator.available_size() == 15
    assert cache.protected_size() == 5
    release_req(second, cache=cache)
    check_idle(cache)


def test_a_cached_prefix_under_other_tokens_is_refused() -> None:
    cache = make_cache(pages=20, page_size=1)
    release_req(grown(cache, [1, 2, 3, 4]), cache=cache)
    req = admit(cache, [1, 2, 3, 4])
    req.tokens = [7, 7, 7, 7]
    with pytest.raises(RuntimeError, match="locked prefix of 3 has only 0"):
        cache.cache_finished_req(req)


def test_lengths_out_of_order_are_refused() -> None:
    cache = make_cache(pages=20, page_size=1)
    req = grown(cache, [1, 2, 3, 4])
    req.committed_len = 5
    with pytest.raises(RuntimeError, match="have 0, 5, 4"):
        cache.cache_finished_req(req)
    req.committed_len, req.tokens = 4, [1, 2]
    with pytest.raises(RuntimeError, match="2 tokens known but 4 committed"):
        cache.cache_unfinished_req(req)


def test_extend_rows_refuses_more_than_a_row_and_takes_nothing() -> None:
    cache = make_cache(pages=20, page_size=4)
    req = admit(cache, [1, 2])
    with pytest.raises(RuntimeError, match=f"row of width {ROW_WIDTH}"):
        extend_rows(
            cache,
            rows=[req.req_pool_idx],
            prefix_lens=[0],
            seq_lens=[ROW_WIDTH + 1],
        )
    assert cache.allocator.available_size() == 80


def test_the_last_free_page_can_be_used() -> None:
    cache = make_cache(pages=3, page_size=4)
    release_req(grown(cache, list(range(8))), cache=cache)
    req = grown(cache, [9] * 12)
    assert cache.allocator.available_size() == 0 and cache.total_size() == 0
    assert not ensure_available(cache, 4)
    release_req(req, cache=cache)
    assert ensure_available(cache, 8)
    slots = cache.allocator.alloc(8)
    assert slots is not None and len(slots) == 8
    assert cache.total_size() == 4, "evicts only what is missing"


def test_nothing_is_evicted_for_a_request_that_cannot_be_served() -> None:
    cache = make_cache(pages=6, page_size=4)
    release_req(grown(cache, list(range(8))), cache=cache)
    running = grown(cache, [9] * 12)
    tail = [running.req_pool_idx]
    assert extend_rows(cache, rows=tail, prefix_lens=[12], seq_lens=[25]) is None
    assert (cache.total_size(), cache.allocator.available_size()) == (8, 4)
    assert extend_rows(cache, rows=tail, prefix_lens=[12], seq_lens=[24]) is not None
    assert (cache.total_size(), cache.allocator.available_size()) == (0, 0)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_remapped_rows_read_the_trees_slots(length: int) -> None:
    cache = make_cache(pages=20, page_size=1)
    first, second = (grown(cache, list(range(length))) for _ in range(2))
    kept = cache.req_to_token_pool.row_slots(first.req_pool_idx, 0, length)
    cache.cache_unfinished_req(first)
    cache.cache_unfinished_req(second)
    row = cache.req_to_token_pool.row_slots(second.req_pool_idx, 0, length)
    assert row.tolist() == kept.tolist() == held_slots(second)
    check_busy(cache, [first, second])


def test_chunk_cache_shares_nothing() -> None:
    cache = make_cache(pages=20, page_size=1, radix=False)
    release_req(grown(cache, [1, 2, 3], reserve=2), cache=cache)
    check_idle(cache)
    assert cache.allocator.available_size() == 20
    assert len(cache.match_prefix(cache.key([1, 2, 3]))) == 0
    assert cache.match_length(cache.key([1, 2, 3])) == 0
    assert cache.cached_slots().tolist() == [] and cache.evict(5) == 0
    with pytest.raises(RuntimeError, match="keeps no slots"):
        cache.insert(cache.key([1]), torch.tensor([1]))


def test_idle_check_names_the_difference() -> None:
    cache = make_cache(pages=20, page_size=4)
    slots = cache.allocator.alloc(8)
    assert slots is not None
    with pytest.raises(RuntimeError, match=r"8 slots leaked \(size 80, free 72"):
        check_idle(cache)
    check_idle(cache, fenced=8)
    with pytest.raises(RuntimeError, match="8 slots counted twice"):
        check_idle(cache, fenced=16)
    cache.allocator.free(slots)
    check_idle(cache)
    req = admit(cache, [1, 2])
    with pytest.raises(RuntimeError, match="1 request rows"):
        check_idle(cache)
    release_req(req, cache=cache)
    match = cache.match_prefix(cache.key([1]))
    cache.inc_lock_ref(match.last_node)
    check_idle(cache)


def test_idle_check_sees_a_lock_that_stayed() -> None:
    cache = make_cache(pages=20, page_size=4)
    release_req(grown(cache, [1, 2, 3, 4]), cache=cache)
    match = cache.match_prefix(cache.key([1, 2, 3, 4]))
    cache.inc_lock_ref(match.last_node)
    with pytest.raises(RuntimeError, match="4 cached slots are still locked"):
        check_idle(cache)


def test_busy_check_names_the_pages() -> None:
    cache = make_cache(pages=20, page_size=4)
    req = grown(cache, list(range(6)))
    check_busy(cache, [req])
    with pytest.raises(RuntimeError, match=r"2 pages leaked .*\[1, 2\]"):
        check_busy(cache, [])
    with pytest.raises(RuntimeError, match=r"2 pages held more than once.*\[1, 2\]"):
        check_busy(cache, [req, req])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
