"""What the places of host memory do, for the inspector."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang.srt.managers.messages.tier_snapshot import HostView, PlaceState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.kv_tiers.group import TierGroup
    from sglang.srt.kv_tiers.host_pool import HostPool
    from sglang.srt.kv_tiers.mover import Mover


class _Storing(NamedTuple):
    """Places of a group that hold their units when `mark` copies have ended."""

    mark: int
    group: int
    places: list[int]


class HostViews:
    """Knows which places are still being copied to."""

    def __init__(
        self, groups: Sequence[TierGroup], pools: Sequence[HostPool], mover: Mover
    ) -> None:
        self._groups = groups
        self._pools = pools
        self._mover = mover
        # Stores whose copies may not have ended, oldest first.
        self._storing: deque[_Storing] = deque()

    def on_stored(self, group: int, places: list[int]) -> None:
        """Note that copies to some places were started just now."""
        done = self._mover.num_copied()
        while self._storing and self._storing[0].mark <= done:
            self._storing.popleft()
        self._storing.append(_Storing(self._mover.num_copies, group, places))

    def views(self) -> list[HostView]:
        """Return what the inspector shows, per group."""
        done = self._mover.num_copied()
        return [
            self._view(number, [one for one in self._storing if one.mark > done])
            for number in range(len(self._groups))
        ]

    def _view(self, number: int, storing: Sequence[_Storing]) -> HostView:
        group, pool = self._groups[number], self._pools[number]
        own = [one.places for one in storing if one.group == number]
        states = pool.states([place for places in own for place in places])
        counts = np.bincount(states, minlength=len(PlaceState)).tolist()
        return HostView(
            group=group.name,
            unit_bytes=group.layout.bytes_per_unit,
            free=counts[PlaceState.FREE],
            holding=counts[PlaceState.HOLDING],
            loading=counts[PlaceState.LOADING],
            writing=counts[PlaceState.WRITING],
            cells=states.tobytes(),
        )
