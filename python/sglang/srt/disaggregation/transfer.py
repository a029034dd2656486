"""Units of one request on their way from a prefill engine, and where they land."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.disaggregation.link import LinkLost
from sglang.srt.kv_tiers.damage import DamageKind

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.disaggregation.messages import Unit
    from sglang.srt.kv_tiers.landing import LandingMemory, Range
    from sglang.srt.kv_tiers.unit import UnitKey


class Address(NamedTuple):
    """Where the rank 0 of a prefill engine listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class GroupPlaces(NamedTuple):
    """Landing places of a transfer for one group: `units` of `size` bytes, from
    `begin` on."""

    begin: int
    size: int
    units: int


class Fault(NamedTuple):
    """A unit that was not taken, and why."""

    kind: DamageKind
    group: int
    key: UnitKey


@dataclass(kw_only=True, eq=False)
class Transfer:
    """Units of one request on their way.

    Fields:
        first, keys: number of the first unit, and the keys from there.
        groups: landing places per group. In the first one a unit's place follows from
            its number, in the others from the order of arrival.
        arrived: units that are there, by group and key.
        faults: units that were not taken.
        ended: why no more will come, or None; in words.
        is_broken: whether the sender should have sent more.
        changed: when something arrived last, in seconds of the monotonic clock.
    """

    number: int
    address: Address
    room: int
    first: int
    keys: Sequence[UnitKey]
    place: Range
    groups: Sequence[GroupPlaces]
    landing: LandingMemory
    arrived: dict[tuple[int, UnitKey], Tensor] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    ended: str | None = None
    is_broken: bool = False
    changed: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_quiet: bool = False
    _is_released: bool = False

    def target(self, unit: Unit) -> Tensor | None:
        """Return where a unit goes, or None if it is not expected, with a fault if it
        should have been.

        Raises:
            LinkLost: it has another size than units of its group.
        """
        index = unit.position - self.first
        if not 0 <= unit.group < len(self.groups) or not 0 <= index < len(self.keys):
            return None
        key, places = self.keys[index], self.groups[unit.group]
        if unit.size != places.size:
            self.faults.append(Fault(DamageKind.INCOMPLETE, unit.group, key))
            raise LinkLost(
                f"{self.address} sent a unit of {unit.size} bytes, not {places.size}"
            )
        if (unit.group, key) in self.arrived or self._is_released:
            return None
        if unit.key != key:
            self.faults.append(Fault(DamageKind.IDENTITY, unit.group, key))
            return None
        at = index
        if unit.group:
            at = sum(group == unit.group for group, _ in self.arrived)
        if at >= places.units:
            return None
        begin = self.place.begin + places.begin + at * places.size
        return self.landing.memory[begin : begin + places.size]

    def release(self) -> None:
        """Let the landing memory go; nothing of it is read any more."""
        with self._lock:
            was_held = not self._is_released
            self._is_released = True
            if was_held and self._is_quiet:
                self.landing.give(self.place)

    def end(self, why: str, *, is_broken: bool, is_quiet: bool) -> None:
        """Note that no more comes.

        Args:
            is_quiet: nothing writes to the landing memory any more.
        """
        if self.ended is None:
            self.ended, self.is_broken = why, is_broken
        with self._lock:
            was_busy, self._is_quiet = not self._is_quiet, self._is_quiet or is_quiet
            if was_busy and self._is_quiet and self._is_released:
                self.landing.give(self.place)
