"""Requests over a small pool: a state machine that models the KV bytes.

A dict from slot to content, so that a row that points to the wrong slot is seen
whatever the bookkeeping says.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sglang.srt.mem_cache.allocator import create_allocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.common import (
    check_busy,
    check_idle,
    extend_rows,
    release_req,
    usable_size,
)
from sglang.srt.mem_cache.groups.slots import GroupHold, PagedSlots
from sglang.srt.mem_cache.groups.state_slots import StateSlots
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.quarantine import Quarantine
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree_node import TreeNode

ROW_WIDTH = 48


@dataclass
class Req:
    """The least that a cache needs of a request."""

    tokens: list[int]
    req_pool_idx: int
    namespace: str | None = None
    no_cache: bool = False
    committed_len: int = 0
    allocated_len: int = 0
    cache_protected_len: int = 0
    branch_len: int = 0
    prefix_slots: torch.Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.int64)
    )
    last_node: TreeNode | None = None
    holds: tuple[GroupHold, ...] = ()
    unready_len: int = 0
    serial: int = field(default_factory=itertools.count(1).__next__)

    def fill_ids(self) -> list[int]:
        return self.tokens


def make_cache(
    *,
    pages: int,
    page_size: int,
    bigram: bool = False,
    radix: bool = True,
    secondary: Sequence[PagedSlots] = (),
    states: StateSlots | None = None,
) -> BasePrefixCache:
    allocator = create_allocator(
        size=pages * page_size, page_size=page_size, secondary=secondary
    )
    req_to_token_pool = ReqToTokenPool(
        size=4, row_width=ROW_WIDTH, device="cpu", context_len=ROW_WIDTH
    )
    pools: dict[str, Any] = {
        "req_to_token_pool": req_to_token_pool,
        "allocator": allocator,
        "bigram": bigram,
    }
    return RadixCache(**pools, states=states) if radix else ChunkCache(**pools)


def admit(
    cache: BasePrefixCache, tokens: list[int], namespace: str | None = None
) -> Req:
    """Match and lock the prefix, take a row and write the prefix to it."""
    match = cache.match_prefix(cache.key(tokens[:-1], namespace=namespace))
    cache.inc_lock_ref(match.last_node)
    rows = cache.req_to_token_pool.alloc(1)
    assert rows is not None
    cache.req_to_token_pool.write(rows[0], 0, match.slots)
    req = Req(tokens=tokens, req_pool_idx=rows[0], namespace=namespace)
    cache.mark_admitted(req, match)
    req.committed_len = req.allocated_len = len(match)
    return req


def subtree(top: TreeNode) -> list[TreeNode]:
    return [top, *(n for child in top.children.values() for n in subtree(child))]


def path_of(req: Req) -> list[TreeNode]:
    node, path = req.last_node, []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    return path


def held_slots(req: Req) -> list[int]:
    """The tree's slots that the request relies on, from position 0 on."""
    return [slot for node in path_of(req)[::-1] for slot in node.slots.tolist()]


class Pattern:
    """Slots that were filled; `changed` ones are not intact."""

    def __init__(self, content: dict[int, object]) -> None:
        self._content = content
        self.changed: set[int] = set()

    def fill(self, slots: torch.Tensor) -> None:
        for slot in slots.tolist():
            self._content.pop(slot, None)

    def is_intact(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.tensor([slot not in self.changed for slot in slots.tolist()])


class RequestMachine(RuleBasedStateMachine):
    """Up to four requests over a small pool that is always short of memory."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        tokens_in_pool=st.integers(24, 96),
        radix=st.sampled_from([True, True, True, False]),
        bigram=st.booleans(),
    )
    def build(
        self, page_size: int, tokens_in_pool: int, radix: bool, bigram: bool
    ) -> None:
        self.cache = make_cache(
            pages=tokens_in_pool // page_size,
            page_size=page_size,
            radix=radix,
            bigram=bigram,
        )
        self.bigram = bigram
        self.requests: list[Req] = []
        self.content: dict[int, object] = {}
        self.cache.allocator.register_on_free(
            lambda slots: [self.content.pop(slot, None) for slot in slots.tolist()]
        )
        self.pattern = Pattern(self.content)
        self.quarantine = Quarantine(self.cache.allocator, [self.pattern])
        self.forwards = 0

    def truth(self, req: Req, position: int) -> object:
        """Expected content of the slot of a position: everything it depends on."""
        end = position + (2 if self.bigram else 1)
        return req.namespace, position, tuple(req.tokens[:end])

    def write_kv(self, req: Req, start: int, end: int) -> None:
        slots = self.cache.req_to_token_pool.row_slots(
            req.req_pool_idx, start, end
        ).tolist()
        for position, slot in enumerate(slots, start=start):
            self.content[slot] = self.truth(req, position)

    @precondition(lambda self: len(self.requests) < 4)
    @rule(
        base=st.sampled_from([[1] * 20, [1, 2] * 10, [1] * 5 + [2] * 15]),
        cut=st.integers(0, 20),
        tail=st.lists(st.integers(1, 2), min_size=2, max_size=6),
        namespace=st.sampled_from([None, None, None, "x"]),
    )
    def start(
        self, base: list[int], cut: int, tail: list[int], namespace: str | None
    ) -> None:
        self.requests.append(admit(self.cache, base[:cut] + tail, namespace))

    def pick(self, data: st.DataObject) -> Req:
        return data.draw(st.sampled_from(self.requests))

    def usable(self) -> int:
        return usable_size(self.cache)

    def grow(self, reqs: list[Req], ends: list[int]) -> bool:
        starts = [req.allocated_len for req in reqs]
        usable = self.usable()
        cost = self.cache.allocator.extend_cost(starts, ends)
        cached = self.cache.total_size()
        slots = extend_rows(
            self.cache,
            rows=[req.req_pool_idx for req in reqs],
            prefix_lens=starts,
            seq_lens=ends,
        )
        assert (slots is None) == (cost > usable)
        if slots is None:
            assert self.cache.total_size() == cached, "evicted for nothing"
            return False
        assert len(slots) == sum(ends) - sum(starts)
        for req, end in zip(reqs, ends, strict=True):
            req.allocated_len = end
        return True

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data(), amount=st.sampled_from([1, 3, 7, 50]), share=st.booleans())
    def prefill_chunk(self, data: st.DataObject, amount: int, share: bool) -> None:
        req = self.pick(data)
        end = min(req.committed_len + amount, len(req.tokens) - 1)
        if end <= req.committed_len:
            return
        if end > req.allocated_len and not self.grow([req], [end]):
            return
        self.write_kv(req, req.committed_len, end)
        req.committed_len = end
        if share:
            self.cache.cache_unfinished_req(req)

    @precondition(lambda self: bool(self.requests))
    @rule(reserve=st.integers(1, 8), token=st.integers(1, 2))
    def decode(self, reserve: int, token: int) -> None:
        """One token for every request whose prompt is done, with room reserved."""
        ready = [
            req
            for req in self.requests
            if req.committed_len == len(req.tokens) - 1
            and req.committed_len + reserve <= ROW_WIDTH
        ]
        if not ready:
            return
        ends = [max(r.allocated_len, r.committed_len + reserve) for r in ready]
        if not self.grow(ready, ends):
            return
        for req in ready:
            req.tokens = [*req.tokens, token]
            self.write_kv(req, req.committed_len, req.committed_len + 1)
            req.committed_len += 1

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        req = self.pick(data)
        self.requests.remove(req)
        release_req(req, cache=self.cache)
        with pytest.raises(RuntimeError, match="released twice"):
            self.cache.cache_finished_req(req)

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data(), garbage=st.integers(0, 6))
    def abort(self, data: st.DataObject, garbage: int) -> None:
        """A prefill whose chunk was counted but not written must not be shared."""
        req = self.pick(data)
        # The newest token of a full row has no column.
        width = self.cache.req_to_token_pool.row_width
        end = min(req.allocated_len + garbage, len(req.tokens), width)
        if end > req.allocated_len and self.grow([req], [end]):
            req.committed_len = end
        req.no_cache = True
        cached = self.cache.total_size()
        self.cache.cache_unfinished_req(req)
        self.requests.remove(req)
        release_req(req, cache=self.cache)
        assert self.cache.total_size() == cached

    @rule(data=st.data(), stays=st.booleans())
    def damage(self, data: st.DataObject, stays: bool) -> None:
        """A page goes, with the cached run that it is in, all below it, and everybody
        who relies on them."""
        cache, page_size = self.cache, self.cache.page_size
        page = data.draw(st.integers(1, cache.allocator.num_pages))
        if page in self.quarantine.pages:
            return
        tops = [n for n in cache.iter_nodes() if page in n.slots // page_size]
        gone = {id(node) for top in tops for node in subtree(top)}
        touched = [
            req
            for req in self.requests
            if page in self.row_pages(req) or gone & {id(n) for n in path_of(req)}
        ]
        if any(node.lock_ref for top in tops for node in subtree(top)):
            with pytest.raises(RuntimeError, match="cannot be cut"):
                cache.cut(tops)
        before = cache.total_size()
        freed = [cache.let_go(req) for req in touched]
        self.requests = [req for req in self.requests if req not in touched]
        # A child that is named beside its parent changes nothing.
        freed.append(cache.cut([n for top in tops for n in subtree(top)]))
        assert cache.total_size() == before - len(freed[-1])
        pages = np.unique(torch.cat(freed).numpy() // page_size)
        slots = cache.allocator.page_slots(pages)
        if len(slots):
            cache.allocator.free(torch.from_numpy(slots))
        self.quarantine.add(np.array([page]), num_forwards=self.forwards)
        if stays:
            self.pattern.changed.add(page * page_size)

    @rule(is_idle=st.booleans())
    def forward(self, is_idle: bool) -> None:
        self.forwards += 1
        self.quarantine.look(num_forwards=None if is_idle else self.forwards)
        kept = {slot // self.cache.page_size for slot in self.pattern.changed}
        assert set(self.quarantine.kept.tolist()) <= kept
        assert not is_idle or self.quarantine.num_pages == len(self.quarantine.kept)

    def row_pages(self, req: Req) -> list[int]:
        slots = self.cache.req_to_token_pool.row_slots(
            req.req_pool_idx, 0, req.allocated_len
        )
        return (slots // self.cache.page_size).tolist()

    @rule(num_slots=st.sampled_from([1, 2, 5, 30]))
    def evict(self, num_slots: int) -> None:
        self.cache.evict(num_slots)

    @invariant()
    def every_row_reads_what_it_should(self) -> None:
        for req in self.requests:
            slots = self.cache.req_to_token_pool.row_slots(
                req.req_pool_idx, 0, req.committed_len
            )
            for position, slot in enumerate(slots.tolist()):
                assert self.content.get(slot) == self.truth(req, position)
            assert slots[: req.cache_protected_len].tolist() == held_slots(req)

    @invariant()
    def books_balance(self) -> None:
        self.cache.check()
        check_busy(self.cache, self.requests, aside=self.quarantine.pages)
        if not self.requests:
            check_idle(self.cache, fenced=self.quarantine.num_slots)

    def teardown(self) -> None:
        for req in self.requests:
            release_req(req, cache=self.cache)
        self.pattern.changed.clear()
        self.quarantine.look(num_forwards=None)
        if len(self.quarantine.kept):
            slots = self.cache.allocator.page_slots(self.quarantine.kept)
            self.cache.allocator.free(torch.from_numpy(slots))
        check_idle(self.cache)
        self.cache.reset()
        assert self.cache.allocator.available_size() == self.cache.allocator.size
        assert not self.content, "KV content of slots that nobody holds"
