"""Prefix cache of a model with sliding windows: runs that lost their window slots.

A run keeps its slots of the full group; its window slots go earlier, and leave a
*tombstone*. A prefix is of use up to a length whose last `window - 1` positions have
window slots, as those are what its next token reads:

```
        | run A       | run B (tombstone) | run C            |
of use  |-------------|                   . window - 1 .-----|
```
The prefix may be reused up to the end of A, not up to the end of B, and up to the end
of C if that is long enough.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.radix_cache import RadixCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.allocator import BaseAllocator
    from sglang.srt.mem_cache.base_prefix_cache import RadixKey
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.swa_slots import SwaSlots
    from sglang.srt.mem_cache.tree_node import TreeNode


class SwaRadixCache(RadixCache):
    """Radix tree whose runs may be tombstones.

    A lock covers the path, and of window slots the runs from `SwaSlots.first_read` of
    its end on; it is cut there into runs of its own, so that locking and unlocking find
    the same ones however the tree was split meanwhile.

    Window slots are evicted least recently used first, each run from its begin, so that
    its end stays of use; a leaf that is a tombstone is of no use and goes whole.
    """

    def __init__(
        self,
        *,
        req_to_token_pool: ReqToTokenPool,
        allocator: BaseAllocator,
        bigram: bool = False,
    ) -> None:
        super().__init__(
            req_to_token_pool=req_to_token_pool, allocator=allocator, bigram=bigram
        )
        if allocator.swa is None:
            raise ValueError("SwaRadixCache needs an allocator with window slots")
        self._swa: SwaSlots = allocator.swa
        self._swa_queue: list[tuple[int, int, int, TreeNode]] = []
        self._swa_entries = count()
        self._swa_evictable = 0
        self._swa_protected = 0

    # -- lookup --------------------------------------------------------------------

    def match_length(self, key: RadixKey) -> int:
        spans = self._spans(key, self._elements(key))
        return self._usable_length([(node.has_swa, length) for node, length in spans])

    def cached_end(self, key: RadixKey) -> TreeNode:
        return self._result(self._descend(key, self._elements(key))).last_node

    def _usable(self, path: list[TreeNode]) -> list[TreeNode]:
        runs = [(node.has_swa, len(node.slots)) for node in path]
        length = self._usable_length(runs)
        return [node for node in path if node.end <= length]

    def _usable_length(self, runs: Sequence[tuple[bool, int]]) -> int:
        """The longest of the lengths at which a run ends that a request can go on from.

        Args:
            runs: (whether it has window slots, its length), from position 0 on.
        """
        usable = end = kept_from = 0
        for has_swa, length in runs:
            end += length
            if not has_swa:
                kept_from = end
            elif kept_from <= self._swa.first_read(end):
                usable = end
        return usable

    def _extend_path(
        self,
        path: list[TreeNode],
        key: RadixKey,
        elements: IntArray,
        slots: IntArray,
        swa_from: int,
    ) -> tuple[int, TreeNode]:
        for node in path:
            self._revive(node, slots, swa_from)
        parent = path[-1] if path else self.root
        present, end = parent.end, len(elements)
        for stop in (min(swa_from, end), end):
            if stop > parent.end:
                parent = self._add_leaf(parent, key, elements[:stop], slots[:stop])
                if parent.start >= swa_from:
                    self._swa_evictable += len(parent.slots)
                    self._swa_enqueue(parent)
                else:
                    parent.has_swa = False
        return present, parent

    def _revive(self, node: TreeNode, slots: IntArray, swa_from: int) -> None:
        """Give a tombstone the window slots of `slots`, which hold the same tokens."""
        if node.has_swa or node.end <= swa_from:
            return
        if node.start < swa_from:
            self._split(node, swa_from - node.start)
        self._swa.move(
            dst=self._pages(node.slots), src=self._pages(slots[node.start : node.end])
        )
        node.has_swa = True
        self._swa_evictable += len(node.slots)
        self._swa_enqueue(node)

    def _pages(self, slots: IntArray) -> IntArray:
        """Pages of slots that are whole pages."""
        return slots[:: self.page_size] // self.page_size

    def _split(self, node: TreeNode, length: int) -> TreeNode:
        upper = super()._split(node, length)
        self._swa_enqueue(upper)
        return upper

    # -- locks ---------------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode) -> None:
        super().inc_lock_ref(node)
        begin = self._swa.first_read(node.end)
        while node.end > begin:
            if node.start < begin:
                self._split(node, begin - node.start)
            if not node.has_swa:
                raise RuntimeError(f"{node} has no window slots: match again")
            if node.swa_lock_ref == 0:
                self._swa_evictable -= len(node.slots)
                self._swa_protected += len(node.slots)
            node.swa_lock_ref += 1
            assert node.parent is not None
            node = node.parent

    def dec_lock_ref(self, node: TreeNode, *, has_swa_lock: bool = True) -> None:
        if has_swa_lock:
            self.dec_swa_lock_ref(node)
        super().dec_lock_ref(node)

    def dec_swa_lock_ref(self, node: TreeNode) -> None:
        begin = self._swa.first_read(node.end)
        while node.end > begin:
            if node.swa_lock_ref == 0 or node.start < begin:
                raise RuntimeError(f"the window slots of {node} are not locked")
            node.swa_lock_ref -= 1
            if node.swa_lock_ref == 0:
                self._swa_evictable += len(node.slots)
                self._swa_protected -= len(node.slots)
                self._swa_enqueue(node)
            assert node.parent is not None
            node = node.parent

    # -- eviction ------------------------------------------------------------------

    def _cut_leaf(self, leaf: TreeNode, keep: int) -> None:
        if leaf.has_swa:
            self._swa_evictable -= len(leaf.slots) - keep
        parent = leaf.parent
        assert parent is not None
        super()._cut_leaf(leaf, keep)
        if keep:
            page = leaf.elements[: self.page_size].tobytes()
            edge = page if leaf.start else (leaf.namespace, page)
            self._swa_enqueue(parent.children[edge])

    def evict_swa(self, num_slots: int) -> int:
        freed = 0
        while freed < num_slots and (node := self._pop_oldest_window()) is not None:
            missing = num_slots - freed
            missing += -missing % self.page_size
            freed += self._bury(node, min(len(node.slots), missing))
        return freed

    def _bury(self, node: TreeNode, length: int) -> int:
        """Make a tombstone of the first `length` positions of `node`; returns how many
        window slots this freed."""
        if length < len(node.slots):
            below, node = node, self._split(node, length)
            self._swa_enqueue(below)
        node.has_swa = False
        self._swa_evictable -= length
        self._swa.drop(self._pages(node.slots))
        self._drop_dead_leaves(node)
        return length

    def _drop_dead_leaves(self, node: TreeNode) -> None:
        """Free `node` and those above it while they are leaves of no use."""
        while node is not self.root and not (
            node.children or node.lock_ref or node.has_swa
        ):
            parent = node.parent
            assert parent is not None
            self._evictable -= len(node.slots)
            self._cut_leaf(node, 0)
            self.allocator.free(torch.from_numpy(node.slots))
            node = parent

    def _swa_enqueue(self, node: TreeNode) -> None:
        if node.has_swa and not (node.swa_queued or node.swa_lock_ref):
            node.swa_queued = True
            # The rest of a cut leaf has its serial, and the leaf's entry remains.
            entry = (node.last_access, node.serial, next(self._swa_entries), node)
            heapq.heappush(self._swa_queue, entry)

    def _pop_oldest_window(self) -> TreeNode | None:
        while self._swa_queue:
            stamp, _, _, node = heapq.heappop(self._swa_queue)
            node.swa_queued = False
            if node.parent is None or not node.has_swa or node.swa_lock_ref:
                continue
            if node.last_access == stamp:
                return node
            self._swa_enqueue(node)
        return None

    def swa_evictable_size(self) -> int:
        return self._swa_evictable

    def swa_protected_size(self) -> int:
        return self._swa_protected

    def reset(self) -> None:
        super().reset()
        self._swa_queue.clear()
        self._swa_evictable = 0

    # -- damage and inspection -----------------------------------------------------

    def cut(self, nodes: Sequence[TreeNode]) -> torch.Tensor:
        before = {id(node): node for node in self.iter_nodes()}
        slots = super().cut(nodes)
        left = {id(node) for node in self.iter_nodes()}
        gone = (node for key, node in before.items() if key not in left)
        self._swa_evictable -= sum(len(n.slots) for n in gone if n.has_swa)
        return slots

    def check(self) -> None:
        super().check()
        sizes = {False: 0, True: 0}
        for node in self.iter_nodes():
            mapped = self._swa.has(self._pages(node.slots))
            if not (mapped == node.has_swa).all():
                raise RuntimeError(f"{node} has other window slots than it says")
            if node.swa_lock_ref and not (node.has_swa and node.lock_ref):
                raise RuntimeError(f"{node} is locked in its window alone")
            if node.has_swa:
                sizes[node.swa_lock_ref > 0] += len(node.slots)
                queued = node.swa_queued or node.swa_lock_ref
                if not queued:
                    raise RuntimeError(f"{node} is missing in the window queue")
        if (sizes[False], sizes[True]) != (self._swa_evictable, self._swa_protected):
            raise RuntimeError(
                f"cache counts {self._swa_evictable} evictable and "
                f"{self._swa_protected} protected window slots, the tree has "
                f"{sizes[False]} and {sizes[True]}"
            )
