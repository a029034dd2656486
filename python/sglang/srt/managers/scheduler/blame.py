"""Finds what damage touches: requests, cached runs and pages.

A request is touched if its forward was flagged, or if it holds a damaged slot in its
own row or through the prefix cache. Every request that relies on a cached run that has
to go is also touched, and so on until nothing is added. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kv_canary.checks import Blames, Severity, reasons_where
from sglang.srt.mem_cache.allocator import host_array

if TYPE_CHECKING:
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import LaunchRecord
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.tree_node import TreeNode

# The slot holds another owner's bytes.
_OVERWRITTEN = reasons_where(lambda check: check.blames is Blames.HOLDER)
# The damaged slots are unknown.
_ANYWHERE = reasons_where(lambda check: check.blames is Blames.FORWARD)
# Tokens are in doubt even if the damage is in the draft's pool.
_OF_TOKENS = reasons_where(lambda check: check.severity is Severity.TOKENS)


def rate_severity(pool: int, reasons: int) -> Severity:
    """Return what damage in a pool puts in doubt; pool 0 belongs to the target."""
    is_draft = pool > 0 and not reasons & _OF_TOKENS
    return Severity.DRAFTS if is_draft else Severity.TOKENS


class Fact(NamedTuple):
    """A violation in terms of slots and requests; `serial` 0 means no request.
    `checkpoint`: the slot of a damaged checkpoint of recurrent state, or 0."""

    pool: int
    reasons: int
    serial: int
    slot: int
    checkpoint: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDamage:
    """The findings of a step, identical on every rank.

    Fields:
        facts: facts of all violations. verdicts: reasons of each row, by pool.
        has_overflowed: whether there are more violations than facts.
    """

    facts: Sequence[Fact]
    verdicts: Sequence[Sequence[int]]
    has_overflowed: bool = False

    def reasons_of(self, serial: int) -> int:
        """Return the reasons of all facts about a request."""
        return reduce(or_, (f.reasons for f in self.facts if f.serial == serial), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Everything that is touched.

    Fields:
        withheld: requests whose tokens of the step cannot be trusted.
        rebuilt: requests whose drafts alone are in doubt.
        nodes: cached runs that have to go, including everything below them.
        pages: damaged pages, ascending.
        checkpoints: slots of damaged checkpoints of recurrent state.
    """

    withheld: tuple[Req, ...]
    rebuilt: tuple[Req, ...]
    nodes: tuple[TreeNode, ...]
    pages: IntArray
    checkpoints: frozenset[int] = frozenset()

    @property
    def is_empty(self) -> bool:
        touched = self.withheld or self.rebuilt or self.nodes or self.checkpoints
        return not (touched or len(self.pages))


class _Books:
    """Current holders of every page according to the host's records.

    Attributes:
        reqs: requests that hold memory. own: the pages in their rows that do not belong
            to the cache, in row order. paths: the cached runs they rely on, last one
            first.
    """

    def __init__(self, requests: Iterable[Req], cache: BasePrefixCache) -> None:
        page_size, num_pages = cache.page_size, cache.allocator.num_pages
        self.page_size = page_size
        self._region = cache.req_to_token_pool.region
        self.reqs = [req for req in requests if req.req_pool_idx]
        self.own = [_own_pages(req, cache) for req in self.reqs]
        self.paths = [_path(req.last_node) for req in self.reqs]
        self.nodes = list(cache.iter_nodes())
        self._node_at = np.full(num_pages + 1, -1, dtype=np.int64)
        for i, node in enumerate(self.nodes):
            self._node_at[node.slots[::page_size] // page_size] = i
        self._claims: dict[int, list[int]] = {}
        self._claimed = np.zeros(num_pages + 1, dtype=np.bool_)
        for pages in self.own:
            self._claimed[pages] = True
        self._reliers: dict[int, list[int]] = {}
        for i, path in enumerate(self.paths):
            for node in path:
                self._reliers.setdefault(id(node), []).append(i)

    def has_page(self, page: int) -> bool:
        """Whether requests can get this page."""
        return 0 < page < len(self._node_at)

    def region_owner(self, slot: int) -> int | None:
        """Index of the request whose row a slot of the draft region belongs to."""
        row = 0 if self._region is None else self._region.slot_to_row(slot)
        if not row:
            return None
        held = (i for i, req in enumerate(self.reqs) if req.req_pool_idx == row)
        return next(held, None)

    def page_node(self, page: int) -> TreeNode | None:
        """Return the cached run that a page belongs to."""
        index = int(self._node_at[page])
        return None if index < 0 else self.nodes[index]

    def page_nodes(self, pages: IntArray) -> list[TreeNode]:
        """Return the cached runs of these pages, each once."""
        found = self._node_at[pages]
        return [self.nodes[i] for i in dict.fromkeys(found[found >= 0].tolist())]

    def claimants(self, page: int) -> list[int]:
        """Indices of the requests that have a page in their own part of a row: at most
        one, if the host's records are right.
        """
        if not self._claimed[page]:
            return []
        if page not in self._claims:
            self._claims[page] = [i for i, own in enumerate(self.own) if page in own]
        return self._claims[page]

    def shared_claims(self, pages: IntArray) -> list[int]:
        """Requests that also claim one of `pages`, including the owner."""
        is_meant = np.zeros(len(self._node_at), dtype=np.bool_)
        is_meant[pages] = True
        return [i for i, own in enumerate(self.own) if is_meant[own].any()]

    def reliers(self, node: TreeNode) -> list[int]:
        """Indices of the requests whose cached prefix contains this run."""
        return self._reliers.get(id(node), [])

    def holds(self, index: int, page: int) -> bool:
        """Whether a page is in the row of a request."""
        node = self.page_node(page)
        if node is not None and index in self.reliers(node):
            return True
        return index in self.claimants(page)


def _own_pages(req: Req, cache: BasePrefixCache) -> IntArray:
    slots = cache.req_to_token_pool.row_slots(
        req.req_pool_idx, req.cache_protected_len, req.allocated_len
    )
    pages: IntArray = host_array(slots) // cache.page_size
    # Slots of a page are adjacent; a page that is held twice appears twice here.
    distinct: IntArray = pages[np.diff(pages, prepend=-1) != 0]
    return distinct


def _path(node: TreeNode | None) -> list[TreeNode]:
    path = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    return path


class _Walk:
    """Follows damage from holder to holder.

    Args:
        starts: first position that the step wrote, by serial.
    """

    def __init__(self, books: _Books, starts: Mapping[int, int]) -> None:
        self._books = books
        self._starts = starts
        self._index = {req.serial: i for i, req in enumerate(books.reqs)}
        self._requests: dict[int, Severity] = {}
        self._pages: dict[int, Severity] = {}
        self._nodes: dict[int, tuple[TreeNode, Severity]] = {}
        self._due: list[Callable[[], None]] = []

    def find_request(self, serial: int) -> int | None:
        """Index of the request that holds memory under this serial."""
        return self._index.get(serial)

    def everything(self) -> None:
        """Touch all requests and the whole cache."""
        for i in range(len(self._books.reqs)):
            self.request(i, Severity.TOKENS)
        for node in self._books.nodes:
            self.node(node, Severity.TOKENS)

    def touch_all_pages(self, index: int, severity: Severity) -> None:
        """Touch every page that a request reads."""
        for page in self._books.own[index].tolist():
            self.page(page, severity)
        for node in self._books.paths[index]:
            first_slots = node.slots[:: self._books.page_size]
            for page in (first_slots // self._books.page_size).tolist():
                self.page(page, severity)

    def request(self, index: int, severity: Severity) -> None:
        if severity <= self._requests.get(index, 0):
            return
        self._requests[index] = severity
        self._due.append(partial(self._spread_from, index, severity))

    def page(self, page: int, severity: Severity) -> None:
        if severity <= self._pages.get(page, 0):
            return
        self._pages[page] = severity
        node = self._books.page_node(page)
        if node is not None:
            self.node(node, severity)
        for index in self._books.claimants(page):
            self.request(index, severity)

    def node(self, node: TreeNode, severity: Severity) -> None:
        """Touch a cached run and everything below it, which was computed from it."""
        if severity <= self._nodes.get(id(node), (node, 0))[1]:
            return
        self._nodes[id(node)] = node, severity
        for index in self._books.reliers(node):
            self.request(index, severity)
        for child in node.children.values():
            self._due.append(partial(self.node, child, severity))

    def _spread_from(self, index: int, severity: Severity) -> None:
        books = self._books
        # Records that give a page to two holders are damaged themselves.
        for other in books.shared_claims(books.own[index]):
            self.request(other, severity)
        for node in books.page_nodes(books.own[index]):
            self.node(node, severity)
        req, path = books.reqs[index], books.paths[index]
        # The step computed its new KV from doubtful slots.
        start = self._starts.get(req.serial)
        if req.is_healed_in_vain:
            # Wherever the damage was found, it may be in the cached prefix.
            start = 0
        if start is not None:
            for node in path:
                if node.end > start:
                    self.node(node, severity)

    def result(self) -> Blame:
        while self._due:
            self._due.pop()()
        reqs = self._books.reqs
        found = sorted(self._requests.items(), key=lambda item: reqs[item[0]].serial)
        return Blame(
            withheld=tuple(reqs[i] for i, s in found if s is Severity.TOKENS),
            rebuilt=tuple(reqs[i] for i, s in found if s is Severity.DRAFTS),
            nodes=tuple(node for node, _ in self._nodes.values()),
            pages=np.array(sorted(self._pages), dtype=np.int64),
        )


def find_blame(
    damage: StepDamage,
    launched: LaunchRecord,
    *,
    requests: Iterable[Req],
    cache: BasePrefixCache,
    rows: Sequence[int] = (),
) -> Blame:
    """Follow the findings of a step to everything they touch.

    Args:
        launched: the step, whose result has not been processed except for `rows`.
        requests: all unfinished requests.
        rows: rows of requests that got wrong tokens of this step from the host.
    """
    ended = [
        (row, rate_severity(pool, reasons))
        for pool, verdicts in enumerate(damage.verdicts)
        for row, reasons in enumerate(verdicts)
        if reasons and launched.reqs[row].is_finished
    ]
    ended += [(row, Severity.TOKENS) for row in rows]
    # Lookups split runs, so they come first.
    stale = [
        (node, severity)
        for row, severity in ended
        for node in _cached_since(launched, row, cache)
    ]
    starts = _split_at_starts(launched, cache)
    books = _Books(requests, cache)
    walk = _Walk(books, starts)
    for node, severity in stale:
        walk.node(node, severity)
    _follow_rows(walk, damage, launched, rows)
    for fact in damage.facts:
        _follow_fact(walk, books, fact, launched)
    checkpoints = frozenset(fact.checkpoint for fact in damage.facts) - {0}
    return replace(walk.result(), checkpoints=checkpoints)


def _split_at_starts(launched: LaunchRecord, cache: BasePrefixCache) -> dict[int, int]:
    """Return the first position that a step wrote for each request, by serial.

    With overlap it may already be in the cache, together with the prompt whose result
    came before; the cached run is split there.
    """
    starts = {}
    for row in launched.live_rows():
        req, start = launched.reqs[row], int(launched.starts[row])
        starts[req.serial] = start
        if req.cache_protected_len > start:
            _split(req, start, cache)
    return starts


def _split(req: Req, position: int, cache: BasePrefixCache) -> None:
    """Split a request's cached runs so that none crosses the page before `position`."""
    tokens = req.tokens[: position + cache.bigram]
    cache.cached_end(cache.key(tokens, namespace=req.namespace))


def _cached_since(
    launched: LaunchRecord, row: int, cache: BasePrefixCache
) -> list[TreeNode]:
    """Return cached runs with tokens that a row of a step wrote and its request may
    have left there.
    """
    req, start = launched.reqs[row], int(launched.starts[row])
    _split(req, start, cache)
    key = cache.key(req.tokens, namespace=req.namespace)
    path = _path(cache.cached_end(key))
    return [node for node in path if node.end > start]


def _follow_rows(
    walk: _Walk, damage: StepDamage, launched: LaunchRecord, rows: Sequence[int]
) -> None:
    flagged = [
        (index, rate_severity(pool, reasons), reasons)
        for pool, verdicts in enumerate(damage.verdicts)
        for row, reasons in enumerate(verdicts)
        if reasons and (index := _live_index(walk, launched, row)) is not None
    ]
    for row in rows:
        index = _live_index(walk, launched, row)
        if index is not None:
            walk.request(index, Severity.TOKENS)
    for index, severity, _ in flagged:
        walk.request(index, severity)
    if not damage.has_overflowed:
        return
    if any(reasons & _OVERWRITTEN for _, _, reasons in flagged):
        # The former owner of the slots is unknown.
        walk.everything()
    for index, severity, _ in flagged:
        walk.touch_all_pages(index, severity)


def _live_index(walk: _Walk, launched: LaunchRecord, row: int) -> int | None:
    req = launched.reqs[row]
    is_live = not req.is_finished and req.serial not in launched.dropped
    return walk.find_request(req.serial) if is_live else None


def _follow_fact(
    walk: _Walk, books: _Books, fact: Fact, launched: LaunchRecord
) -> None:
    severity = rate_severity(fact.pool, fact.reasons)
    index = walk.find_request(fact.serial)
    if index is not None:
        walk.request(index, severity)
    if fact.reasons & _ANYWHERE:
        for row in launched.live_rows():
            other = walk.find_request(launched.reqs[row].serial)
            if other is not None:
                walk.request(other, severity)
    page = fact.slot // books.page_size
    owner = books.region_owner(fact.slot)
    if owner is not None and fact.reasons & _OVERWRITTEN:
        walk.request(owner, severity)
    # A slot that a wrong table points to is intact.
    if not books.has_page(page):
        return
    if fact.reasons & _OVERWRITTEN or index is None or books.holds(index, page):
        walk.page(page, severity)
