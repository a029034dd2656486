"""Prefix cache: a radix tree over token sequences, shared page by page.

It owns the slots in its nodes and decides which ones are evicted first. It knows locks,
but not the requests behind them. Time is a counter of accesses, not a clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence, Set
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.mem_cache.allocator import host_array
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    CacheableReq,
    CachedRun,
    MatchResult,
    RadixKey,
    element_tokens,
)
from sglang.srt.mem_cache.saved_tree import SavedTree, build_runs, save_runs
from sglang.srt.mem_cache.tree_check import check_tree
from sglang.srt.mem_cache.tree_node import EMPTY, TreeNode

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator import BaseAllocator
    from sglang.srt.mem_cache.groups.runs import Spans
    from sglang.srt.mem_cache.groups.slots import GroupHold
    from sglang.srt.mem_cache.groups.state_slots import StateSlots
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.page_ledger import IntArray


class RadixCache(BasePrefixCache):
    """Radix tree whose edges are runs of whole pages.

    All keys are below one root. A child's key is its first page of elements; directly
    below the root it includes the namespace, so namespaces never share a node. A locked
    path is locked up to the root, so an unlocked node has no locked node below it, and
    every unlocked slot can be evicted leaf by leaf.

    The tree holds primary slots. What its runs have in the secondary groups is up to
    each group (`GroupRuns`).

    Eviction takes the least recently used unlocked leaf, from its end, in whole pages
    and no more than requested. Its queue is a heap with at most one entry per node,
    corrected when popped.
    """

    def __init__(
        self,
        *,
        req_to_token_pool: ReqToTokenPool,
        allocator: BaseAllocator,
        bigram: bool = False,
        states: StateSlots | None = None,
    ) -> None:
        super().__init__(
            req_to_token_pool=req_to_token_pool, allocator=allocator, bigram=bigram
        )
        self.root = TreeNode()
        self._serial = count(1)
        self._now = 0
        self._queue: list[tuple[int, int, TreeNode]] = []
        self._evictable = 0
        self._protected = 0
        groups = [
            slots.create_runs(self, index)
            for index, slots in enumerate(allocator.secondary)
        ]
        if states is not None:
            self.checkpoints = states.create_runs(self, len(groups))
            groups.append(self.checkpoints)
        self.groups = tuple(groups)

    # -- lookup --------------------------------------------------------------------

    def match_prefix(self, key: RadixKey) -> MatchResult:
        path = self._descend(key, self._elements(key))
        spans = [(node, len(node.slots)) for node in path]
        cached_len = path[-1].end if path else 0
        return self._result(path[: self._num_usable(spans)], cached_len)

    def match_length(self, key: RadixKey) -> int:
        spans = self._spans(key, self._elements(key))
        return sum(length for _, length in spans[: self._num_usable(spans)])

    def cached_end(self, key: RadixKey) -> TreeNode:
        path = self._descend(key, self._elements(key))
        return path[-1] if path else self.root

    def insert(
        self,
        key: RadixKey,
        slots: torch.Tensor,
        holds: Sequence[GroupHold] | None = None,
    ) -> int:
        if holds is None:
            holds = [group.slots.hold(0) for group in self.groups]
        present, _ = self._insert(key, host_array(slots), holds)
        return present

    def _insert(
        self, key: RadixKey, slots: IntArray, holds: Sequence[GroupHold]
    ) -> tuple[int, TreeNode]:
        """Insert the whole pages of a key, as `insert`.

        Returns:
            (length already present, the node where these pages end).
        """
        elements = self._elements(key)
        end = self._aligned(len(elements))
        if len(slots) < end:
            raise RuntimeError(f"insert: {end} key positions but {len(slots)} slots")
        path = self._descend(key, elements)
        return self._extend_path(path, key, elements[:end], slots[:end], holds)

    def _extend_path(
        self,
        path: list[TreeNode],
        key: RadixKey,
        elements: IntArray,
        slots: IntArray,
        holds: Sequence[GroupHold],
    ) -> tuple[int, TreeNode]:
        """Add the missing part of a key below the nodes of its beginning; see
        `_insert`."""
        held = list(zip(self.groups, holds, strict=True))
        for group, hold in held:
            path = [part for node in path for part in group.revive(node, slots, hold)]
        last = path[-1] if path else self.root
        present, end = last.end, len(elements)
        cuts = [min(cut, end) for hold in holds for cut in hold.cuts()]
        for stop in sorted({*cuts, end}):
            if stop > last.end:
                last = self._add_leaf(last, key, elements[:stop], slots[:stop])
                for group, hold in held:
                    group.on_leaf(last, hold)
        return present, last

    def _add_leaf(
        self, parent: TreeNode, key: RadixKey, elements: IntArray, slots: IntArray
    ) -> TreeNode:
        """Add the part of `elements` and `slots` past the end of `parent` below it."""
        start = parent.end
        leaf = TreeNode(
            parent=parent,
            elements=elements[start:].copy(),
            slots=slots[start:].copy(),
            start=start,
            namespace=key.namespace,
            last_access=self._now,
            serial=next(self._serial),
            marks=tuple(group.new_mark() for group in self.groups),
        )
        parent.children[self._edge(key, elements, start)] = leaf
        self._evictable += len(leaf.slots)
        self._enqueue(leaf)
        for listener in self.listeners:
            listener.on_stored(leaf)
        return leaf

    def _spans(self, key: RadixKey, elements: IntArray) -> list[tuple[TreeNode, int]]:
        """Return the nodes of the longest cached prefix and how many elements of each
        match; only the last node may have more."""
        spans: list[tuple[TreeNode, int]] = []
        node, pos, end = self.root, 0, self._aligned(len(elements))
        while pos < end:
            child = node.children.get(self._edge(key, elements, pos))
            if child is None:
                break
            common = self._common(child, elements, pos, end)
            spans.append((child, common))
            pos += common
            if common < len(child.slots):
                break
            node = child
        return spans

    def _descend(self, key: RadixKey, elements: IntArray) -> list[TreeNode]:
        """Return the nodes of the longest cached prefix.

        Splits the last node if the prefix ends inside it; marks all as accessed now.
        """
        self._now += 1
        path = [
            node if length == len(node.slots) else self.split(node, length)
            for node, length in self._spans(key, elements)
        ]
        for node in path:
            node.last_access = self._now
        return path

    def _num_usable(self, spans: Spans) -> int:
        """Return how many of these spans, from the first on, a request can use: from
        the end of the last one it can continue in every group."""
        usable = len(spans)
        if self.groups:
            verdicts = [group.are_usable(spans) for group in self.groups]
            while usable and not all(verdict[usable - 1] for verdict in verdicts):
                usable -= 1
        return usable

    def _result(self, path: list[TreeNode], cached_len: int) -> MatchResult:
        slots = np.concatenate([EMPTY, *(node.slots for node in path)])
        return MatchResult(
            slots=torch.from_numpy(slots),
            last_node=path[-1] if path else self.root,
            cached_len=cached_len,
        )

    def _elements(self, key: RadixKey) -> IntArray:
        if key.bigram != self.bigram:
            raise RuntimeError(
                f"key with bigram={key.bigram} in a cache with bigram={self.bigram}"
            )
        return key.elements()

    def _edge(self, key: RadixKey, elements: IntArray, pos: int) -> Hashable:
        page = elements[pos : pos + self.page_size].tobytes()
        return page if pos else (key.namespace, page)

    def _common(self, node: TreeNode, elements: IntArray, pos: int, end: int) -> int:
        """Return how many elements, in whole pages, `node` shares with [pos:end]."""
        length = min(len(node.elements), end - pos)
        differs = node.elements[:length] != elements[pos : pos + length]
        first = int(differs.argmax())
        return self._aligned(first) if differs[first] else length

    def _aligned(self, length: int) -> int:
        return length - length % self.page_size

    def split(self, node: TreeNode, length: int) -> TreeNode:
        """Cut `node` after `length` elements; return the new upper part.

        The lower part keeps its identity, so that handles to it stay valid.
        """
        parent = node.parent
        assert parent is not None
        upper = node.first_part(length, serial=next(self._serial))
        self._replace_child(node, upper)
        node.parent = upper
        node.elements = node.elements[length:]
        node.slots = node.slots[length:]
        node.start += length
        upper.children[node.elements[: self.page_size].tobytes()] = node
        for listener in self.listeners:
            listener.on_split(upper, node)
        for group in self.groups:
            group.on_split(upper, node)
        return upper

    def _replace_child(self, old: TreeNode, new: TreeNode | None) -> None:
        """Replace `old` in its parent by `new` (same first page) or nothing."""
        parent = old.parent
        assert parent is not None
        page = old.elements[: self.page_size].tobytes()
        edge = page if old.start else (old.namespace, page)
        if new is None:
            del parent.children[edge]
        else:
            parent.children[edge] = new

    # -- locks and eviction --------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode) -> None:
        if node.parent is None and node is not self.root:
            raise RuntimeError(f"{node} was evicted after its match: match again")
        end = node
        while node.parent is not None:
            if node.lock_ref == 0:
                self._evictable -= len(node.slots)
                self._protected += len(node.slots)
            node.lock_ref += 1
            node.hits += 1
            node = node.parent
        for group in self.groups:
            group.lock(end)

    def dec_lock_ref(
        self, node: TreeNode, holds: Sequence[GroupHold] | None = None
    ) -> None:
        for index, group in enumerate(self.groups):
            if holds is None or holds[index].has_lock:
                group.unlock(node)
        while node.parent is not None:
            if node.lock_ref == 0:
                raise RuntimeError(f"{node} is not locked")
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self._evictable += len(node.slots)
                self._protected -= len(node.slots)
                self._enqueue(node)
            node = node.parent

    def evict(self, num_slots: int) -> int:
        freed: list[IntArray] = []
        missing = num_slots
        while missing > 0 and (leaf := self._pop_oldest_leaf()) is not None:
            keep = max(len(leaf.slots) - missing, 0)
            keep = self._aligned(keep)
            freed.append(leaf.slots[keep:])
            missing -= len(leaf.slots) - keep
            self._cut_leaf(leaf, keep)
        if not freed:
            return 0
        slots = np.concatenate(freed)
        self._evictable -= len(slots)
        self.allocator.free(torch.from_numpy(slots))
        return len(slots)

    def drop_leaf(self, leaf: TreeNode) -> None:
        """Take an unlocked leaf out of the tree and free its slots."""
        self._evictable -= len(leaf.slots)
        self._cut_leaf(leaf, 0)
        self.allocator.free(torch.from_numpy(leaf.slots))

    def _cut_leaf(self, leaf: TreeNode, keep: int) -> None:
        """Drop the leaf, or replace it by a new one with its first `keep` elements.

        It is replaced, not changed, because a holder of the old leaf without a lock
        must notice that slots are gone.
        """
        parent = leaf.parent
        assert parent is not None
        for listener in self.listeners:
            listener.on_evicting(leaf, keep)
        rest: TreeNode | None = None
        if keep == 0:
            self._replace_child(leaf, None)
            if parent is not self.root:
                self._enqueue(parent)
        else:
            rest = leaf.first_part(keep, serial=leaf.serial)
            self._replace_child(leaf, rest)
            self._enqueue(rest)
        leaf.parent = None
        for listener in self.listeners:
            listener.on_removed(leaf, rest)
        for group in self.groups:
            group.on_removed(leaf, rest)

    def _enqueue(self, node: TreeNode) -> None:
        """Queue a node that may have become an unlocked leaf."""
        if not (node.queued or node.children or node.lock_ref):
            node.queued = True
            heapq.heappush(self._queue, (node.last_access, node.serial, node))

    def _pop_oldest_leaf(self) -> TreeNode | None:
        while self._queue:
            stamp, _, node = heapq.heappop(self._queue)
            node.queued = False
            if node.parent is None:
                continue
            if node.last_access == stamp and not (node.children or node.lock_ref):
                return node
            self._enqueue(node)
        return None

    def evictable_size(self) -> int:
        return self._evictable

    def protected_size(self) -> int:
        return self._protected

    def reset(self) -> None:
        if self._protected:
            raise RuntimeError(
                f"reset: {self._protected} cached slots are locked by running requests"
            )
        cached = self.cached_slots()
        self.forget()
        self.allocator.free(cached)

    def forget(self) -> None:
        for run in self.iter_nodes():
            run.parent = None
        self.root = TreeNode()
        self._queue.clear()
        self._evictable = self._protected = 0
        for group in self.groups:
            group.reset()
        for listener in self.listeners:
            listener.on_cleared()

    # -- requests ------------------------------------------------------------------

    def cache_finished_req(self, req: CacheableReq) -> None:
        node = self._held_node(req)
        protected, allocated = req.cache_protected_len, req.allocated_len
        with self.allocator.free_group():
            if req.no_cache:
                self._free_row(req, protected, allocated)
            else:
                shared, last = self._insert_row(req)
                self._free_row(req, protected, shared)
                self._free_row(req, max(last.end, protected), allocated)
        self.dec_lock_ref(node, req.holds)
        self.mark_released(req)

    def cache_unfinished_req(self, req: CacheableReq) -> None:
        node = self._held_node(req)
        if req.no_cache:
            return
        protected = req.cache_protected_len
        shared, last = self._insert_row(req)
        if last.end <= protected:
            return
        if shared > protected:
            self._free_row(req, protected, shared)
            slots = torch.from_numpy(_slots_up_to(last, shared)[protected:])
            self.req_to_token_pool.write(req.req_pool_idx, protected, slots)
        self.inc_lock_ref(last)
        self.dec_lock_ref(node, req.holds)
        self.mark_held(req, last, last.end)

    def _committed_key(self, req: CacheableReq) -> RadixKey:
        tokens = req.fill_ids()
        if len(tokens) < req.committed_len:
            raise RuntimeError(
                f"request of row {req.req_pool_idx}: {len(tokens)} tokens known but "
                f"{req.committed_len} committed"
            )
        return self.key(tokens[: req.committed_len], namespace=req.namespace)

    def _insert_row(self, req: CacheableReq) -> tuple[int, TreeNode]:
        """Insert the whole committed pages.

        Returns:
            (length already present, the node where these pages end).
        """
        key = self._committed_key(req)
        aligned = self._aligned(len(key))
        slots = self.req_to_token_pool.row_slots(req.req_pool_idx, 0, aligned)
        present, last = self._insert(key, slots.numpy(), req.holds)
        if present < min(req.cache_protected_len, aligned):
            raise RuntimeError(
                f"request of row {req.req_pool_idx}: its locked prefix of "
                f"{req.cache_protected_len} has only {present} in the cache under its "
                "tokens and namespace"
            )
        return present, last

    # -- damage --------------------------------------------------------------------

    def cut(self, nodes: Sequence[TreeNode]) -> torch.Tensor:
        chosen = {id(node) for node in nodes}
        tops = [node for node in nodes if not _has_ancestor(node, chosen)]
        whole = [below for top in tops for below in _with_descendants(top)]
        for node in whole:
            if node.lock_ref:
                raise RuntimeError(f"{node} cannot be cut: a request relies on it")
        for listener in self.listeners:
            listener.on_cutting(whole)
        for top in tops:
            parent = top.parent
            assert parent is not None
            self._replace_child(top, None)
            if parent is not self.root:
                self._enqueue(parent)
        for node in whole:
            # A holder without a lock, such as a sweep, must notice.
            node.parent = None
            self._evictable -= len(node.slots)
            for listener in self.listeners:
                listener.on_removed(node, None)
            for group in self.groups:
                group.on_removed(node)
        return torch.from_numpy(np.concatenate([EMPTY, *(n.slots for n in whole)]))

    # -- checkpoints ---------------------------------------------------------------

    def save(self) -> tuple[SavedTree | None, dict[int, int]]:
        runs, index = save_runs(self.root)
        saved = SavedTree(runs=runs, now=self._now, next_serial=next(self._serial))
        return saved, index

    def load(self, saved: SavedTree | None) -> list[TreeNode]:
        if saved is None:
            return []
        nodes = build_runs(saved.runs, self.root, page_size=self.page_size)
        self._now = saved.now
        self._serial = count(saved.next_serial)
        for node in nodes:
            node.marks = tuple(group.new_mark() for group in self.groups)
            if node.lock_ref:
                self._protected += len(node.slots)
            else:
                self._evictable += len(node.slots)
            self._enqueue(node)
        return nodes

    # -- inspection ----------------------------------------------------------------

    def iter_nodes(self) -> Iterator[TreeNode]:
        for node in self.root.children.values():
            yield from _with_descendants(node)

    def iter_cached_runs(self) -> Iterator[CachedRun]:
        for node in self.iter_nodes():
            parent = node.parent
            assert parent is not None
            elements = node.elements
            yield CachedRun(
                slots=node.slots,
                tokens=element_tokens(elements, bigram=self.bigram),
                start=node.start,
                parent_slot=int(parent.slots[-1]) if node.start else -1,
                namespace=node.namespace,
                locked=node.lock_ref > 0,
            )

    def check(self) -> None:
        queued = {id(node) for _, _, node in self._queue}
        check_tree(self.root, page_size=self.page_size, queued=queued)
        nodes = list(self.iter_nodes())
        sizes = {
            locked: sum(len(n.slots) for n in nodes if (n.lock_ref > 0) == locked)
            for locked in (False, True)
        }
        if (sizes[False], sizes[True]) != (self._evictable, self._protected):
            raise RuntimeError(
                f"cache counts {self._evictable} evictable and {self._protected} "
                f"protected slots, the tree has {sizes[False]} and {sizes[True]}"
            )
        pages = np.unique(host_array(self.cached_slots()) // self.page_size)
        stray = np.setdiff1d(pages, self.allocator.owned_pages())
        if len(stray):
            raise RuntimeError(f"cached pages {stray[:8].tolist()} are free")
        for group in self.groups:
            group.check()


def _slots_up_to(node: TreeNode, end: int) -> IntArray:
    """Return the slots of the first `end` positions of the path to `node`."""
    parts = []
    above: TreeNode | None = node
    while above is not None:
        parts.append(above.slots)
        above = above.parent
    return np.concatenate(parts[::-1])[:end]


def _with_descendants(top: TreeNode) -> Iterator[TreeNode]:
    """Yield `top` and every node below it, parents before children."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _has_ancestor(node: TreeNode, ids: Set[int]) -> bool:
    """Return whether one of the nodes with these ids lies above `node`."""
    above = node.parent
    while above is not None:
        if id(above) in ids:
            return True
        above = above.parent
    return False
