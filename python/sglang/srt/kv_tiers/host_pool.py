"""Units of one group in host memory, the least recently used of which go first.

```
key --> place in `memory`, one row per unit
```
A unit is found as soon as its copy is on its way: copies to and from host memory run in
stream order. Knows keys and bytes, but nothing about tokens or slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang.srt.kv_tiers.unit import with_descendants
from sglang.srt.managers.messages.tier_snapshot import PlaceState
from sglang.srt.utils.memory import host_bytes

if TYPE_CHECKING:
    from sglang.srt.kv_tiers.unit import UnitKey


class _Kept(NamedTuple):
    place: int
    parent: UnitKey
    stamp: int


class HostPool:
    """Places for `size` units.

    Args:
        bytes_per_unit: bytes of one unit.
        is_pinned: whether a GPU copies to and from it.

    Attributes:
        memory: uint8 [size, bytes_per_unit].
        evicted: units that had to go for others, so far.
        on_drop: called with the key of every unit that leaves.

    Raises:
        OSError: there is not enough memory.
        RuntimeError: the driver cannot pin it.
    """

    def __init__(self, *, size: int, bytes_per_unit: int, is_pinned: bool) -> None:
        self.size = size
        memory = host_bytes(
            size * bytes_per_unit,
            pinned_for=self if is_pinned else None,
            advice="use a smaller --hicache-size or --hicache-ratio",
        )
        self.memory = memory.view(size, bytes_per_unit)
        self._places: OrderedDict[UnitKey, _Kept] = OrderedDict()
        self._pins: dict[UnitKey, int] = {}
        self._free = list(range(size - 1, -1, -1))
        self._stamp = 0
        self.evicted = 0
        self.on_drop: Callable[[UnitKey], None] | None = None

    def __len__(self) -> int:
        """Units kept."""
        return len(self._places)

    def __contains__(self, key: UnitKey) -> bool:
        return key in self._places

    def place(self, key: UnitKey) -> int:
        """Return the place of a unit that is kept."""
        return self._places[key].place

    def touch(self, keys: Iterable[UnitKey]) -> None:
        """Note that the units of one sequence, first to last, are used now. Its end
        goes before its beginning, without which it is useless."""
        for key in reversed(list(keys)):
            if key in self._places:
                self._places.move_to_end(key)

    def add(self, key: UnitKey, parent: UnitKey) -> int | None:
        """Give a unit a place and return it, or None if every unit is pinned.

        Args:
            parent: key of the unit before it.

        Raises:
            RuntimeError: the unit is kept already.
        """
        if key in self._places:
            raise RuntimeError("the unit is in the host pool already")
        if not self._free and not self._evict():
            return None
        place = self._free.pop()
        self._stamp += 1
        self._places[key] = _Kept(place, parent, self._stamp)
        return place

    def stamp(self, key: UnitKey) -> int:
        """Return a number of this stay of a unit, or 0 if it is not kept. As long as it
        is the same, so are the unit's bytes. Any thread may ask."""
        kept = self._places.get(key)
        return 0 if kept is None else kept.stamp

    def states(self, writing: Iterable[int]) -> NDArray[np.uint8]:
        """Return a `PlaceState` per place.

        Args:
            writing: places to which units are being copied; some may be free again.
        """
        states = np.full(self.size, PlaceState.FREE, dtype=np.uint8)
        for key, kept in self._places.items():
            is_loading = key in self._pins
            states[kept.place] = (
                PlaceState.LOADING if is_loading else PlaceState.HOLDING
            )
        for place in writing:
            if states[place] == PlaceState.HOLDING:
                states[place] = PlaceState.WRITING
        return states

    def _evict(self) -> bool:
        oldest = next((key for key in self._places if key not in self._pins), None)
        if oldest is None:
            return False
        self.drop([oldest])
        self.evicted += 1
        return True

    def pin(self, keys: Iterable[UnitKey]) -> None:
        """Keep these units until `unpin`, while they are copied out."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[UnitKey]) -> None:
        """Undo one `pin`."""
        for key in keys:
            left = self._pins.pop(key) - 1
            if left:
                self._pins[key] = left

    def drop(self, keys: Iterable[UnitKey]) -> int:
        """Forget units that are not pinned; return how many were kept. A pinned one
        stays until the next `drop`."""
        dropped = 0
        for key in keys:
            if key in self._places and key not in self._pins:
                self._free.append(self._places.pop(key).place)
                dropped += 1
                if self.on_drop is not None:
                    self.on_drop(key)
        return dropped

    def below(self, keys: Iterable[UnitKey]) -> set[UnitKey]:
        """Return `keys` and the keys of all kept units that continue one of them."""
        parents = {key: kept.parent for key, kept in self._places.items()}
        return with_descendants(keys, parents)

    def clear(self) -> int:
        """Forget every unit that is not pinned; return how many."""
        return self.drop(list(self._places))
