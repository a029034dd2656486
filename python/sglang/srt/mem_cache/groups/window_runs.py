"""Window slots in the prefix cache: runs without theirs become tombstones.

A run keeps its primary slots. Its window slots go earlier and leave a *tombstone*. A
prefix is usable up to a length whose last `window - 1` positions have window slots,
because the next token reads those:

```
        | run A       | run B (tombstone) | run C            |
usable  |-------------|                   . window - 1 .-----|
```
The prefix may be reused up to the end of A, not up to the end of B, and up to the end
of C if that is long enough.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.groups.runs import GroupRuns, RunMark

if TYPE_CHECKING:
    from sglang.srt.mem_cache.groups.runs import Spans
    from sglang.srt.mem_cache.groups.slots import GroupHold
    from sglang.srt.mem_cache.groups.window_slots import WindowSlots
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.tree_node import TreeNode


class WindowRuns(GroupRuns):
    """Window slots of a radix tree's runs.

    A lock covers the runs from `WindowSlots.first_read` of its end on. The tree is cut
    there, so that locking and unlocking find the same runs even if they were split in
    between.

    Slots are evicted least recently used first, each run from its beginning, so that
    its end stays usable. A leaf that is a tombstone is useless and is dropped whole.

    Args:
        index: place of the group's mark in `TreeNode.marks`.
    """

    slots: WindowSlots

    def __init__(self, cache: RadixCache, slots: WindowSlots, *, index: int) -> None:
        super().__init__(slots)
        self._cache = cache
        self._index = index
        self._queue: list[tuple[int, int, int, TreeNode]] = []
        self._entries = count()
        self._evictable = 0
        self._protected = 0

    def _mark(self, node: TreeNode) -> RunMark:
        return node.marks[self._index]

    # -- lookup and insert ---------------------------------------------------------

    def are_usable(self, spans: Spans) -> list[bool]:
        usable = []
        end = kept_from = 0
        for node, length in spans:
            end += length
            if not self._mark(node).has_slots:
                kept_from = end
                usable.append(False)
            else:
                usable.append(kept_from <= self.slots.first_read(end))
        return usable

    def revive(
        self, node: TreeNode, slots: IntArray, hold: GroupHold
    ) -> list[TreeNode]:
        kept_from = hold.kept_from
        if self._mark(node).has_slots or node.end <= kept_from:
            return [node]
        parts = [node]
        if node.start < kept_from:
            parts.insert(0, self._cache.split(node, kept_from - node.start))
        self.slots.move(
            dst=self._pages(node.slots), src=self._pages(slots[node.start : node.end])
        )
        self._mark(node).has_slots = True
        self._evictable += len(node.slots)
        self._enqueue(node)
        return parts

    def on_leaf(self, leaf: TreeNode, hold: GroupHold) -> None:
        if leaf.start >= hold.kept_from:
            self._evictable += len(leaf.slots)
            self._enqueue(leaf)
        else:
            self._mark(leaf).has_slots = False

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        self._enqueue(upper)

    def _pages(self, slots: IntArray) -> IntArray:
        """Return the pages of slots that fill whole pages."""
        return slots[:: self.slots.page_size] // self.slots.page_size

    # -- locks ---------------------------------------------------------------------

    def lock(self, node: TreeNode) -> None:
        begin = self.slots.first_read(node.end)
        while node.end > begin:
            if node.start < begin:
                self._cache.split(node, begin - node.start)
            mark = self._mark(node)
            if not mark.has_slots:
                raise RuntimeError(f"{node} has no window slots: match again")
            if mark.lock_ref == 0:
                self._evictable -= len(node.slots)
                self._protected += len(node.slots)
            mark.lock_ref += 1
            assert node.parent is not None
            node = node.parent

    def unlock(self, node: TreeNode) -> None:
        begin = self.slots.first_read(node.end)
        while node.end > begin:
            mark = self._mark(node)
            if mark.lock_ref == 0 or node.start < begin:
                raise RuntimeError(f"the window slots of {node} are not locked")
            mark.lock_ref -= 1
            if mark.lock_ref == 0:
                self._evictable += len(node.slots)
                self._protected -= len(node.slots)
                self._enqueue(node)
            assert node.parent is not None
            node = node.parent

    # -- eviction ------------------------------------------------------------------

    def evict(self, num_slots: int) -> int:
        freed, page_size = 0, self.slots.page_size
        while freed < num_slots and (node := self._pop_oldest()) is not None:
            missing = num_slots - freed
            missing += -missing % page_size
            freed += self._bury(node, min(len(node.slots), missing))
        return freed

    def _bury(self, node: TreeNode, length: int) -> int:
        """Make the first `length` positions of `node` a tombstone; return how many
        window slots this freed."""
        if length < len(node.slots):
            below, node = node, self._cache.split(node, length)
            self._enqueue(below)
        self._mark(node).has_slots = False
        self._evictable -= length
        self.slots.drop(self._pages(node.slots))
        self._drop_dead_leaves(node)
        return length

    def _drop_dead_leaves(self, node: TreeNode) -> None:
        """Free `node` and the nodes above it while they are useless leaves."""
        cache = self._cache
        while node is not cache.root and not (
            node.children or node.lock_ref or self._mark(node).has_slots
        ):
            parent = node.parent
            assert parent is not None
            cache.drop_leaf(node)
            node = parent

    def on_removed(self, node: TreeNode, rest: TreeNode | None = None) -> None:
        if self._mark(node).has_slots:
            self._evictable -= len(node.slots) - (len(rest.slots) if rest else 0)
        if rest is not None:
            self._enqueue(rest)

    def _enqueue(self, node: TreeNode) -> None:
        mark = self._mark(node)
        if mark.has_slots and not (mark.is_queued or mark.lock_ref):
            mark.is_queued = True
            # The rest of a cut leaf has its serial, and the leaf's entry remains.
            entry = (node.last_access, node.serial, next(self._entries), node)
            heapq.heappush(self._queue, entry)

    def _pop_oldest(self) -> TreeNode | None:
        while self._queue:
            stamp, _, _, node = heapq.heappop(self._queue)
            mark = self._mark(node)
            mark.is_queued = False
            if node.parent is None or not mark.has_slots or mark.lock_ref:
                continue
            if node.last_access == stamp:
                return node
            self._enqueue(node)
        return None

    def reset(self) -> None:
        self._queue.clear()
        self._evictable = self._protected = 0

    # -- inspection ----------------------------------------------------------------

    def evictable_size(self) -> int:
        return self._evictable

    def protected_size(self) -> int:
        return self._protected

    def is_idle(self, node: TreeNode) -> bool:
        mark = self._mark(node)
        return mark.has_slots and not mark.lock_ref

    def kept_slots(self) -> list[IntArray]:
        nodes = self._cache.iter_nodes()
        return [node.slots for node in nodes if self._mark(node).has_slots]

    def check(self) -> None:
        sizes = {False: 0, True: 0}
        for node in self._cache.iter_nodes():
            mark = self._mark(node)
            mapped = self.slots.has(self._pages(node.slots))
            if not (mapped == mark.has_slots).all():
                raise RuntimeError(f"{node} does not have the window slots it claims")
            if mark.lock_ref and not (mark.has_slots and node.lock_ref):
                raise RuntimeError(f"{node} is only locked in its window")
            if mark.has_slots:
                sizes[mark.lock_ref > 0] += len(node.slots)
                if not (mark.is_queued or mark.lock_ref):
                    raise RuntimeError(f"{node} is missing from the window queue")
        if (sizes[False], sizes[True]) != (self._evictable, self._protected):
            raise RuntimeError(
                f"cache counts {self._evictable} evictable and {self._protected} "
                f"protected window slots, the tree has {sizes[False]} and {sizes[True]}"
            )
