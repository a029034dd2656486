"""Re-verifies slots that only the prefix cache holds, a few per pass, in rotation."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kv_canary.records import draft_seed
from kv_canary.sweep import SweepLauncher, SweepRun
from sglang.srt.utils.salt_chain import lineage_salt

if TYPE_CHECKING:
    from sglang.srt.kv_canary.groups import PoolGroup
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.tree_node import TreeNode


class Sweeper:
    """Verifies the slots that only the prefix cache holds.

    A rotation visits every node that was in the tree when it began; the next one also
    visits newer ones. So a cached slot is reached within two rotations, and within
    `ceil(cached / budget)` passes while the tree does not change.

    Args:
        cache: whose runs are swept where only it holds them.
        group: whose slots are swept.
        budget: slots of one pass at most.
        token_offset: slot p holds token p + this; with 1, as in the pool of a draft
            head, lineages begin with a seed.
    """

    def __init__(
        self,
        cache: RadixCache,
        group: PoolGroup,
        *,
        budget: int,
        token_offset: int = 0,
    ) -> None:
        self._token_offset = token_offset
        self._kv = group.kv
        self._is_idle = group.idle_runs(cache)
        self._cache = cache
        self._launcher = SweepLauncher(group.state, group.checks.fingerprint)
        self._budget = budget
        self._pending: deque[tuple[TreeNode, int]] = deque()
        self.passes = 0

    def run(self) -> int:
        """Launch one pass on the current stream; returns the number of its slots."""
        runs = self.next_runs()
        if not runs:
            return 0
        self._launcher.launch(runs)
        self.passes += 1
        return sum(len(run.slots) for run in runs)

    def next_runs(self) -> list[SweepRun]:
        """The runs that the next pass verifies; advances the rotation."""
        runs: list[SweepRun] = []
        left = self._budget
        if not self._pending:
            self._pending.extend((node, 0) for node in self._cache.iter_nodes())
        while left > 0 and self._pending:
            node, offset = self._pending.popleft()
            if node.parent is None or not self._is_idle(node):
                continue  # evicted, or checked by the forwards of those who hold it
            slots = node.slots[offset : offset + left]
            if len(slots) == 0:
                continue  # split since, and shorter now
            runs.append(self._run(node, offset, slots))
            left -= len(slots)
            if offset + len(slots) < len(node.slots):
                self._pending.appendleft((node, offset + len(slots)))
        return runs

    def _run(self, node: TreeNode, offset: int, slots: IntArray) -> SweepRun:
        before = node.slots[offset - 1 : offset]
        if not offset and node.start:
            assert node.parent is not None
            before = node.parent.slots[-1:]
        # 0 for a predecessor that has no slot there, hence none to be read.
        slots, before = self._kv.on_host(slots), self._kv.on_host(before)
        prev_slot = int(before[0]) if len(before) else -1
        return _run(node, offset, slots, prev_slot, token_offset=self._token_offset)


def _run(
    node: TreeNode,
    offset: int,
    slots: IntArray,
    prev_slot: int,
    *,
    token_offset: int,
) -> SweepRun:
    salt = lineage_salt(node.namespace)
    start, seed = node.start + offset, 0
    if token_offset and start == 0:
        # An element is the pair of a token and the next one.
        seed = draft_seed(int(node.elements[0]) >> 32, salt)
    return SweepRun(slots=slots, start=start, prev_slot=prev_slot, salt=salt, seed=seed)
