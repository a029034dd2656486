"""Slots of secondary groups, over whole requests: freed when no token reads them any
more, and never earlier. Windows of several sizes stand for groups of several kinds."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from request_world import Req, RequestMachine, admit, make_cache

from sglang.srt.mem_cache.allocator import create_allocator
from sglang.srt.mem_cache.common import (
    check_idle,
    extend_rows,
    release_req,
    release_unread,
    usable_size,
)
from sglang.srt.mem_cache.groups.grouped_pool import GroupedKVPool
from sglang.srt.mem_cache.groups.kv_group import KVGroup, check_layers
from sglang.srt.mem_cache.groups.window_slots import WindowSlots
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=8, suite="cpu")


def make_windows(
    *, pages: int, window_pages: int, page_size: int, window: int, slack: int = 0
) -> WindowSlots:
    return WindowSlots(
        num_pages=pages,
        num_window_pages=window_pages,
        page_size=page_size,
        window=window,
        slack=page_size + slack,
        device="cpu",
    )


def test_a_draft_region_has_window_slots_for_good() -> None:
    swa = WindowSlots(
        num_pages=10,
        num_window_pages=4,
        page_size=4,
        window=8,
        slack=4,
        device="cpu",
        region_size=12,
    )
    region = np.arange(44, 56)
    assert swa.map_slots(region).tolist() == list(range(20, 32))
    assert [swa.primary_slot(slot) for slot in range(20, 32)] == region.tolist()
    swa.take(np.array([3, 7, 1, 2]))
    swa.sync()
    assert sorted(swa.mapped_pages()) == [1, 2, 3, 7]
    swa.clear()
    swa.sync()
    assert swa.available_size() == 16 and not len(swa.mapped_pages())
    mapping = swa.mapping
    assert torch.equal(mapping, swa.expected_mapping())
    assert mapping[4:44].sum() == 0
    assert mapping[44:].tolist() == list(range(20, 32))


class GroupMachine(RequestMachine):
    """The requests of `RequestMachine` with secondary groups: a dict for each models
    the bytes in its slots, which go when their page is freed."""

    def build(
        self,
        page_size: int,
        tokens_in_pool: int,
        groups: list[tuple[int, float]],
        slack: int,
        radix: bool,
        bigram: bool,
    ) -> None:
        super().build(page_size, tokens_in_pool, radix, bigram)
        pages = tokens_in_pool // page_size
        self.secondary = [
            make_windows(
                pages=pages,
                window_pages=max(int(pages * share), 1),
                page_size=page_size,
                window=window,
                slack=slack,
            )
            for window, share in groups
        ]
        self.cache = make_cache(
            pages=pages,
            page_size=page_size,
            radix=radix,
            bigram=bigram,
            secondary=self.secondary,
        )
        self.cache.allocator.register_on_free(partial(self.forget, self.content))
        self.in_group: list[dict[int, object]] = [{} for _ in groups]
        for slots, held in zip(self.secondary, self.in_group, strict=True):
            slots.register_on_free(partial(self.forget, held))

    @staticmethod
    def forget(content: dict[int, object], slots: torch.Tensor) -> None:
        for slot in slots.tolist():
            content.pop(slot, None)

    def usable(self) -> int:
        groups = [group.usable_size() for group in self.cache.groups]
        return min(usable_size(self.cache), *groups)

    def group_slots(
        self, group: WindowSlots, req: Req, start: int, end: int
    ) -> list[int]:
        """As the device would find them."""
        group.sync()
        slots = self.cache.req_to_token_pool.row_slots(req.req_pool_idx, start, end)
        return group.mapping[slots].tolist()

    def write_kv(self, req: Req, start: int, end: int) -> None:
        super().write_kv(req, start, end)
        for group, held in zip(self.secondary, self.in_group, strict=True):
            slots = self.group_slots(group, req, start, end)
            for position, slot in enumerate(slots, start):
                assert slot >= group.page_size, "a new token without a slot"
                held[slot] = self.truth(req, position)

    def release_unread(self, data: object) -> None:
        release_unread(self.cache, [self.pick(data)])

    def evict_group(self, index: int, num_slots: int) -> None:
        group = self.cache.groups[index % len(self.secondary)]
        possible = group.evictable_size()
        cached = self.cache.protected_size()
        freed = group.evict(num_slots)
        assert freed >= min(num_slots, possible)
        assert freed < num_slots + self.cache.page_size
        assert self.cache.protected_size() == cached

    def groups_hold_what_the_next_token_reads(self) -> None:
        for group, held in zip(self.secondary, self.in_group, strict=True):
            for req in self.requests:
                begin = max(req.committed_len - group.window + 1, 0)
                slots = self.group_slots(group, req, begin, req.committed_len)
                for position, slot in enumerate(slots, begin):
                    assert held.get(slot) == self.truth(req, position)

    def teardown(self) -> None:
        super().teardown()
        for group, held in zip(self.secondary, self.in_group, strict=True):
            assert group.available_size() == group.size
            assert not held


BASES = ([1] * 40, [1, 2] * 20, [1] * 9 + [2] * 31)


def walk(seed: int, steps: int) -> GroupMachine:
    """A random walk: the state machine's own choices are few steps of long requests."""
    rng = np.random.default_rng(seed)

    def one_of(*options):
        return options[rng.integers(len(options))]

    world = GroupMachine()
    world.pick = lambda data: one_of(*world.requests)
    world.build(
        page_size=one_of(1, 2, 4),
        tokens_in_pool=int(rng.integers(40, 160)),
        groups=[
            (one_of(1, 2, 3, 6, 11, 40), one_of(0.4, 0.8, 1.0))
            for _ in range(one_of(1, 1, 2, 3))
        ],
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
        lambda: world.release_unread(None): 5,
        lambda: world.finish(None): 2,
        lambda: world.abort(None, one_of(0, 3)): 1,
    }
    idle = {
        lambda: world.evict(one_of(1, 5, 30)): 1,
        lambda: world.evict_group(one_of(0, 1, 2), one_of(1, 5, 30)): 1,
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
        world.groups_hold_what_the_next_token_reads()
        world.books_balance()
    world.teardown()
    return world


@pytest.mark.timeout(1800)
def test_groups_hold_what_is_read_and_nothing_leaks() -> None:
    for seed in range(count(ci=20, full=2000)):
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
        release_unread(cache, [req])
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
    swa = make_windows(
        pages=pages, window_pages=pages, page_size=request.param, window=WINDOW
    )
    return make_cache(pages=pages, page_size=request.param, secondary=[swa])


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
    assert cache.groups[0].evict(4) == 4
    assert cache.total_size() == full
    # The last 8 positions have theirs, and the next token reads 7.
    assert matched(cache, tokens) == 12
    more = cache.groups[0].evict(2)
    assert more == max(page, 2)
    assert matched(cache, tokens) == 0
    assert cache.groups[0].evict(100) == 12 - 4 - more
    # A leaf without windows is of use to nobody.
    assert cache.total_size() == 0
    check_idle(cache)


def test_a_lock_keeps_the_window_until_the_request_has_left_it(cache) -> None:
    tokens = list(range(24)) + [99]
    release_req(served(cache, tokens), cache=cache)
    req = admit(cache, tokens)
    before = cache.groups[0].protected_size()
    assert before >= WINDOW - 1
    cache.groups[0].evict(100)
    assert cache.groups[0].protected_size() == before
    assert cache.groups[0].evictable_size() == 0
    end = req.committed_len + 20
    req.tokens = [*tokens, *range(200, 220)]
    extend_rows(
        cache,
        rows=[req.req_pool_idx],
        prefix_lens=[req.allocated_len],
        seq_lens=[end],
    )
    req.allocated_len = req.committed_len = end
    release_unread(cache, [req])
    assert not req.holds[0].has_lock and cache.groups[0].protected_size() == 0
    assert cache.groups[0].evict(100) == before
    release_req(req, cache=cache)
    check_idle(cache)


def test_a_tombstone_cannot_be_locked(cache) -> None:
    tokens = list(range(34))
    release_req(served(cache, tokens), cache=cache)
    node = next(node for node in cache.iter_nodes() if not node.marks[0].has_slots)
    with pytest.raises(RuntimeError, match="has no window slots: match again"):
        cache.inc_lock_ref(node)


def test_window_pages_cannot_be_moved_onto_others(cache) -> None:
    req = served(cache, list(range(9)))
    slots = cache.req_to_token_pool.row_slots(req.req_pool_idx, 0, 8).numpy()
    pages = np.unique(slots // cache.page_size)
    with pytest.raises(
        RuntimeError, match="a source has none or a target already has one"
    ):
        cache.allocator.secondary[0].move(dst=pages[:1], src=pages[1:2])


def tensors(layers: int, *, size: int = 8, page_size: int = 4) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=size,
        page_size=page_size,
        dtype=torch.float32,
        layer_num=layers,
        head_num=1,
        head_dim=2,
        device="cpu",
    )


def a_group(name: str, layers: tuple[int, ...], **options: int) -> KVGroup:
    slots = None
    if name != "full":
        slots = make_windows(pages=2, window_pages=2, page_size=4, window=4)
    return KVGroup(
        name=name, layers=layers, slots=slots, tensors=tensors(len(layers), **options)
    )


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [a_group("full", (0, 1)), a_group("swa", (1, 2))],
            "layer 1 is in two .*swa",
        ),
        ([a_group("full", (0, 3)), a_group("swa", (1,))], "group full has layer 3, "),
        (
            [a_group("full", (0,)), a_group("swa", (1,), page_size=2)],
            "group swa has p",
        ),
        (
            [a_group("swa", (0,)), a_group("full", (1,))],
            "group swa: the first",
        ),
        (
            [a_group("full", (0,)), a_group("full", (1,))],
            "group full: the first",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedKVPool(groups, layers=range(sum(len(g.layers) for g in groups)))


def test_layers_in_no_group_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 1 is in none of .* \(full\)"):
        check_layers([("full", [0, 2])], range(3))
    with pytest.raises(ValueError, match="KV group swa has no layer"):
        check_layers([("full", [0]), ("swa", [])], range(1))


def test_a_group_with_pages_of_another_size_is_refused() -> None:
    slots = make_windows(pages=4, window_pages=4, page_size=2, window=4)
    with pytest.raises(ValueError, match="swa: its pages have 2 slots, the pool's 4"):
        create_allocator(size=16, page_size=4, secondary=[slots])


def test_bytes_go_to_the_slots_of_the_layers_group() -> None:
    pool = GroupedKVPool(
        [a_group("full", (0, 2)), a_group("swa", (1,))], layers=range(3)
    )
    windows = pool.groups[1].slots
    windows.take(np.array([1]))
    windows.move(dst=np.array([2]), src=np.array([1]))
    windows.take(np.array([1]))
    windows.sync()
    slots = torch.tensor([5, 9])
    for layer in range(3):
        values = torch.full((2, 1, 2), float(layer + 1))
        pool.set_kv_buffer(layer, slots, values, -values)
        group, place = pool.layer_place(layer)
        own = group.on_device(slots)
        assert own.tolist() == group.on_host(slots.numpy()).tolist()
        k, v = group.tensors.get_kv_buffer(place)
        assert torch.equal(k[own], values) and torch.equal(v[own], -values)
    assert pool.layer_place(1)[0].on_device(slots).tolist() == [9, 5]
    pool.move_kv_cache(torch.tensor([6]), torch.tensor([9]))
    for layer in range(3):
        group, _ = pool.layer_place(layer)
        k, _ = pool.get_kv_buffer(layer)
        assert k[int(group.on_device(torch.tensor(6)))].tolist() == [[layer + 1.0] * 2]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
