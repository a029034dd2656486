"""The events of a prefix cache tell of every block that it holds, and of no other."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from request_world import RequestMachine, make_cache
from test_group_memory import make_windows

from sglang.srt.kv_events.block_recorder import BlockRecorder, hash_blocks
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kv_blocks import StrictReader, block_hash, tree_blocks
from sglang.test.scale import count

register_cpu_ci(est_time=5, suite="cpu")


class Watched:
    """A cache, its events, and what a reader makes of them."""

    def __init__(self, cache: BasePrefixCache) -> None:
        self.cache = cache
        self.recorder = BlockRecorder(page_size=cache.page_size, bigram=cache.bigram)
        cache.listeners.append(self.recorder)
        self.reader = StrictReader(cache.page_size)

    def take(self) -> list:
        """The new events as on the wire, without types; the reader has them."""
        events = msgspec.msgpack.decode(msgspec.msgpack.encode(self.recorder.take()))
        self.reader.apply(events)
        return events

    def check(self) -> None:
        self.take()
        assert self.reader.blocks == tree_blocks(self.cache)

    def put(self, tokens: list[int], namespace: str | None = None) -> None:
        key = self.cache.key(tokens, namespace=namespace)
        slots = self.cache.allocator.alloc(
            len(key) // self.cache.page_size * self.cache.page_size
        )
        assert slots is not None
        self.cache.allocator.free(slots[: self.cache.insert(key, slots)])


class EventMachine(RequestMachine):
    """`RequestMachine` with a reader of its events; now and then it is flushed."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        tokens_in_pool=st.integers(24, 96),
        radix=st.just(True),
        bigram=st.booleans(),
    )
    def build(
        self, page_size: int, tokens_in_pool: int, radix: bool, bigram: bool
    ) -> None:
        super().build(page_size, tokens_in_pool, radix, bigram)
        self.watched = Watched(self.cache)

    @precondition(lambda self: not self.requests)
    @rule()
    def flush(self) -> None:
        self.cache.reset()
        assert self.watched.take()[-1] == ["AllBlocksCleared"]

    @rule(is_idle=st.booleans())
    def forward(self, is_idle: bool) -> None:
        super().forward(is_idle)
        self.watched.take()

    @invariant()
    def reader_has_the_tree(self) -> None:
        self.watched.check()


@pytest.mark.timeout(1800)
def test_a_reader_has_the_tree_of_any_requests() -> None:
    run_state_machine_as_test(
        EventMachine,
        settings=settings(
            max_examples=count(ci=15, full=1000),
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
        ),
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("has_windows", [False, True], ids=["full", "windows"])
@pytest.mark.parametrize("bigram", [False, True], ids=["tokens", "pairs"])
def test_a_reader_has_the_tree_of_a_random_walk(
    has_windows: bool, bigram: bool
) -> None:
    """Deep trees of few tokens: copies of blocks, splits, cuts and tombstones."""
    for seed in range(count(ci=6, full=300)):
        rng = np.random.default_rng(seed)
        page_size = int(rng.choice([1, 2, 4]))
        pages = int(rng.integers(16, 64))
        swa = make_windows(
            pages=pages, window_pages=max(pages // 2, 1), page_size=page_size, window=3
        )
        cache = make_cache(
            pages=pages,
            page_size=page_size,
            bigram=bigram,
            secondary=[swa] if has_windows else [],
        )
        watched = Watched(cache)
        for _ in range(60):
            step(watched, rng)
            if rng.random() < 0.5:
                watched.check()
            cache.check()
        watched.check()


def step(watched: Watched, rng: np.random.Generator) -> None:
    cache = watched.cache
    action = rng.random()
    nodes = list(cache.iter_nodes())
    if action < 0.6:
        tokens = rng.integers(0, 2, int(rng.integers(1, 30))).tolist()
        need = len(tokens) + cache.page_size
        if cache.allocator.available_size() < need:
            cache.evict(need)
        for group in cache.groups:
            group.evict(need)
        # Few window slots do not hold a long run, however many are evicted.
        secondary = cache.allocator.secondary
        has_windows = all(group.available_size() >= need for group in secondary)
        if cache.allocator.available_size() >= need and has_windows:
            watched.put(tokens, [None, None, "a", "b"][rng.integers(4)])
    elif action < 0.75:
        cache.evict(int(rng.integers(1, 20)))
    elif action < 0.85:
        [group.evict(int(rng.integers(1, 20))) for group in cache.groups]
    elif action < 0.97 and nodes:
        chosen = rng.choice(len(nodes), size=min(len(nodes), 3), replace=False)
        cache.allocator.free(cache.cut([nodes[i] for i in chosen]))
    elif action >= 0.97:
        cache.reset()


def watched_cache(*, page_size: int, bigram: bool = False) -> Watched:
    return Watched(make_cache(pages=64, page_size=page_size, bigram=bigram))


def test_fields_of_events() -> None:
    watched = watched_cache(page_size=2)
    watched.put([1, 2, 3, 4, 5])
    first = block_hash(None, [1, 2], None)
    second = block_hash(first, [3, 4], None)
    assert watched.take() == [
        ["BlockStored", [first, second], None, [1, 2, 3, 4], 2, None, "GPU"]
    ]
    watched.put([1, 2, 7, 8])  # splits
    third = block_hash(first, [7, 8], None)
    assert watched.take() == [["BlockStored", [third], first, [7, 8], 2, None, "GPU"]]
    watched.put([1, 2, 3, 4])  # is there
    assert watched.take() == []
    watched.cache.evict(4)
    assert watched.take() == [["BlockRemoved", [third, second], "GPU"]]


def test_a_namespace_is_named_once_and_has_its_own_hashes() -> None:
    watched = watched_cache(page_size=2)
    watched.put([1, 2, 3, 4], "tenant")
    watched.put([1, 2, 3, 4, 5, 6], "tenant")
    watched.put([1, 2])
    first, more, common = watched.take()
    assert first[7:] == [None, [["tenant"], None]]
    assert len(more) == len(common) == 7
    assert common[1] == [block_hash(None, [1, 2], None)] != first[1][:1]


def test_a_block_with_two_successors_is_one_block() -> None:
    """With a draft the tree holds it twice; a reader hears of it once."""
    watched = watched_cache(page_size=2, bigram=True)
    watched.put([1, 2, 3, 4, 5])
    (first,) = watched.take()
    watched.put([1, 2, 9, 9, 9])
    (second,) = watched.take()
    assert second[2] == first[1][0] and second[3] == [9, 9]
    assert len(list(watched.cache.iter_nodes())) == 2
    watched.cache.evict(4)
    assert watched.take() == [["BlockRemoved", first[1][1:], "GPU"]]
    watched.cache.evict(4)
    assert watched.take() == [["BlockRemoved", [*first[1][:1], *second[1]], "GPU"]]


def test_hashes_do_not_change() -> None:
    """Replicas of different versions must agree: these were computed by hand, with
    `sha256sum`."""
    hashes = hash_blocks(b"", np.array([1, 2, 3, 4]), 2)
    assert hashes.tolist() == [0x34FB5C825DE7CA4A, 0x39A28482C065E57E]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
