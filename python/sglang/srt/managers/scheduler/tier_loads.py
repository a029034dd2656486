"""Requests that wait for KV from another tier, and what is stored there after a round.

Rank 0 decides whatever depends on time (`decide`); every rank carries it out (`apply`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import msgspec
import numpy as np

from sglang.srt.kv_tiers.group import TokenHistory
from sglang.srt.managers.messages.io_struct import TierDecision
from sglang.srt.mem_cache.cache_listener import CacheListener

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import TensorParallelGroup
    from sglang.srt.kv_tiers.damage import Damage
    from sglang.srt.kv_tiers.tiers import KVTiers
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.messages.io_struct import SchedulerStats
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult, RadixKey
    from sglang.srt.mem_cache.tree_node import TreeNode

WRITE_THROUGH = "write_through"
WRITE_THROUGH_SELECTIVE = "write_through_selective"
WRITE_BACK = "write_back"
WRITE_POLICIES = (WRITE_THROUGH, WRITE_THROUGH_SELECTIVE, WRITE_BACK)
# A run that so many requests have used is worth keeping (`write_through_selective`).
SELECTIVE_HITS = 2


class _RankVerdict(msgspec.Struct):
    end: int
    keys: list[bytes]


class TierLoads(CacheListener):
    """Loads cached prefixes for waiting requests, and stores runs by a write policy.

    Args:
        group: the ranks of the engine.
        policy: one of `WRITE_POLICIES`.
        report: called with a request's id and number, and the units that were damaged.
    """

    def __init__(
        self,
        tiers: KVTiers,
        *,
        group: TensorParallelGroup,
        policy: str,
        report: Callable[[str, int, Sequence[Damage]], None],
    ) -> None:
        self.tiers = tiers
        self._group = group
        self._policy = policy
        self._report = report
        self._waiting: dict[int, Req] = {}
        self._serials: set[int] = set()
        # A request is given one load per admission.
        self._tried: WeakSet[Req] = WeakSet()

    # -- of the cache --------------------------------------------------------------

    def on_stored(self, node: TreeNode) -> None:
        if self._policy == WRITE_THROUGH:
            self.tiers.add_due(node)

    def on_locked(self, node: TreeNode) -> None:
        if self._policy != WRITE_THROUGH_SELECTIVE:
            return
        above: TreeNode | None = node
        while above is not None and above.hits >= 1:
            if above.hits == SELECTIVE_HITS:
                self.tiers.add_due(above)
            above = above.parent

    def on_evicting(self, leaf: TreeNode, keep: int) -> None:
        if self._policy == WRITE_BACK:
            self.tiers.store_run(leaf, leaf.end)

    def on_cutting(self, nodes: Sequence[TreeNode]) -> None:
        self.tiers.discard(nodes)

    def on_cleared(self) -> None:
        self.tiers.forget_due()

    # -- admission -----------------------------------------------------------------

    @property
    def num_loading(self) -> int:
        """Number of loads that have not been applied."""
        return len(self._waiting)

    def is_loading(self, req: Req) -> bool:
        """Whether a load for a waiting request is under way."""
        return req.serial in self._serials

    def begins(self, req: Req, key: RadixKey, match: MatchResult) -> bool:
        """Start to load what continues the cached prefix of a request that would be
        admitted now; returns whether it should wait for it."""
        if req in self._tried:
            return False
        self._tried.add(req)
        tokens = np.array(req.tokens, dtype=np.int64)
        history = TokenHistory(tokens=tokens, salt=req.salt)
        number = self.tiers.begin(key, match, history)
        if number is None:
            return False
        self._waiting[number] = req
        self._serials.add(req.serial)
        return True

    def on_admitted(self, req: Req) -> None:
        """Let a request load again if it is taken out of its batch."""
        self._tried.discard(req)

    # -- rounds --------------------------------------------------------------------

    def decide(self) -> TierDecision:
        """Return what this rank, the first, can see now."""
        return TierDecision(
            arrived=self.tiers.arrived(), store_bytes=self.tiers.free_bytes()
        )

    def apply(self, decision: TierDecision) -> None:
        """Give the tree what has arrived, as far as it is intact on every rank."""
        for number in decision.arrived:
            own = self.tiers.verdict(number)
            end, damages = own.end, own.damages
            req = self._waiting.pop(number)
            self._serials.remove(req.serial)
            if damages:
                self._report(req.rid, req.serial, damages)
            keys = [damage.key for damage in damages]
            if self._group.size > 1:
                message = msgspec.msgpack.encode(_RankVerdict(end, keys))
                every = [
                    msgspec.msgpack.decode(of_rank, type=_RankVerdict)
                    for of_rank in self._group.all_gather_bytes(message)
                ]
                end = min(of_rank.end for of_rank in every)
                keys = [key for of_rank in every for key in of_rank.keys]
            self.tiers.finish(number, end, keys)

    def after_round(self, decision: TierDecision) -> None:
        """Store what the round has added to the tree."""
        self.tiers.store_due(decision.store_bytes)

    def flush(self) -> bool:
        """Forget everything in the tiers; returns whether that was possible."""
        return self.tiers.flush()

    def add_stats(self, stats: SchedulerStats) -> None:
        """Fill in the tiers' numbers."""
        primary = self.tiers.pools[0]
        stats.hicache_host_used_tokens = len(primary) * self.tiers.unit
        stats.hicache_host_total_tokens = primary.size * self.tiers.unit
        stats.hicache_stored_tokens_total = self.tiers.stats.stored
        stats.hicache_loaded_tokens_total = self.tiers.stats.loaded
        stats.hicache_skipped_tokens_total = self.tiers.stats.skipped
        stats.hicache_damaged_units_total = self.tiers.stats.damaged
