"""The radix tree against a model that keeps single pages in a dict."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang.srt.mem_cache.allocator import create_allocator
from sglang.srt.mem_cache.base_prefix_cache import RadixKey
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree_node import TreeNode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=9, suite="cpu", full_time=140)

PageKey = tuple[str | None, tuple[int, ...]]
NAMESPACES = st.sampled_from([None, None, None, "a"])
BASES = ([0] * 24, [0, 1] * 12, [0, 0, 0, 1, 2, 2] * 4)
# Cuts of few long sequences with a short tail: most keys share and most split.
TOKENS = st.builds(
    lambda base, cut, tail: base[:cut] + tail,
    st.sampled_from(BASES),
    st.sampled_from([20, 12, 8, 4, 24, 11, 5, 2, 0]),
    st.lists(st.integers(0, 2), max_size=6),
)


def make_cache(
    *, pages: int = 64, page_size: int = 1, bigram: bool = False
) -> RadixCache:
    allocator = create_allocator(size=pages * page_size, page_size=page_size)
    req_to_token_pool = ReqToTokenPool(
        size=4, row_width=64, device="cpu", context_len=64
    )
    return RadixCache(
        req_to_token_pool=req_to_token_pool, allocator=allocator, bigram=bigram
    )


def put(cache: RadixCache, tokens: list[int], namespace: str | None = None) -> int:
    """Insert freshly allocated slots; what the tree does not take is freed."""
    key = cache.key(tokens, namespace=namespace)
    aligned = len(key) // cache.page_size * cache.page_size
    slots = cache.allocator.alloc(aligned)
    assert slots is not None
    present = cache.insert(key, slots)
    cache.allocator.free(slots[:present])
    return present


@dataclass
class Page:
    """Model of one cached page: its slots and when its path was last used."""

    slots: list[int]
    used: int


class RadixMachine(RuleBasedStateMachine):
    """Pages are keyed by namespace and everything up to their end, so a prefix is
    cached exactly if all its pages are in the dict."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        bigram=st.booleans(),
        pages=st.sampled_from([60, 30, 12]),
    )
    def build(self, page_size: int, bigram: bool, pages: int) -> None:
        self.page_size = page_size
        self.bigram = bigram
        self.cache = make_cache(pages=pages, page_size=page_size, bigram=bigram)
        self.allocator = self.cache.allocator
        self.model: dict[PageKey, Page] = {}
        self.locks: list[tuple[TreeNode, list[PageKey]]] = []
        self.now = 0
        self.freed: list[int] = []
        self.allocator.register_on_free(lambda slots: self.freed.extend(slots.tolist()))

    # -- the model -----------------------------------------------------------------

    def page_keys(self, tokens: list[int], namespace: str | None) -> list[PageKey]:
        elements = (
            list(zip(tokens, tokens[1:], strict=False)) if self.bigram else tokens
        )
        ends = range(self.page_size, len(elements) + 1, self.page_size)
        return [(namespace, tuple(elements[:end])) for end in ends]

    def touch(self, keys: list[PageKey]) -> list[PageKey]:
        self.now += 1
        found: list[PageKey] = []
        for key in keys:
            if key not in self.model:
                break
            self.model[key].used = self.now
            found.append(key)
        return found

    def locked_pages(self) -> set[PageKey]:
        return {key for _, keys in self.locks for key in keys}

    def evict_from_model(self, num_slots: int) -> list[int]:
        """Oldest unlocked page without a successor first, one page at a time."""
        locked, gone = self.locked_pages(), []
        while len(gone) < num_slots:
            inner = {(ns, path[: -self.page_size]) for ns, path in self.model}
            leaves = [k for k in self.model if k not in locked and k not in inner]
            if not leaves:
                break
            oldest = min(leaves, key=lambda k: self.model[k].used)
            gone.extend(self.model.pop(oldest).slots)
        return gone

    # -- operations ----------------------------------------------------------------

    @rule(tokens=TOKENS, namespace=NAMESPACES, as_array=st.booleans())
    def match(self, tokens: list[int], namespace: str | None, as_array: bool) -> None:
        keys = self.page_keys(tokens, namespace)
        given = np.array(tokens, dtype=np.int64) if as_array else tokens
        key = self.cache.key(given, namespace=namespace)
        length = self.cache.match_length(key)
        found = self.touch(keys)
        result = self.cache.match_prefix(key)
        want = [slot for k in found for slot in self.model[k].slots]
        assert result.slots.tolist() == want
        assert length == len(result) == len(want)
        assert result.last_node.end == len(want)

    @rule(tokens=TOKENS, namespace=NAMESPACES, reuse=st.booleans())
    def insert(self, tokens: list[int], namespace: str | None, reuse: bool) -> None:
        keys = self.page_keys(tokens, namespace)
        need = len(keys) * self.page_size
        while self.allocator.available_size() < need:
            if not self.evict_some(need - self.allocator.available_size()):
                return
        slots = self.allocator.alloc(need)
        assert slots is not None
        found = self.touch(keys)
        present = self.cache.insert(self.cache.key(tokens, namespace=namespace), slots)
        assert present == len(found) * self.page_size
        self.freed.clear()
        self.allocator.free(slots[:present])
        for index, key in enumerate(keys[len(found) :], start=len(found)):
            begin = index * self.page_size
            page = slots[begin : begin + self.page_size].tolist()
            self.model[key] = Page(slots=page, used=self.now)

    @precondition(lambda self: len(self.locks) < 4)
    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def lock(self, tokens: list[int], namespace: str | None) -> None:
        found = self.touch(self.page_keys(tokens, namespace))
        result = self.cache.match_prefix(self.cache.key(tokens, namespace=namespace))
        self.cache.inc_lock_ref(result.last_node)
        self.locks.append((result.last_node, found))

    @precondition(lambda self: bool(self.locks))
    @rule(choice=st.integers(0, 99))
    def unlock(self, choice: int) -> None:
        node, _ = self.locks.pop(choice % len(self.locks))
        self.cache.dec_lock_ref(node)

    @rule(num_slots=st.sampled_from([1, 1, 1, 2, 3, 6, 20]))
    def evict(self, num_slots: int) -> None:
        self.evict_some(num_slots)

    def evict_some(self, num_slots: int) -> int:
        want = self.evict_from_model(num_slots)
        self.freed.clear()
        freed = self.cache.evict(num_slots)
        assert freed == len(want)
        assert sorted(self.freed) == sorted(want), "not the least recently used"
        return freed

    def teardown(self) -> None:
        for node, _ in self.locks:
            self.cache.dec_lock_ref(node)
        self.cache.reset()
        self.cache.check()
        assert self.allocator.available_size() == self.allocator.size

    # -- invariants ----------------------------------------------------------------

    @invariant()
    def sizes_are_exact(self) -> None:
        self.cache.check()
        locked = len(self.locked_pages()) * self.page_size
        total = len(self.model) * self.page_size
        assert self.cache.protected_size() == locked
        assert self.cache.evictable_size() == total - locked
        assert self.cache.total_size() == total
        assert self.allocator.available_size() == self.allocator.size - total

    @invariant()
    def runs_spell_the_model(self) -> None:
        where: dict[int, tuple[int, int, str | None, bool]] = {}
        locked = self.locked_pages()
        for (namespace, path), page in self.model.items():
            begin = len(path) - self.page_size
            before = (namespace, path[:begin])
            previous = self.model[before].slots[-1] if begin else -1
            is_locked = (namespace, path) in locked
            for offset, slot in enumerate(page.slots):
                where[slot] = (begin + offset, previous, namespace, is_locked)
                previous = slot
        found: dict[int, tuple[int, int, str | None, bool]] = {}
        for run in self.cache.iter_cached_runs():
            columns = (run.slots, run.positions(), run.previous_slots())
            for slot, position, previous in zip(*map(list, columns), strict=True):
                found[slot] = (position, previous, run.namespace, run.locked)
        assert found == where
        assert sorted(self.cache.cached_slots().tolist()) == sorted(where)


@pytest.mark.timeout(1800)
def test_radix_cache_agrees_with_a_page_model() -> None:
    run_state_machine_as_test(
        RadixMachine,
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


def test_match_is_page_granular_and_splits() -> None:
    cache = make_cache(page_size=4)
    assert put(cache, list(range(16))) == 0
    for length, want in ((16, 16), (15, 12), (4, 4), (3, 0), (20, 16)):
        assert len(cache.match_prefix(cache.key(list(range(length))))) == want
    diverging = [*range(6), 99, 98, 97, 96]
    assert len(cache.match_prefix(cache.key(diverging))) == 4
    assert put(cache, diverging) == 4
    cache.check()
    assert cache.total_size() == 16 + 4


def test_namespaces_never_share() -> None:
    cache = make_cache()
    put(cache, [1, 2, 3], "tenant")
    for other in (None, "", "tenant2"):
        assert len(cache.match_prefix(cache.key([1, 2, 3], namespace=other))) == 0
        assert put(cache, [1, 2, 3], other) == 0
    assert cache.total_size() == 12
    assert len(cache.match_prefix(cache.key([1, 2, 3], namespace="tenant"))) == 3


def test_bigram_keys_depend_on_the_next_token() -> None:
    cache = make_cache(bigram=True)
    put(cache, [1, 2, 3, 4])
    assert cache.total_size() == 3
    assert len(cache.match_prefix(cache.key([1, 2, 3, 4]))) == 3
    assert len(cache.match_prefix(cache.key([1, 2, 3, 5]))) == 2
    assert len(cache.match_prefix(cache.key([1, 2]))) == 1
    assert len(cache.match_prefix(cache.key([1]))) == 0
    assert len(cache.match_prefix(cache.key([]))) == 0
    assert [run.tokens.tolist() for run in cache.iter_cached_runs()][0][0] == 1
    with pytest.raises(RuntimeError, match="bigram=False"):
        cache.match_prefix(RadixKey([1, 2, 3]))


def test_bigrams_keep_large_ids_apart() -> None:
    big = 2**31 - 1
    elements = RadixKey([big, 0, big, big], bigram=True).elements()
    assert elements.tolist() == [big << 32, big, (big << 32) | big]


def test_key_does_not_alias_a_token_list() -> None:
    tokens = [1, 2, 3]
    cache = make_cache()
    put(cache, tokens)
    tokens[0] = 9
    assert len(cache.match_prefix(cache.key([1, 2, 3]))) == 3
    array = np.array([5, 6, 7], dtype=np.int64)
    cache.insert(cache.key(array), cache.allocator.alloc(3))
    array[:] = 0
    assert len(cache.match_prefix(cache.key([5, 6, 7]))) == 3


def test_locked_paths_survive_any_eviction() -> None:
    cache = make_cache(pages=16)
    put(cache, [1, 2, 3, 4])
    put(cache, [1, 2, 8, 9])
    held = cache.match_prefix(cache.key([1, 2, 3]))
    cache.inc_lock_ref(held.last_node)
    assert cache.evict(100) == 3
    assert (
        cache.match_prefix(cache.key([1, 2, 3])).slots.tolist() == held.slots.tolist()
    )
    assert (cache.evictable_size(), cache.protected_size()) == (0, 3)
    with pytest.raises(RuntimeError, match="3 cached slots are locked"):
        cache.reset()
    cache.dec_lock_ref(held.last_node)
    assert cache.evict(1) == 1, "no more than asked for"
    assert len(cache.match_prefix(cache.key([1, 2, 3]))) == 2
    with pytest.raises(RuntimeError, match="is not locked"):
        cache.dec_lock_ref(cache.match_prefix(cache.key([1, 2])).last_node)


def test_a_leaf_that_is_locked_again_is_not_evicted() -> None:
    """It was queued with its newest use when it was unlocked."""
    cache = make_cache()
    put(cache, [1, 2, 3])
    put(cache, [9])
    leaf = cache.match_prefix(cache.key([1, 2, 3])).last_node
    # Looks at the leaf, which has been used since, before it finds the other one.
    assert cache.evict(1) == 1
    cache.inc_lock_ref(leaf)
    assert cache.evict(3) == 0
    assert len(cache.match_prefix(cache.key([1, 2, 3]))) == 3
    cache.dec_lock_ref(leaf)
    assert cache.evict(3) == 3


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_match_from_before_a_flush_cannot_be_locked(depth: int) -> None:
    cache = make_cache()
    for end in range(1, 4):
        put(cache, [1, 2, 3][:end])
    old = cache.match_prefix(cache.key([1, 2, 3][:depth])).last_node
    cache.reset()
    with pytest.raises(RuntimeError, match="was evicted after its match"):
        cache.inc_lock_ref(old)


def test_a_leaf_that_has_grown_a_child_is_not_evicted_before_it() -> None:
    cache = make_cache()
    put(cache, [1, 2, 3])
    put(cache, [1, 2, 3, 4, 5])
    assert cache.evict(2) == 2
    assert len(cache.match_prefix(cache.key([1, 2, 3, 4, 5]))) == 3


@pytest.mark.parametrize("evicted", [1, 8])
def test_a_match_that_was_evicted_cannot_be_locked(evicted: int) -> None:
    cache = make_cache()
    put(cache, list(range(8)))
    stale = cache.match_prefix(cache.key(list(range(8))))
    cache.evict(evicted)
    with pytest.raises(RuntimeError, match="match again"):
        cache.inc_lock_ref(stale.last_node)
    cache.check()


def test_a_handle_survives_a_split_above_it() -> None:
    cache = make_cache()
    put(cache, list(range(8)))
    held = cache.match_prefix(cache.key(list(range(8))))
    cache.inc_lock_ref(held.last_node)
    put(cache, [0, 1, 2, 77])
    assert cache.protected_size() == 8 and held.last_node.end == 8
    cache.dec_lock_ref(held.last_node)
    assert cache.protected_size() == 0
    cache.check()


def test_insert_needs_a_slot_per_position() -> None:
    cache = make_cache()
    with pytest.raises(RuntimeError, match="3 key positions but 2 slots"):
        cache.insert(cache.key([1, 2, 3]), torch.tensor([1, 2]))


DAMAGES = {
    "slot": "out of their page order",
    "alias": "cached twice",
    "length": "is not whole pages",
    "position": "starts at a wrong position",
    "namespace": "wrong namespace",
    "lock": "locked more than parent",
    "age": "newer than parent",
    "count": "cache counts",
    "free": "are free",
    "queue": "wrong queue mark",
}


def damaged(change: str | None) -> RadixCache:
    """A small tree with one thing wrong in it."""
    cache = make_cache(page_size=2)
    put(cache, [1, 2, 3, 4, 5, 6])
    put(cache, [1, 2, 7, 8])
    node = next(n for n in cache.iter_nodes() if n.start == 2)
    first = next(n for n in cache.iter_nodes() if n.start == 0)
    if change == "slot":
        node.slots = node.slots[::-1].copy()
    elif change == "alias":
        first.slots = node.slots[:2]
    elif change == "length":
        node.slots = node.slots[:1]
    elif change == "position":
        node.start += 2
    elif change == "namespace":
        node.namespace = "x"
    elif change == "lock":
        node.lock_ref = 1
    elif change == "age":
        node.last_access = 10**9
    elif change == "count":
        first.lock_ref = 1  # not by `inc_lock_ref`, which counts it
    elif change == "free":
        cache.allocator.free(torch.from_numpy(node.slots))
    elif change == "queue":
        node.queued = False
    return cache


def test_check_sees_damage() -> None:
    damaged(None).check()
    for change in DAMAGES:
        with pytest.raises(RuntimeError, match=DAMAGES[change]):
            damaged(change).check()


def test_long_keys_are_matched_fast() -> None:
    cache = make_cache(pages=8192)
    tokens = np.arange(8192) * 7 % 30011
    put(cache, tokens.tolist())
    key = cache.key(tokens)
    best = min(_seconds(cache, key) for _ in range(50))
    assert best < 1e-3


def _seconds(cache: RadixCache, key: RadixKey) -> float:
    begin = time.perf_counter()
    assert len(cache.match_prefix(key)) == 8192
    return time.perf_counter() - begin


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
