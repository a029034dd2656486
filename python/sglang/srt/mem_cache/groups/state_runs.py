"""Checkpoints of recurrent state in the prefix cache.

A run may have a checkpoint of the state at its end. A request can go on from there,
and from no other place:

```
        | run A + checkpoint | run B | run C + checkpoint |
usable  |--------------------|.......|--------------------|
```
A split leaves the checkpoint with the lower part, because it belongs to the end. The
state is copied out of a checkpoint before any later copy into its slot, so nothing has
to be locked.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.groups.runs import GroupRuns, RunMark
from sglang.srt.mem_cache.groups.saved_states import SavedStates

if TYPE_CHECKING:
    from sglang.srt.mem_cache.groups.runs import Spans
    from sglang.srt.mem_cache.groups.slots import GroupHold
    from sglang.srt.mem_cache.groups.state_slots import StateHold, StateSlots
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.tree_node import TreeNode


class StateMark(RunMark):
    """What a run has of states.

    Attributes:
        slot: slot of the checkpoint at its end, or 0.
    """

    __slots__ = ("slot",)

    def __init__(self) -> None:
        super().__init__()
        self.slot = 0

    def copy(self) -> StateMark:
        # Another end, another state.
        return StateMark()


class StateRuns(GroupRuns):
    """The checkpoints of a radix tree's runs; the least recently used goes first.

    Args:
        index: place of the group's mark in `TreeNode.marks`.
    """

    slots: StateSlots

    def __init__(self, cache: RadixCache, slots: StateSlots, *, index: int) -> None:
        super().__init__(slots)
        self._cache = cache
        self._index = index
        self._queue: list[tuple[int, int, TreeNode]] = []
        self._entries = count()
        self._num_cached = 0

    def new_mark(self) -> StateMark:
        return StateMark()

    def _mark(self, node: TreeNode) -> StateMark:
        mark = node.marks[self._index]
        assert isinstance(mark, StateMark)
        return mark

    def hold_of(self, holds: tuple[GroupHold, ...]) -> StateHold:
        """Return the hold on this group among a request's."""
        hold: StateHold = holds[self._index]  # type: ignore[assignment]
        return hold

    def slot_at(self, node: TreeNode) -> int:
        """Return the slot of the checkpoint at the end of a run; 0 at the root.

        Raises:
            RuntimeError: there is none.
        """
        if node is self._cache.root:
            return 0
        slot = self._mark(node).slot
        if not slot:
            raise RuntimeError(f"{node} has no checkpoint: match again")
        return slot

    def has_checkpoint(self, node: TreeNode) -> bool:
        """Return whether a run has a checkpoint at its end."""
        return node is not self._cache.root and self._mark(node).slot > 0

    def take(self, kept: Collection[int] = ()) -> int:
        """Take a slot for a new checkpoint, an old one's if none is free; 0 if requests
        hold all of them.

        Args:
            kept: slots that the same forward copies to rows. They are not evicted,
                because freed slots are marked before anything is copied.
        """
        if not self.slots.available_size():
            self._evict(1, kept)
        return self.slots.take()

    def reserve(self, hold: StateHold, position: int) -> int:
        """Return the slot of a checkpoint that a verification takes if it reaches
        `position`, or 0. It is the same in every verification until one does."""
        if hold.due is None:
            slot = self.take()
            if not slot and hold.saved is not None:
                slot, hold.saved = hold.saved.slot, None
            # Without a slot it is not tried again: the checkpoint may be behind then.
            return hold.expect(position, slot)
        return hold.due.slot

    def on_verified(self, holds: tuple[GroupHold, ...], length: int) -> None:
        """Note that `length` tokens of a request are folded after a verification."""
        hold = self.hold_of(holds)
        if hold.due is None or length < hold.due.position:
            return
        if hold.due.slot:
            if hold.saved is not None:
                self.slots.give(hold.saved.slot)
            hold.saved = hold.due
        hold.due = None

    def drop(self, slots: Collection[int]) -> None:
        """Forget the checkpoints in these slots, if runs have them."""
        for node in self._cache.iter_nodes():
            if self._mark(node).slot in slots:
                self._free(node)

    # -- lookup and insert ---------------------------------------------------------

    def are_usable(self, spans: Spans) -> list[bool]:
        return [
            length == len(node.slots) and self._mark(node).slot > 0
            for node, length in spans
        ]

    def revive(
        self, node: TreeNode, slots: IntArray, hold: GroupHold
    ) -> list[TreeNode]:
        inside = [cut for cut in hold.cuts() if node.start < cut <= node.end]
        parts = []
        for cut in sorted(inside):
            part = node
            if cut < node.end:
                part = self._cache.split(node, cut - node.start)
                parts.append(part)
            self.on_leaf(part, hold)
        return [*parts, node]

    def on_leaf(self, leaf: TreeNode, hold: GroupHold) -> None:
        mark = self._mark(leaf)
        if mark.slot:
            return  # the request's own is freed with its hold
        mark.slot = self._own(hold).take(leaf.end)
        if mark.slot:
            self._num_cached += 1
            self._enqueue(leaf)

    @staticmethod
    def _own(hold: GroupHold) -> StateHold:
        own: StateHold = hold  # type: ignore[assignment]
        return own

    # -- eviction ------------------------------------------------------------------

    def evict(self, num_slots: int) -> int:
        return self._evict(num_slots, ())

    def _evict(self, num_slots: int, kept: Collection[int]) -> int:
        freed, aside = 0, []
        while freed < num_slots and (node := self._pop_oldest()) is not None:
            if self._mark(node).slot in kept:
                aside.append(node)
                continue
            self._free(node)
            freed += 1
        for node in aside:
            self._enqueue(node)
        return freed

    def _free(self, node: TreeNode) -> None:
        mark = self._mark(node)
        self.slots.give(mark.slot)
        mark.slot = 0
        self._num_cached -= 1

    def on_removed(self, node: TreeNode, rest: TreeNode | None = None) -> None:
        if self._mark(node).slot:
            self._free(node)

    def _enqueue(self, node: TreeNode) -> None:
        mark = self._mark(node)
        if mark.slot and not mark.is_queued:
            mark.is_queued = True
            entry = (node.last_access, next(self._entries), node)
            heapq.heappush(self._queue, entry)

    def _pop_oldest(self) -> TreeNode | None:
        while self._queue:
            stamp, _, node = heapq.heappop(self._queue)
            mark = self._mark(node)
            mark.is_queued = False
            if node.parent is None or not mark.slot:
                continue
            if node.last_access == stamp:
                return node
            self._enqueue(node)
        return None

    def reset(self) -> None:
        self._queue.clear()
        self._num_cached = 0
        self.slots.clear()

    # -- saving --------------------------------------------------------------------

    def save(self, runs: Mapping[int, int]) -> SavedStates:
        """Return the checkpoints as plain data; `runs`: index of each saved run by the
        serial of its node."""
        nodes = [node for node in self._cache.iter_nodes() if self._mark(node).slot]
        return SavedStates(
            free=self.slots.save(),
            runs=[(runs[node.serial], self._mark(node).slot) for node in nodes],
            queue=[
                (stamp, runs[node.serial])
                for stamp, _, node in sorted(self._queue, key=lambda entry: entry[:2])
                if node.parent is not None
            ],
        )

    def load(self, saved: SavedStates, nodes: Sequence[TreeNode]) -> None:
        """Give saved checkpoints to the `nodes` of the saved runs.

        Raises:
            ValueError: there are no such slots or runs.
        """
        self.slots.load(saved.free)
        if any(run >= len(nodes) for _, run in saved.queue):
            raise ValueError("a checkpoint of a run that was not saved")
        for run, slot in saved.runs:
            self._mark(nodes[run]).slot = slot
        self._num_cached = len(saved.runs)
        for stamp, run in saved.queue:
            self._mark(nodes[run]).is_queued = True
            heapq.heappush(self._queue, (stamp, next(self._entries), nodes[run]))

    # -- inspection ----------------------------------------------------------------

    def evictable_size(self) -> int:
        return self._num_cached

    def check(self) -> None:
        slots = [self._mark(node).slot for node in self._cache.iter_nodes()]
        slots = [slot for slot in slots if slot]
        if len(slots) != self._num_cached or len(set(slots)) != len(slots):
            raise RuntimeError(
                f"cache counts {self._num_cached} checkpoints, the tree has "
                f"{len(set(slots))} in {len(slots)} runs"
            )
        lost = [slot for slot in slots if not self.slots.is_used(slot)]
        if lost:
            raise RuntimeError(f"state slots {lost[:8]} are cached but free")
        queued = {id(node) for _, _, node in self._queue}
        for node in self._cache.iter_nodes():
            mark = self._mark(node)
            if mark.slot and not (mark.is_queued and id(node) in queued):
                raise RuntimeError(f"{node} is missing from the checkpoints' queue")
