"""Prefixes on their way from the host and other sources to the device: units are copied
into free slots, compared, and hung into the prefix cache.

Every rank of an engine makes the same calls with the same arguments. Only how many
units arrived intact may differ, so the caller agrees on it before `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from sglang.srt.kv_tiers.damage import Damage, DamageKind
from sglang.srt.kv_tiers.mover import Shipment
from sglang.srt.kv_tiers.source import HostUnits, Sources
from sglang.srt.mem_cache.common import ensure_available

if TYPE_CHECKING:
    from sglang.srt.kv_tiers.group import TierGroup, TokenHistory
    from sglang.srt.kv_tiers.host_pool import HostPool
    from sglang.srt.kv_tiers.mover import Delivery, Load, Mover
    from sglang.srt.kv_tiers.places import Target
    from sglang.srt.kv_tiers.source import UnitSource
    from sglang.srt.kv_tiers.unit import UnitKey, UnitNames
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult, RadixKey
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.radix_cache import RadixCache


@dataclass(slots=True, kw_only=True)
class TierStats:
    """Tokens since the start: copied to the host, copied back, and not copied because
    every place was in use. `damaged` counts units."""

    stored: int = 0
    loaded: int = 0
    skipped: int = 0
    damaged: int = 0


class Verdict(NamedTuple):
    """How far a load may be used.

    Fields:
        end: the positions before it arrived intact.
        damages: units that did not.
    """

    end: int
    damages: list[Damage]


@dataclass(frozen=True, kw_only=True)
class PendingLoad:
    """A prefix on its way to the device.

    Fields:
        key: the prefix, which ends with the last unit.
        match: the part that was cached; locked.
        slots: int64, new primary slots for the rest.
        keys: keys of the units, from the one that contains the first new position.
        targets: per group, what is loaded.
        sources: where the units come from.
    """

    key: RadixKey
    match: MatchResult
    slots: IntArray
    keys: list[UnitKey]
    targets: list[Target]
    sources: Sources
    load: Load

    @property
    def start(self) -> int:
        return len(self.match)

    @property
    def end(self) -> int:
        return self.start + len(self.slots)


class Loads:
    """Loads that have begun and that `finish` has not seen, by number.

    Args:
        groups: groups of slots, the primary one first, then those of the cache.
        pools: host memory, per group.
        stats: counts what was loaded and what was damaged.
        before_load: called before slots are filled; marks in stream order what was
            freed until then.
    """

    def __init__(
        self,
        *,
        cache: RadixCache,
        groups: Sequence[TierGroup],
        mover: Mover,
        pools: Sequence[HostPool],
        names: UnitNames,
        stats: TierStats,
        before_load: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._mover = mover
        self._pools = pools
        self._names = names
        self._unit = names.size
        self._stats = stats
        self._before_load = before_load
        self._host = HostUnits(pools)
        self._pending: dict[int, PendingLoad] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._pending)

    def num_slots(self, number: int) -> int:
        """Return how many primary slots a load fills."""
        return len(self._pending[number].slots)

    @property
    def slots(self) -> IntArray:
        """Primary slots that are being filled, which neither the cache nor a request
        holds."""
        parts = [pending.slots for pending in self._pending.values()]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def begin(
        self,
        key: RadixKey,
        match: MatchResult,
        history: TokenHistory,
        others: Sequence[UnitSource] = (),
    ) -> int | None:
        """Start to load the units that continue the cached part of a prefix.

        Args:
            match: the cached part. It is locked until `finish`.
            others: sources besides host memory.

        Returns:
            A number for `finish`, or None if there is nothing to load, or no slot.
        """
        keys = self._names.keys(key.elements(), key.namespace)
        start = len(match)
        sources = Sources([self._host, *others])
        end = self._usable_end(sources, keys, start)
        if end <= start:
            return None
        own = keys[start // self._unit : end // self._unit]
        for pool in self._pools:
            pool.touch(keys[: end // self._unit])
        # Slots are taken by evicting runs, which may be stored in their place.
        sources.pin(own)
        cache = self._cache
        cache.inc_lock_ref(match.last_node)
        slots = self._take_slots(end - start)
        targets = None if slots is None else self._take_targets(slots, start, end)
        if slots is None or targets is None:
            cache.dec_lock_ref(match.last_node)
            sources.unpin(own)
            return None
        self._before_load()
        shipments = [
            self._shipment(number, target, sources, keys, history)
            for number, target in enumerate(targets)
        ]
        self._count += 1
        self._pending[self._count] = PendingLoad(
            key=cache.key(key.tokens[: end + cache.bigram], namespace=key.namespace),
            match=match,
            slots=slots,
            keys=own,
            targets=targets,
            sources=sources,
            load=self._mover.load(shipments),
        )
        return self._count

    def _usable_end(self, sources: Sources, keys: Sequence[UnitKey], start: int) -> int:
        """Return the end of the longest prefix that sources can complete."""
        first = start // self._unit
        last = first
        while last < len(keys) and sources.has(0, keys[last]):
            last += 1
        for end in range(last, first, -1):
            if all(
                self._has_needed(sources, number, keys[:end], start)
                for number in range(1, len(self._groups))
            ):
                return end * self._unit
        return 0

    def _has_needed(
        self, sources: Sources, number: int, keys: Sequence[UnitKey], start: int
    ) -> bool:
        """Return whether there is what a request needs of a group that goes on after
        these units and has the first `start` positions."""
        places = self._groups[number].places
        first = max(places.first_read(len(keys) * self._unit), start)
        return all(sources.has(number, key) for key in keys[first // self._unit :])

    def _take_slots(self, count: int) -> IntArray | None:
        """Take primary slots that no forward will write to or read from."""
        if not ensure_available(self._cache, count):
            return None
        taken = self._cache.allocator.alloc(count)
        return None if taken is None else taken.numpy()

    def _take_targets(
        self, slots: IntArray, start: int, end: int
    ) -> list[Target] | None:
        targets: list[Target] = []
        for group in self._groups:
            target = group.places.take(slots, start, end)
            if target is None:
                for taken, other in zip(targets, self._groups, strict=False):
                    other.places.give_back(taken)
                self._cache.allocator.free(torch.from_numpy(slots))
                return None
            targets.append(target)
        for secondary in self._cache.allocator.secondary:
            secondary.sync()
        return targets

    def _shipment(
        self,
        number: int,
        target: Target,
        sources: Sources,
        keys: Sequence[UnitKey],
        history: TokenHistory,
    ) -> Shipment:
        group = self._groups[number]
        first, last = target.positions[[0, -1]] // self._unit
        if group.places.per_unit == self._unit:
            rows = target.positions - first * self._unit
        else:
            rows = np.arange(len(target.positions))
        length = int(target.positions[-1]) + 1
        return Shipment(
            group=group,
            units=[sources.unit(number, key) for key in keys[first : last + 1]],
            slots=torch.from_numpy(target.slots),
            rows=torch.from_numpy(rows),
            expected=[
                torch.from_numpy(records.expected(history, length)[target.positions])
                for records in group.records
            ],
        )

    def arrived(self) -> list[int]:
        """Return the numbers of the loads that have arrived."""
        return [
            number
            for number, pending in self._pending.items()
            if pending.load.has_arrived()
        ]

    def verdict(self, number: int) -> Verdict:
        """Wait for a load and compare it. Every rank of the engine does; the smallest
        end counts."""
        pending = self._pending[number]
        pending.load.wait()
        damages = [
            damage
            for delivery in pending.load.deliveries
            for damage in self._damages(pending, delivery)
        ]
        end = pending.end
        if damages:
            # In the other groups, only what the whole prefix needs was loaded.
            first = min(damage.position for damage in damages)
            is_plain = len(self._groups) == 1
            end = first - first % self._unit if is_plain else pending.start
        return Verdict(max(end, pending.start), damages)

    def _damages(self, pending: PendingLoad, delivery: Delivery) -> list[Damage]:
        group = delivery.shipment.group
        index = self._groups.index(group)
        target = pending.targets[index]
        first = int(target.positions[0]) // self._unit
        found = []
        for number in np.flatnonzero(~delivery.verdicts.numpy().all(axis=1)).tolist():
            begin = max((first + number) * self._unit, int(target.positions[0]))
            at = int(np.searchsorted(target.positions, begin))
            is_intact, _ = delivery.verdicts[number].tolist()
            key = pending.keys[first + number - pending.start // self._unit]
            source = pending.sources.of(index, key)
            assert source is not None
            found.append(
                Damage(
                    kind=DamageKind.IDENTITY if is_intact else DamageKind.BYTES,
                    tier=source.tier,
                    sender=source.sender,
                    group=group.name,
                    key=key,
                    position=begin,
                    slot=int(target.slots[at]),
                )
            )
        return found

    def finish(self, number: int, end: int, damaged: Sequence[UnitKey]) -> int:
        """Hang a load's positions before `end` into the tree and free the rest.

        Args:
            end: smallest end that a rank has found. damaged: units to drop.

        Returns:
            The tokens that the tree gained.
        """
        pending = self._pending.pop(number)
        pending.sources.unpin(pending.keys)
        pending.sources.drop(damaged)
        self._stats.damaged += len(damaged)
        cache, count = self._cache, end - pending.start
        gained = 0
        if end == pending.end or (count and len(self._groups) == 1):
            self._adopt(pending, end)
            gained = end - self._insert(pending, end)
        else:
            count = 0
            for group, target in zip(self._groups, pending.targets, strict=True):
                group.places.give_back(target)
        if count < len(pending.slots):
            cache.allocator.free(torch.from_numpy(pending.slots[count:]))
        cache.dec_lock_ref(pending.match.last_node)
        self._stats.loaded += gained
        return gained

    def _adopt(self, pending: PendingLoad, end: int) -> None:
        """Let the canary know the slots of the positions before `end`."""
        for target, delivery in zip(
            pending.targets, pending.load.deliveries, strict=True
        ):
            count = int(np.searchsorted(target.positions, end))
            sources = delivery.shipment.group.records
            for records, words in zip(sources, delivery.records, strict=True):
                records.adopt(delivery.slots[:count], words[:count])

    def _insert(self, pending: PendingLoad, end: int) -> int:
        """Give the tree the positions before `end`; free those that it has got
        meanwhile. Returns the length that it had."""
        cache, start = self._cache, pending.start
        holds = [group.slots.hold(start) for group in cache.groups]
        for group, target in zip(self._groups, pending.targets, strict=True):
            if group.places.index is not None:
                group.places.hand_over(holds[group.places.index], target, end)
        tokens = pending.key.tokens[: end + cache.bigram]
        key = cache.key(tokens, namespace=pending.key.namespace)
        own = pending.slots[: end - start]
        slots = np.concatenate([pending.match.slots.numpy(), own])
        present = cache.insert(key, torch.from_numpy(slots), holds)
        if present > start:
            cache.allocator.free(torch.from_numpy(own[: present - start]))
        for runs, hold in zip(cache.groups, holds, strict=True):
            runs.slots.release(hold)
        return max(present, start)
