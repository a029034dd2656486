"""Which slots a unit has in a group: all of its tokens', those inside the window, or
the state at its end.

```
unit      | 0 .. 63 | 64 .. 127 | 128 .. 191 |
primary   |   all   |    all    |    all     |
window    |  gone   |    all    |    all     |    a request reads the last ones
state     |         |           |        one |    at the end of a run, if it was kept
```
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang.srt.mem_cache.groups.saved_states import HeldCheckpoint
from sglang.srt.mem_cache.groups.state_slots import StateHold

if TYPE_CHECKING:
    from sglang.srt.mem_cache.groups.slots import GroupHold
    from sglang.srt.mem_cache.groups.state_runs import StateRuns
    from sglang.srt.mem_cache.groups.window_slots import WindowSlots
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.tree_node import TreeNode


class CachedPath(NamedTuple):
    """The runs of a sequence from position 0 on, and their primary slots, int64."""

    nodes: Sequence[TreeNode]
    slots: IntArray


class Target(NamedTuple):
    """The slots that positions are loaded to, int64 [k] each, ascending positions."""

    positions: IntArray
    slots: IntArray


class Places(ABC):
    """The slots of a group, by units of `size` tokens.

    Attributes:
        per_unit: slots of a unit.
        index: place of the group among the cache's groups, or None for the primary
            slots.
    """

    per_unit: int
    index: int | None = None

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def unit_slots(self, path: CachedPath, unit: int) -> IntArray | None:
        """Return the slots of a unit, int64 [per_unit], or None if some are gone."""

    @abstractmethod
    def first_read(self, length: int) -> int:
        """Return the first position whose slot a request reads that goes on after
        `length` positions."""

    @abstractmethod
    def take(self, slots: IntArray, start: int, end: int) -> Target | None:
        """Choose the slots for positions [start, end).

        Args:
            slots: int64 [end - start], their new primary slots.

        Returns:
            What is loaded, or None if there is no slot for it.
        """

    def hand_over(self, hold: GroupHold, target: Target, end: int) -> None:
        """Prepare the hold with which loaded positions enter the tree."""
        return

    def give_back(self, target: Target) -> None:
        """Free what `take` took besides the primary slots."""
        return


class PrimaryPlaces(Places):
    """The allocator's slots."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.per_unit = size

    def unit_slots(self, path: CachedPath, unit: int) -> IntArray | None:
        return path.slots[unit * self.size : (unit + 1) * self.size]

    def first_read(self, length: int) -> int:
        return 0

    def take(self, slots: IntArray, start: int, end: int) -> Target | None:
        return Target(np.arange(start, end), slots)


class WindowPlaces(Places):
    """Slots of tokens that are still in the window."""

    def __init__(self, size: int, slots: WindowSlots, *, index: int) -> None:
        super().__init__(size)
        self.per_unit = size
        self.index = index
        self._slots = slots

    def unit_slots(self, path: CachedPath, unit: int) -> IntArray | None:
        primary = path.slots[unit * self.size : (unit + 1) * self.size]
        own = self._slots.map_slots(primary)
        return own if (own > 0).all() else None

    def first_read(self, length: int) -> int:
        return self._slots.first_read(length)

    def take(self, slots: IntArray, start: int, end: int) -> Target | None:
        first = max(self.first_read(end), start)
        page_size = self._slots.page_size
        # The allocator has given every page one.
        self._slots.drop(slots[: first - start : page_size] // page_size)
        own = slots[first - start :]
        return Target(np.arange(first, end), self._slots.map_slots(own))

    def hand_over(self, hold: GroupHold, target: Target, end: int) -> None:
        hold.kept_from = int(target.positions[0])


class StatePlaces(Places):
    """Checkpoints of recurrent state at the ends of units."""

    per_unit = 1

    def __init__(self, size: int, runs: StateRuns, *, index: int) -> None:
        super().__init__(size)
        self.index = index
        self._runs = runs

    def unit_slots(self, path: CachedPath, unit: int) -> IntArray | None:
        end = (unit + 1) * self.size
        slots = [
            self._runs.slot_at(node)
            for node in path.nodes
            if node.end == end and self._runs.has_checkpoint(node)
        ]
        return np.array(slots, dtype=np.int64) if slots else None

    def first_read(self, length: int) -> int:
        return length - 1

    def take(self, slots: IntArray, start: int, end: int) -> Target | None:
        slot = self._runs.take()
        return Target(np.array([end - 1]), np.array([slot])) if slot else None

    def hand_over(self, hold: GroupHold, target: Target, end: int) -> None:
        assert isinstance(hold, StateHold)
        hold.tracked.append(HeldCheckpoint(end, int(target.slots[0])))

    def give_back(self, target: Target) -> None:
        self._runs.slots.give(int(target.slots[0]))
