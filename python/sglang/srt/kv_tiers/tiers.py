"""KV in host memory, beside the prefix cache of the device.

```
a run enters the tree   its whole units are copied to host memory          (store_due)
a request misses        units that continue its cached prefix are copied into free
                        slots, compared, and hung into the tree                (loads)
```
Units are found by what they contain, so neither tier knows the other's places. A unit
that does not hold what its key says is dropped, reported and computed again: nothing is
read that was not compared after its last move.

Every rank of an engine makes the same calls with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from sglang.srt.kv_tiers.host_pool import HostPool
from sglang.srt.kv_tiers.host_views import HostViews
from sglang.srt.kv_tiers.loads import Loads, TierStats
from sglang.srt.kv_tiers.mover import Shipment
from sglang.srt.kv_tiers.places import CachedPath
from sglang.srt.kv_tiers.storage import NamedUnit
from sglang.srt.kv_tiers.unit import UnitNames, unit_tokens

if TYPE_CHECKING:
    from sglang.srt.kv_events.host_blocks import HostBlocks
    from sglang.srt.kv_tiers.group import TierGroup
    from sglang.srt.kv_tiers.mover import Mover
    from sglang.srt.kv_tiers.storage import Reading, Storage
    from sglang.srt.kv_tiers.unit import UnitKey
    from sglang.srt.mem_cache.base_prefix_cache import RadixKey
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.tree_node import TreeNode


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
        stats: what was moved so far. loads: what is on its way to the device.
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
        self.cache = cache
        self.groups = list(groups)
        self.mover = mover
        self.identity = identity
        self.unit = unit_tokens(cache.page_size)
        self._names = UnitNames(identity=identity, size=self.unit)
        self.pools = [
            HostPool(
                size=size,
                bytes_per_unit=group.layout.bytes_per_unit,
                is_pinned=mover.device.type == "cuda",
            )
            for group, size in zip(groups, host_units, strict=True)
        ]
        self.stats = TierStats()
        self.loads = Loads(
            cache=cache,
            groups=self.groups,
            mover=mover,
            pools=self.pools,
            names=self._names,
            stats=self.stats,
            before_load=before_load,
        )
        self._due: list[_DueRun] = []
        self.host_views = HostViews(self.groups, self.pools, mover)
        self._host_blocks: HostBlocks | None = None

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
        keys = self._names.keys(elements[: last * self.unit], node.namespace)
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
            for number, name in enumerate(self._names.keys(elements, key.namespace))
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

    # -- the end of units ----------------------------------------------------------

    def discard(self, nodes: Iterable[TreeNode]) -> int:
        """Forget the units that contain positions of these runs, and all that continue
        them, because the runs are damaged. Returns how many."""
        keys: set[UnitKey] = set()
        for node in nodes:
            runs = _path(node)
            elements = np.concatenate([run.elements for run in runs])
            own = self._names.keys(elements, node.namespace)
            keys.update(own[node.start // self.unit :])
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
        if self.loads:
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
