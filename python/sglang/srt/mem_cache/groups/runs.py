"""A secondary KV group's part of the prefix cache.

The tree keeps runs of primary slots. For each secondary group it keeps a mark on every
run, and asks the group's `GroupRuns` where a request can continue, what a lock covers
and what may be evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.groups.slots import GroupHold, GroupSlots
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.tree_node import TreeNode

Spans = Sequence[tuple["TreeNode", int]]
"""A matched path: nodes from position 0 on, and how many elements of each match. Only
the last node may have more."""


class RunMark:
    """What a run of the tree holds in one secondary group.

    Attributes:
        has_slots: whether its positions have slots of the group.
        lock_ref: number of requests that read them.
        is_queued: whether the group's eviction queue has an entry for the run.
    """

    __slots__ = ("has_slots", "is_queued", "lock_ref")

    def __init__(self) -> None:
        self.has_slots = True
        self.lock_ref = 0
        self.is_queued = False

    def copy(self) -> RunMark:
        """Return the mark for a part of the run; not queued."""
        mark = RunMark()
        mark.has_slots, mark.lock_ref = self.has_slots, self.lock_ref
        return mark


class GroupRuns:
    """The runs of one group. This base class serves a cache that keeps none.

    Attributes:
        slots: slots of the group.
    """

    def __init__(self, slots: GroupSlots) -> None:
        self.slots = slots

    def new_mark(self) -> RunMark:
        """Return the mark of a new run."""
        return RunMark()

    # -- lookup and insert ---------------------------------------------------------

    def are_usable(self, spans: Spans) -> list[bool]:
        """Return for each span whether a request can continue from its end."""
        return [True] * len(spans)

    def revive(
        self, node: TreeNode, slots: IntArray, hold: GroupHold
    ) -> list[TreeNode]:
        """Give a run of the tree the slots of a request that computed it again.

        Args:
            slots: the request's primary slots, from position 0 on.
            hold: hold of the request, which no longer owns what the run takes.

        Returns:
            The parts of the run: one, or two if it was split.
        """
        return [node]

    def on_leaf(self, leaf: TreeNode, hold: GroupHold) -> None:
        """Take over the slots of the request behind `hold` for a new leaf, which lies
        between two of `hold.cuts()`."""

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Note that `upper` took over the beginning of `lower`."""

    # -- locks ---------------------------------------------------------------------

    def lock(self, node: TreeNode) -> None:
        """Protect what a request that continues from the end of `node` reads."""

    def unlock(self, node: TreeNode) -> None:
        """Undo one `lock`."""

    # -- eviction ------------------------------------------------------------------

    def evict(self, num_slots: int) -> int:
        """Free at least `num_slots` slots that no request reads, least recently used
        first. The primary slots of their tokens stay cached if they are still useful.

        Returns:
            How many were freed; fewer if there are not enough.
        """
        return 0

    def on_removed(self, node: TreeNode, rest: TreeNode | None = None) -> None:
        """Note that `node` left the tree. `rest`, a new node, has its beginning."""

    def reset(self) -> None:
        """Forget all runs."""

    # -- inspection ----------------------------------------------------------------

    def evictable_size(self) -> int:
        """Return the number of cached slots that `evict` could free."""
        return 0

    def protected_size(self) -> int:
        """Return the number of cached slots that running requests read."""
        return 0

    def usable_size(self) -> int:
        """Return how many slots could be taken now, counting free and evictable
        ones."""
        return self.slots.available_size() + self.evictable_size()

    def is_idle(self, node: TreeNode) -> bool:
        """Return whether the run has slots of the group that no request reads."""
        return False

    def kept_slots(self) -> list[IntArray]:
        """Return primary slots of the cached runs that have slots of the group."""
        return []

    def check(self) -> None:
        """Verify all marks; RuntimeError if one is wrong."""
