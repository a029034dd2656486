"""Re-verifies checkpoints of recurrent state in the prefix cache, a few per pass, in
rotation."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sglang.srt.kv_canary.state_group import StateGroup
    from sglang.srt.mem_cache.groups.state_runs import StateRuns
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.tree_node import TreeNode


class StateSweeper:
    """Verifies the checkpoints that the prefix cache holds. No forward reads one before
    a request restores it, so unlike KV all of them are swept.

    Rotations are those of `Sweeper`: a checkpoint is reached within two of them, and
    within `ceil(checkpoints / budget)` passes while the tree does not change.

    Args:
        runs: checkpoints of `cache`.
        budget: checkpoints of one pass at most.
    """

    def __init__(
        self, cache: RadixCache, runs: StateRuns, group: StateGroup, *, budget: int
    ) -> None:
        self._cache = cache
        self._runs = runs
        self._group = group
        self._budget = budget
        self._pending: deque[TreeNode] = deque()
        self.passes = 0

    def run(self) -> int:
        """Launch one pass on the current stream; returns the number of its
        checkpoints."""
        nodes = self.next_nodes()
        if not nodes:
            return 0
        words = [(self._runs.slot_at(node), node.end, node.slots[-1]) for node in nodes]
        self._group.sweep(np.array(words, dtype=np.int64).T.copy())
        self.passes += 1
        return len(nodes)

    def next_nodes(self) -> list[TreeNode]:
        """Return the runs whose checkpoints the next pass verifies; advances the
        rotation."""
        found: list[TreeNode] = []
        if not self._pending:
            self._pending.extend(self._cache.iter_nodes())
        while self._pending and len(found) < self._budget:
            node = self._pending.popleft()
            if node.parent is not None and self._runs.has_checkpoint(node):
                found.append(node)
        return found
