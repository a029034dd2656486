"""KV in host memory, beside the prefix cache of the device.

```
a run enters the tree   its whole units are copied to host memory          (store_due)
a request misses        units that continue its cached prefix are copied into free
                        slots, compared, and hung into the tree        (begin, finish)
```
Units are found by what they contain, so neither tier knows the other's places. A unit
that does not hold what its key says is dropped, reported and computed again: nothing is
read that was not compared after its last move.

Every rank of an engine makes the same calls with the same arguments. Only how many
units arrived intact may differ, so the caller agrees on it before `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from sglang.srt.kv_tiers.damage import Damage, DamageKind
from sglang.srt.kv_tiers.host_pool import HostPool
from sglang.srt.kv_tiers.host_views import HostViews
from sglang.srt.kv_tiers.mover import Shipment
from sglang.srt.kv_tiers.places import CachedPath, Target
from sglang.srt.kv_tiers.source import HostUnits, Sources
from sglang.srt.kv_tiers.storage import NamedUnit
from sglang.srt.kv_tiers.unit import first_key, unit_keys, unit_tokens
from sglang.srt.mem_cache.common import ensure_available

if TYPE_CHECKING:
    from sglang.srt.kv_events.host_blocks import HostBlocks
    from sglang.srt.kv_tiers.group import TierGroup, TokenHistory
    from sglang.srt.kv_tiers.mover import Delivery, Load, Mover
    from sglang.srt.kv_tiers.source import UnitSource
    from sglang.srt.kv_tiers.storage import Reading, Storage
    from sglang.srt.kv_tiers.unit import UnitKey
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult, RadixKey
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.tree_node import TreeNode


class Verdict(NamedTuple):
    """How far a load may be used.

    Fields:
        end: the positions before it arrived intact.
        damages: units that did not.
    """

    end: int
    damages: list[Damage]


@dataclass(slots=True, kw_only=True)
class TierStats:
    """Tokens since the start: copied to the host, copied back, and not copied because
    every place was in use. `damaged` counts units."""

    stored: int = 0
    loaded: int = 0
    skipped: int = 0
    damaged: int = 0


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


class _DueRun(NamedTuple):
    """A run to store, and where it began: a part before may be split off."""

    node: TreeNode
    start: int


class KVTiers:
    """Host memory as a second tier of one engine's prefix cache.

    Args:
        groups: groups of slots, the primary one first, then those of the cache.
        host_units: units of each group that host memory holds.
        identity: digest of everything besides tokens that KV depends on.
        storage: files below host memory, or None.
        before_load: called before slots are filled; marks in stream order what was
            freed until then.

    Attributes:
        cache: the prefix cache of the device.
        groups, mover, identity: as given.
        unit: tokens of a unit.
        pools: host memory, per group. host_views: what it does, for people.
        stats: what was moved so far.
    """

    def __init__(
        self,
        *,
        cache: RadixCache,
        groups: Sequence[TierGroup],
        mover: Mover,
        host_units: Sequence[int],
        identity: bytes,
        storage: Storage | None = None,
        before_load: Callable[[], None] = lambda: None,
    ) -> None:
        self.storage = storage
        self._before_load = before_load
        self.cache = cache
        self.groups = list(groups)
        self.mover = mover
        self.identity = identity
        self.unit = unit_tokens(cache.page_size)
        self.pools = [
            HostPool(
                size=size,
                bytes_per_unit=group.layout.bytes_per_unit,
                is_pinned=mover.device.type == "cuda",
            )
            for group, size in zip(groups, host_units, strict=True)
        ]
        self._host = HostUnits(self.pools)
        self.stats = TierStats()
        self._due: list[_DueRun] = []
        self.host_views = HostViews(self.groups, self.pools, mover)
        self._host_blocks: HostBlocks | None = None
        self._loads: dict[int, PendingLoad] = {}
        self._num_loads = 0

    def rehearse(self) -> None:
        """Move a unit of scratch slots both ways, so that no request waits for
        kernels."""
        for number, (group, pool) in enumerate(
            zip(self.groups, self.pools, strict=True)
        ):
            slots = torch.zeros(group.layout.slots, dtype=torch.int64)
            self.mover.store(group, slots, [pool.memory[0]])
            shipment = self.shipment_of(number, slots[:1], [pool.memory[0]])
            self.mover.load([shipment]).wait()

    def shipment_of(
        self, number: int, slots: torch.Tensor, units: Sequence[torch.Tensor]
    ) -> Shipment:
        """Return units of group `number` whose first rows go to `slots`, int64 [k] on
        the host, whatever tokens they are of."""
        group = self.groups[number]
        return Shipment(
            group=group,
            units=units,
            slots=slots,
            rows=torch.arange(len(slots)),
            expected=[
                torch.zeros((len(slots), 2), dtype=torch.int64) for _ in group.records
            ],
        )

    def _keys(self, elements: IntArray, namespace: str | None) -> list[UnitKey]:
        first = first_key(self.identity, namespace)
        return unit_keys(first, elements, self.unit)

    # -- to the host ---------------------------------------------------------------

    def add_due(self, node: TreeNode, start: int) -> None:
        """Store the positions from `start` to the end of a run of the tree with the
        next `store_due`."""
        self._due.append(_DueRun(node, start))

    def forget_due(self) -> None:
        """Store nothing of what is due, because the tree was cleared."""
        self._due.clear()

    def store_due(self, budget: int) -> None:
        """Start copies of due runs, oldest first, until they have `budget` bytes. The
        others stay due."""
        due, self._due = self._due, []
        for number, (node, start) in enumerate(due):
            if budget <= 0:
                self._due = due[number:]
                return
            if node.parent is not None:
                budget -= self.store_run(node, start)

    def store_run(self, node: TreeNode, start: int) -> int:
        """Start copies of the units that end between position `start` and the end of a
        run, unless they are on the host. Returns their bytes."""
        first, last = start // self.unit, node.end // self.unit
        if first == last:
            return 0
        nodes = _path(node)
        path = CachedPath(nodes, np.concatenate([run.slots for run in nodes]))
        elements = np.concatenate([run.elements for run in nodes])
        keys = self._keys(elements[: last * self.unit], node.namespace)
        moved = 0
        for number, (group, pool) in enumerate(
            zip(self.groups, self.pools, strict=True)
        ):
            sources, places, units = [], [], []
            for unit in range(first, last):
                slots = None
                if keys[unit] not in pool:
                    slots = group.places.unit_slots(path, unit)
                if slots is None:
                    continue
                place = pool.add(keys[unit], keys[unit - 1] if unit else b"")
                if place is None:
                    self.stats.skipped += self.unit
                    continue
                sources.append(slots)
                places.append(place)
                units.append(unit)
            if not units:
                continue
            every = torch.from_numpy(np.concatenate(sources))
            targets = [pool.memory[place] for place in places]
            event = self.mover.store(group, every, targets)
            self.host_views.on_stored(number, places)
            moved += len(units) * group.layout.bytes_per_unit
            if group.places.index is None:
                self.stats.stored += len(units) * self.unit
                self._tell_host(path, elements, keys, units)
            if self.storage is not None:
                for unit in units:
                    begin, end = unit * self.unit, (unit + 1) * self.unit
                    named = NamedUnit(keys[unit], begin, elements[begin:end])
                    parent = keys[unit - 1] if unit else b""
                    self.storage.write(number, named, parent, pool, event)
        return moved

    def watch_host(self, blocks: HostBlocks) -> None:
        """Report what enters and leaves host memory from now on."""
        self._host_blocks = blocks
        self.cache.listeners.append(blocks)
        self.pools[0].on_drop = blocks.unit_dropped

    def _tell_host(
        self,
        path: CachedPath,
        elements: IntArray,
        keys: Sequence[UnitKey],
        units: Sequence[int],
    ) -> None:
        """Report units that entered host memory."""
        if self._host_blocks is None:
            return
        hashes = np.concatenate([run.block_hashes for run in path.nodes]).tolist()
        pages = self.unit // self.cache.page_size
        for unit in units:
            first = unit * pages
            self._host_blocks.unit_stored(
                keys[unit],
                before=hashes[first - 1] if first else None,
                hashes=hashes[first : first + pages],
                elements=elements[unit * self.unit : (unit + 1) * self.unit],
                namespace=path.nodes[0].namespace,
            )

    def store_path(self, key: RadixKey) -> None:
        """Start copies of the units of a cached prefix that are not on the host."""
        node = self.cache.cached_end(key)
        if node.parent is not None:
            self.store_run(node, 0)

    def free_bytes(self) -> int:
        """Return how many bytes may be stored now without delaying loads."""
        return self.mover.free_bytes()

    # -- from files ----------------------------------------------------------------

    def named_units(self, key: RadixKey, start: int) -> list[NamedUnit]:
        """Return the whole units of a prefix that contain positions from `start` on."""
        elements = key.elements()
        return [
            NamedUnit(
                name,
                number * self.unit,
                elements[number * self.unit : (number + 1) * self.unit],
            )
            for number, name in enumerate(self._keys(elements, key.namespace))
            if number >= start // self.unit
        ]

    def is_stored(self, units: Sequence[NamedUnit]) -> bool:
        """Return whether files continue what host memory has of these units."""
        for unit in units:
            if unit.key not in self.pools[0]:
                return self.storage is not None and self.storage.has(unit.key)
        return False

    def read(self, units: Sequence[NamedUnit]) -> Reading:
        """Start to read what host memory lacks of these units."""
        assert self.storage is not None
        return self.storage.start(units, lambda group, key: key in self.pools[group])

    # -- to the device -------------------------------------------------------------

    @property
    def num_loading(self) -> int:
        """Loads that `finish` has not seen."""
        return len(self._loads)

    def num_slots(self, number: int) -> int:
        """Return how many primary slots a load fills."""
        return len(self._loads[number].slots)

    @property
    def loading_slots(self) -> IntArray:
        """Primary slots that are being loaded, which neither the cache nor a request
        holds."""
        parts = [pending.slots for pending in self._loads.values()]
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
        keys = self._keys(key.elements(), key.namespace)
        start = len(match)
        sources = Sources([self._host, *others])
        end = self._usable_end(sources, keys, start)
        if end <= start:
            return None
        own = keys[start // self.unit : end // self.unit]
        for pool in self.pools:
            pool.touch(keys[: end // self.unit])
        # Slots are taken by evicting runs, which may be stored in their place.
        sources.pin(own)
        cache = self.cache
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
        self._num_loads += 1
        self._loads[self._num_loads] = PendingLoad(
            key=cache.key(key.tokens[: end + cache.bigram], namespace=key.namespace),
            match=match,
            slots=slots,
            keys=own,
            targets=targets,
            sources=sources,
            load=self.mover.load(shipments),
        )
        return self._num_loads

    def _usable_end(self, sources: Sources, keys: Sequence[UnitKey], start: int) -> int:
        """Return the end of the longest prefix that sources can complete."""
        first = start // self.unit
        last = first
        while last < len(keys) and sources.has(0, keys[last]):
            last += 1
        for end in range(last, first, -1):
            if all(
                self._has_needed(sources, number, keys[:end], start)
                for number in range(1, len(self.groups))
            ):
                return end * self.unit
        return 0

    def _has_needed(
        self, sources: Sources, number: int, keys: Sequence[UnitKey], start: int
    ) -> bool:
        """Return whether there is what a request needs of a group that goes on after
        these units and has the first `start` positions."""
        places = self.groups[number].places
        first = max(places.first_read(len(keys) * self.unit), start)
        return all(sources.has(number, key) for key in keys[first // self.unit :])

    def _take_slots(self, count: int) -> IntArray | None:
        """Take primary slots that no forward will write to or read from."""
        if not ensure_available(self.cache, count):
            return None
        taken = self.cache.allocator.alloc(count)
        return None if taken is None else taken.numpy()

    def _take_targets(
        self, slots: IntArray, start: int, end: int
    ) -> list[Target] | None:
        targets: list[Target] = []
        for group in self.groups:
            target = group.places.take(slots, start, end)
            if target is None:
                for taken, other in zip(targets, self.groups, strict=False):
                    other.places.give_back(taken)
                self.cache.allocator.free(torch.from_numpy(slots))
                return None
            targets.append(target)
        for secondary in self.cache.allocator.secondary:
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
        group = self.groups[number]
        first, last = target.positions[[0, -1]] // self.unit
        if group.places.per_unit == self.unit:
            rows = target.positions - first * self.unit
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
            for number, pending in self._loads.items()
            if pending.load.has_arrived()
        ]

    def verdict(self, number: int) -> Verdict:
        """Wait for a load and compare it. Every rank of the engine does; the smallest
        end counts."""
        pending = self._loads[number]
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
            is_plain = len(self.groups) == 1
            end = first - first % self.unit if is_plain else pending.start
        return Verdict(max(end, pending.start), damages)

    def _damages(self, pending: PendingLoad, delivery: Delivery) -> list[Damage]:
        group = delivery.shipment.group
        index = self.groups.index(group)
        target = pending.targets[index]
        first = int(target.positions[0]) // self.unit
        found = []
        for number in np.flatnonzero(~delivery.verdicts.numpy().all(axis=1)).tolist():
            begin = max((first + number) * self.unit, int(target.positions[0]))
            at = int(np.searchsorted(target.positions, begin))
            is_intact, _ = delivery.verdicts[number].tolist()
            key = pending.keys[first + number - pending.start // self.unit]
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
        pending = self._loads.pop(number)
        pending.sources.unpin(pending.keys)
        pending.sources.drop(damaged)
        self.stats.damaged += len(damaged)
        cache, count = self.cache, end - pending.start
        gained = 0
        if end == pending.end or (count and len(self.groups) == 1):
            self._adopt(pending, end)
            gained = end - self._insert(pending, end)
        else:
            count = 0
            for group, target in zip(self.groups, pending.targets, strict=True):
                group.places.give_back(target)
        if count < len(pending.slots):
            cache.allocator.free(torch.from_numpy(pending.slots[count:]))
        cache.dec_lock_ref(pending.match.last_node)
        self.stats.loaded += gained
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
        cache, start = self.cache, pending.start
        holds = [group.slots.hold(start) for group in cache.groups]
        for group, target in zip(self.groups, pending.targets, strict=True):
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

    # -- the end of units ----------------------------------------------------------

    def discard(self, nodes: Iterable[TreeNode]) -> int:
        """Forget the units that contain positions of these runs, and all that continue
        them, because the runs are damaged. Returns how many."""
        keys: set[UnitKey] = set()
        for node in nodes:
            runs = _path(node)
            elements = np.concatenate([run.elements for run in runs])
            keys.update(self._keys(elements, node.namespace)[node.start // self.unit :])
        dropped = 0
        gone = self.pools[0].below(keys)
        for pool in self.pools:
            dropped += pool.drop(gone)
        if self.storage is not None:
            self.storage.discard(gone)
        return dropped

    def flush(self, *, host: bool = True, storage: bool = True) -> bool:
        """Forget every unit of these tiers; returns whether that was possible: nothing
        is loading."""
        if self._loads:
            return False
        if host:
            self.mover.wait_for_stores()
            for pool in self.pools:
                pool.clear()
        if storage and self.storage is not None:
            self.storage.clear()
        return True


def _path(node: TreeNode) -> list[TreeNode]:
    """Return the runs from position 0 to the end of `node`."""
    path = []
    above: TreeNode | None = node
    while above is not None and above.parent is not None:
        path.append(above)
        above = above.parent
    return path[::-1]
