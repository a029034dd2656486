"""Window slots of whole requests: freed when nobody reads them, and never earlier."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from request_world import Req, RequestMachine, admit, make_cache

from sglang.srt.mem_cache.common import (
    check_idle,
    extend_rows,
    free_outside_windows,
    release_req,
    usable_size,
    usable_swa_size,
)
from sglang.srt.mem_cache.swa_slots import SwaSlots
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=8, suite="cpu")


def make_swa(
    *, pages: int, window_pages: int, page_size: int, window: int, slack: int = 0
) -> SwaSlots:
    return SwaSlots(
        num_pages=pages,
        num_window_pages=window_pages,
        page_size=page_size,
        window=window,
        slack=page_size + slack,
        device="cpu",
    )


def test_a_draft_region_has_window_slots_for_good() -> None:
    swa = SwaSlots(
        num_pages=10,
        num_window_pages=4,
        page_size=4,
        window=8,
        slack=4,
        device="cpu",
        region_size=12,
    )
    region = np.arange(44, 56)
    assert swa.window_slots(region).tolist() == list(range(20, 32))
    assert [swa.full_slot(slot) for slot in range(20, 32)] == region.tolist()
    swa.take(np.array([3, 7, 1, 2]))
    swa.sync()
    assert sorted(swa.mapped_pages()) == [1, 2, 3, 7]
    swa.clear()
    swa.sync()
    assert swa.available_size() == 16 and not len(swa.mapped_pages())
    mapping = swa.full_to_swa_index_mapping
    assert torch.equal(mapping, swa.expected_mapping())
    assert mapping[4:44].sum() == 0
    assert mapping[44:].tolist() == list(range(20, 32))


class WindowMachine(RequestMachine):
    """The requests of `RequestMachine` with sliding windows: a second dict models the
    bytes in window slots, which go when their page is freed."""

    def build(
        self,
        page_size: int,
        tokens_in_pool: int,
        share: float,
        window: int,
        slack: int,
        radix: bool,
        bigram: bool,
    ) -> None:
        super().build(page_size, tokens_in_pool, radix, bigram)
        pages = tokens_in_pool // page_size
        self.swa = make_swa(
            pages=pages,
            window_pages=max(int(pages * share), 1),
            page_size=page_size,
            window=window,
            slack=slack,
        )
        self.cache = make_cache(
            pages=pages,
            page_size=page_size,
            radix=radix,
            bigram=bigram,
            swa=self.swa,
        )
        self.cache.allocator.register_on_free(
            lambda slots: [self.content.pop(slot, None) for slot in slots.tolist()]
        )
        self.in_window: dict[int, object] = {}
        self.swa.register_on_free(
            lambda slots: [self.in_window.pop(slot, None) for slot in slots.tolist()]
        )

    def usable(self) -> int:
        return min(usable_size(self.cache), usable_swa_size(self.cache))

    def window_slots(self, req: Req, start: int, end: int) -> list[int]:
        """As the device would find them."""
        self.swa.sync()
        slots = self.cache.req_to_token_pool.row_slots(req.req_pool_idx, start, end)
        return self.swa.full_to_swa_index_mapping[slots].tolist()

    def write_kv(self, req: Req, start: int, end: int) -> None:
        super().write_kv(req, start, end)
        for position, slot in enumerate(self.window_slots(req, start, end), start):
            assert slot >= self.swa.page_size, "a new token without a window slot"
            self.in_window[slot] = self.truth(req, position)

    def leave_windows(self, data: object) -> None:
        free_outside_windows(self.cache, [self.pick(data)])

    def evict_windows(self, num_slots: int) -> None:
        possible = self.cache.swa_evictable_size()
        cached = self.cache.protected_size()
        freed = self.cache.evict_swa(num_slots)
        assert freed >= min(num_slots, possible)
        assert freed < num_slots + self.swa.page_size
        assert self.cache.protected_size() == cached

    def windows_hold_what_the_next_token_reads(self) -> None:
        for req in self.requests:
            begin = max(req.committed_len - self.swa.window + 1, 0)
            slots = self.window_slots(req, begin, req.committed_len)
            for position, slot in enumerate(slots, begin):
                assert self.in_window.get(slot) == self.truth(req, position)

    def teardown(self) -> None:
        super().teardown()
        assert self.swa.available_size() == self.swa.size
        assert not self.in_window


BASES = ([1] * 40, [1, 2] * 20, [1] * 9 + [2] * 31)


def walk(seed: int, steps: int) -> WindowMachine:
    """A random walk: the state machine's own choices are few steps of long requests."""
    rng = np.random.default_rng(seed)

    def one_of(*options):
        return options[rng.integers(len(options))]

    world = WindowMachine()
    world.pick = lambda data: one_of(*world.requests)
    world.build(
        page_size=one_of(1, 2, 4),
        tokens_in_pool=int(rng.integers(40, 160)),
        share=one_of(0.4, 0.8, 1.0),
        window=one_of(1, 2, 3, 6, 11, 40),
        slack=int(rng.integers(5)),
        radix=rng.random() < 0.85,
        bigram=bool(rng.integers(2)),
    )

    def start() -> None:
        cut, tail = int(rng.integers(8, 38)), rng.integers(1, 3, 4).tolist()
        world.start(one_of(*BASES), cut, tail, one_of(None, None, None, "x"))

    live = {
        lambda: world.prefill_chunk(None, one_of(3, 7, 50), one_of(True, False)): 6,
        lambda: world.decode(one_of(1, 1, 4), one_of(1, 2)): 6,
        lambda: world.leave_windows(None): 5,
        lambda: world.finish(None): 2,
        lambda: world.abort(None, one_of(0, 3)): 1,
    }
    idle = {
        lambda: world.evict(one_of(1, 5, 30)): 1,
        lambda: world.evict_windows(one_of(1, 5, 30)): 1,
    }
    for _ in range(steps):
        actions = dict(idle)
        if len(world.requests) < 4:
            actions[start] = 4
        if world.requests:
            actions |= live
        weights = np.array([*actions.values()], dtype=float)
        list(actions)[rng.choice(len(actions), p=weights / weights.sum())]()
        world.every_row_reads_what_it_should()
        world.windows_hold_what_the_next_token_reads()
        world.books_balance()
    world.teardown()
    return world


@pytest.mark.timeout(1800)
def test_windows_hold_what_is_read_and_nothing_leaks() -> None:
    for seed in range(count(ci=40, full=2000)):
        try:
            walk(seed, steps=100)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def served(cache, tokens: list[int], *, leaves: bool = True) -> Req:
    """A request that has prefilled all its tokens but the last, and left its window."""
    req = admit(cache, tokens)
    end = len(tokens) - 1
    extend_rows(
        cache,
        rows=[req.req_pool_idx],
        prefix_lens=[req.allocated_len],
        seq_lens=[end],
    )
    req.allocated_len = req.committed_len = end
    if leaves:
        free_outside_windows(cache, [req])
    return req


def matched(cache, tokens: list[int]) -> int:
    assert cache.match_length(cache.key(tokens)) == len(
        cache.match_prefix(cache.key(tokens))
    )
    return len(cache.match_prefix(cache.key(tokens)))


WINDOW = 8


@pytest.fixture(params=[1, 4])
def cache(request):
    pages = 96 // request.param
    swa = make_swa(
        pages=pages, window_pages=pages, page_size=request.param, window=WINDOW
    )
    return make_cache(pages=pages, page_size=request.param, swa=swa)


def test_a_prefix_is_of_use_where_its_window_is_there(cache) -> None:
    """A request of 33 tokens left window slots for its last 7 and the slack alone."""
    tokens = list(range(34))
    release_req(served(cache, tokens), cache=cache)
    page = cache.page_size
    assert matched(cache, tokens) == 33 - 33 % page
    # Ends in the tombstone: nothing before it has a window.
    assert matched(cache, tokens[:20]) == 0
    assert cache.match_length(cache.key(tokens[:20])) == 0


def test_a_prefix_shorter_than_the_window_is_of_use_whole(cache) -> None:
    release_req(served(cache, list(range(9))), cache=cache)
    assert matched(cache, list(range(9))) == 8
    assert matched(cache, list(range(5))) == 5 - 5 % cache.page_size


def test_a_tombstone_gets_the_window_of_who_computes_it_again(cache) -> None:
    tokens = list(range(34))
    release_req(served(cache, tokens), cache=cache)
    page, cached = cache.page_size, cache.total_size()
    again = served(cache, tokens[:21])
    assert again.cache_protected_len == 0
    release_req(again, cache=cache)
    assert matched(cache, tokens[:21]) == 20 - 20 % page
    assert matched(cache, tokens) == 33 - 33 % page
    assert cache.total_size() == cached
    cache.check()
    check_idle(cache)


def test_windows_are_evicted_from_the_begin_of_a_run(cache) -> None:
    tokens = list(range(12)) + [99]
    release_req(served(cache, tokens, leaves=False), cache=cache)
    page = cache.page_size
    full = cache.total_size()
    assert matched(cache, tokens) == 12
    assert cache.evict_swa(4) == 4
    assert cache.total_size() == full
    # The last 8 positions have theirs, and the next token reads 7.
    assert matched(cache, tokens) == 12
    more = cache.evict_swa(2)
    assert more == max(page, 2)
    assert matched(cache, tokens) == 0
    assert cache.evict_swa(100) == 12 - 4 - more
    # A leaf without windows is of use to nobody.
    assert cache.total_size() == 0
    check_idle(cache)


def test_a_lock_keeps_the_window_until_the_request_has_left_it(cache) -> None:
    tokens = list(range(24)) + [99]
    release_req(served(cache, tokens), cache=cache)
    req = admit(cache, tokens)
    before = cache.swa_protected_size()
    assert before >= WINDOW - 1
    cache.evict_swa(100)
    assert cache.swa_protected_size() == before
    assert cache.swa_evictable_size() == 0
    end = req.committed_len + 20
    req.tokens = [*tokens, *range(200, 220)]
    extend_rows(
        cache,
        rows=[req.req_pool_idx],
        prefix_lens=[req.allocated_len],
        seq_lens=[end],
    )
    req.allocated_len = req.committed_len = end
    free_outside_windows(cache, [req])
    assert not req.has_swa_lock and cache.swa_protected_size() == 0
    assert cache.evict_swa(100) == before
    release_req(req, cache=cache)
    check_idle(cache)


def test_a_tombstone_cannot_be_locked(cache) -> None:
    tokens = list(range(34))
    release_req(served(cache, tokens), cache=cache)
    node = next(node for node in cache.iter_nodes() if not node.has_swa)
    with pytest.raises(RuntimeError, match="has no window slots: match again"):
        cache.inc_lock_ref(node)


def test_window_pages_cannot_be_moved_onto_others(cache) -> None:
    req = served(cache, list(range(9)))
    slots = cache.req_to_token_pool.row_slots(req.req_pool_idx, 0, 8).numpy()
    pages = np.unique(slots // cache.page_size)
    with pytest.raises(RuntimeError, match="a source has none or a target has one"):
        cache.allocator.swa.move(dst=pages[:1], src=pages[1:2])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
