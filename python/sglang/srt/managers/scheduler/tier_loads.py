"""Requests that wait for KV from another tier, and what is stored there after a round.

Rank 0 decides whatever depends on time (`decide`); every rank carries it out (`apply`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

import msgspec
import numpy as np

from sglang.srt.kv_tiers.group import TokenHistory
from sglang.srt.managers.messages.io_struct import TierDecision
from sglang.srt.managers.messages.tier_snapshot import MAX_TRANSFERS, TierSnapshot
from sglang.srt.managers.scheduler.handover import Handover
from sglang.srt.mem_cache.cache_listener import CacheListener

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import TensorParallelGroup
    from sglang.srt.kv_tiers.damage import Damage
    from sglang.srt.kv_tiers.source import GivenUnits
    from sglang.srt.kv_tiers.storage import NamedUnit, Reading
    from sglang.srt.kv_tiers.tiers import KVTiers
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.messages.io_struct import SchedulerStats
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult, RadixKey
    from sglang.srt.mem_cache.tree_node import TreeNode

WRITE_THROUGH = "write_through"
WRITE_THROUGH_SELECTIVE = "write_through_selective"
WRITE_BACK = "write_back"
WRITE_POLICIES = (WRITE_THROUGH, WRITE_THROUGH_SELECTIVE, WRITE_BACK)


class _RankVerdict(msgspec.Struct):
    end: int
    keys: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPolicy:
    """How long a request waits for files, at most: `base` seconds and `per_ki_token`
    more for every 1,024 tokens that may be read."""

    base: float
    per_ki_token: float

    def is_over(self, reading: Reading) -> bool:
        limit = self.base + self.per_ki_token * reading.tokens / 1024
        return reading.is_done or time.monotonic() - reading.started >= limit


class TierLoads(CacheListener):
    """Loads cached prefixes for waiting requests, and stores runs by a write policy.

    Args:
        group: the ranks of the engine.
        policy: one of `WRITE_POLICIES`, or empty if nothing is stored.
        report: called with a request's id and number, and the units that were damaged.
        read_policy: how long requests wait for files.
        handover: brings units of other engines, or takes units there.
    """

    def __init__(
        self,
        tiers: KVTiers,
        *,
        group: TensorParallelGroup,
        policy: str,
        report: Callable[[str, int, Sequence[Damage]], None],
        read_policy: ReadPolicy,
        handover: Handover | None = None,
    ) -> None:
        self.handover = Handover() if handover is None else handover
        self._read_policy = read_policy
        # Requests that came since the last round, with files to look for.
        self._new: list[Req] = []
        self._readings: dict[int, tuple[Req, Reading]] = {}
        self._given: WeakKeyDictionary[Req, GivenUnits] = WeakKeyDictionary()
        self.tiers = tiers
        self._group = group
        self._policy = policy
        self._report = report
        self._waiting: dict[int, Req] = {}
        # Number of a request that loads -> slots that it will need besides.
        self._due: dict[int, int] = {}
        # A request is given one load per admission.
        self._tried: WeakSet[Req] = WeakSet()

    # -- of the cache --------------------------------------------------------------

    def on_stored(self, node: TreeNode) -> None:
        if self._policy == WRITE_THROUGH:
            self.tiers.add_due(node, node.start)

    def on_evicting(self, leaf: TreeNode, keep: int) -> None:
        if self._policy == WRITE_BACK:
            self.tiers.store_run(leaf, leaf.start)

    def on_cutting(self, nodes: Sequence[TreeNode]) -> None:
        self.tiers.discard(nodes)

    def on_cleared(self) -> None:
        self.tiers.forget_due()

    # -- admission -----------------------------------------------------------------

    @property
    def num_loading(self) -> int:
        """Number of requests that wait for another tier."""
        own = len(self._waiting) + len(self._readings) + len(self._new)
        return own + self.handover.num_coming

    def on_queued(self, req: Req) -> None:
        """Look for a new request's prefix in files, with the next round."""
        if self.tiers.storage is not None and not req.no_cache:
            self._new.append(req)

    def is_loading(self, req: Req) -> bool:
        """Whether a waiting request waits for another tier."""
        return (
            req.serial in self._due
            or req.serial in self._readings
            or req in self._new
            or self.handover.is_coming(req)
        )

    def slots_due(self, req: Req) -> int:
        """Return the slots that a request which loads will need besides those that are
        being filled; 0 while it waits for anything else."""
        return self._due.get(req.serial, 0)

    def begins(self, req: Req, key: RadixKey, match: MatchResult, cost: int) -> bool:
        """Start to load what continues the cached prefix of a request that would be
        admitted now; returns whether it should wait for it.

        Args:
            cost: slots that it would take until its end.
        """
        if req in self._tried:
            return False
        self._tried.add(req)
        tokens = np.array(req.tokens, dtype=np.int64)
        history = TokenHistory(tokens=tokens, salt=req.salt)
        given = self._given.pop(req, None)
        brought = (given, self.handover.take_source(req))
        others = [source for source in brought if source is not None]
        number = self.tiers.loads.begin(key, match, history, others)
        if number is None:
            self.handover.release(req)
            return False
        self._waiting[number] = req
        self._due[req.serial] = max(cost - self.tiers.loads.num_slots(number), 0)
        return True

    def on_admitted(self, req: Req, match: MatchResult) -> None:
        """Note that a request uses a cached prefix. It may load again if it is taken
        out of its batch."""
        self._tried.discard(req)
        if self._policy == WRITE_THROUGH_SELECTIVE and len(match):
            self.tiers.add_due(match.last_node, 0)

    # -- rounds --------------------------------------------------------------------

    def decide(self) -> TierDecision:
        """Return what this rank, the first, can see now."""
        return TierDecision(
            arrived=self.tiers.loads.arrived(),
            received=self.handover.decide(),
            store_bytes=self.tiers.free_bytes(),
            reads=[
                req.serial
                for req in self._new
                if self.tiers.is_stored(self._units(req))
            ],
            read=[
                serial
                for serial, (_, reading) in self._readings.items()
                if self._read_policy.is_over(reading)
            ],
        )

    def _units(self, req: Req) -> list[NamedUnit]:
        """Return the units that a request lacks on the device."""
        cache = self.tiers.cache
        tokens = req.tokens[: req.cacheable_prefix_len()]
        key = cache.key(tokens, namespace=req.namespace)
        return self.tiers.named_units(key, cache.match_length(key))

    def apply(self, decision: TierDecision) -> None:
        """Give the tree what has arrived, as far as it is intact on every rank, and
        read files."""
        new, self._new = self._new, []
        for serial in decision.read:
            self._end_reading(serial)
        for req in new:
            if req.serial in decision.reads:
                reading = self.tiers.read(self._units(req))
                self._readings[req.serial] = (req, reading)
        for number in decision.arrived:
            self._end_load(number)
        self.handover.apply(decision.received)

    def _end_reading(self, serial: int) -> None:
        """Keep what every rank has read for a request, until it is admitted."""
        req, reading = self._readings.pop(serial)
        storage = self.tiers.storage
        assert storage is not None
        given = storage.collect(reading)
        if reading.damages:
            self._report(req.rid, req.serial, list(reading.damages))
        if self._group.size > 1:
            every = [
                msgspec.msgpack.decode(of_rank, type=list[tuple[int, bytes]])
                for of_rank in self._group.all_gather_bytes(
                    msgspec.msgpack.encode(given.names)
                )
            ]
            given.keep(set(every[0]).intersection(*every[1:]))
        self._given[req] = given

    def _end_load(self, number: int) -> None:
        own = self.tiers.loads.verdict(number)
        end, damages = own.end, own.damages
        req = self._waiting.pop(number)
        del self._due[req.serial]
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
        self.tiers.loads.finish(number, end, keys)
        self.handover.release(req)

    def after_round(self, decision: TierDecision) -> None:
        """Store what the round has added to the tree."""
        self.tiers.store_due(decision.store_bytes)
        self.handover.after_round()

    def flush(self, tiers: Collection[str]) -> bool:
        """Empty some of the tiers host and storage; returns whether that was
        possible."""
        return self.tiers.flush(host="host" in tiers, storage="storage" in tiers)

    def on_violation(self) -> None:
        """Remove the files that may hold what the engine stops for."""
        if self.tiers.storage is not None:
            self.tiers.storage.drop_touched()

    def close(self) -> None:
        """Finish what is being written, and end every connection."""
        self.handover.close()
        if self.tiers.storage is not None:
            self.tiers.storage.close()

    def snapshot(self) -> TierSnapshot:
        """Return what the inspector shows."""
        storage = self.tiers.storage
        transfers = self.handover.transfers()
        return TierSnapshot(
            unit_tokens=self.tiers.unit,
            host=self.tiers.host_views.views(),
            files=[] if storage is None else storage.views(),
            transfers=transfers[:MAX_TRANSFERS],
            num_transfers=len(transfers),
        )

    def add_stats(self, stats: SchedulerStats) -> None:
        """Fill in the tiers' numbers."""
        primary = self.tiers.pools[0]
        stats.hicache_host_used_tokens = len(primary) * self.tiers.unit
        stats.hicache_host_total_tokens = primary.size * self.tiers.unit
        stats.hicache_stored_tokens_total = self.tiers.stats.stored
        stats.hicache_loaded_tokens_total = self.tiers.stats.loaded
        stats.hicache_skipped_tokens_total = self.tiers.stats.skipped
        stats.hicache_damaged_units_total = self.tiers.stats.damaged
        self.handover.add_stats(stats)
        storage = self.tiers.storage
        if storage is not None:
            unit = self.tiers.unit
            stats.hicache_storage_tokens = len(storage.stores[0]) * unit
            stats.hicache_storage_bytes = storage.total_bytes
            stats.hicache_written_tokens_total = storage.stats.written * unit
            stats.hicache_read_tokens_total = storage.stats.read * unit
            stats.hicache_unwritten_tokens_total = storage.stats.skipped * unit
