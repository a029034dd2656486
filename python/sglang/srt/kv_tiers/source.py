"""Where units come from: host memory, files, another engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.kv_tiers.host_pool import HostPool
    from sglang.srt.kv_tiers.unit import UnitKey


class UnitSource(Protocol):
    """Units in memory of the host, by number of their group and key.

    Attributes:
        tier: host, storage or engine, for reports.
        sender: who put the units there, for reports.
    """

    tier: str
    sender: str

    def find(self, group: int, key: UnitKey) -> Tensor | None:
        """Return a unit, uint8 [bytes], or None. It stays as it is while pinned."""

    def pin(self, keys: Iterable[UnitKey]) -> None:
        """Keep the units of these keys until `unpin`, in every group."""

    def unpin(self, keys: Iterable[UnitKey]) -> None:
        """Undo one `pin`."""

    def drop(self, keys: Iterable[UnitKey]) -> None:
        """Forget damaged units."""


class HostUnits:
    """The units in this engine's host memory."""

    tier = "host"
    sender = "this engine"

    def __init__(self, pools: Sequence[HostPool]) -> None:
        self._pools = pools

    def find(self, group: int, key: UnitKey) -> Tensor | None:
        pool = self._pools[group]
        return pool.memory[pool.place(key)] if key in pool else None

    def pin(self, keys: Iterable[UnitKey]) -> None:
        for pool in self._pools:
            pool.pin(keys)

    def unpin(self, keys: Iterable[UnitKey]) -> None:
        for pool in self._pools:
            pool.unpin(keys)

    def drop(self, keys: Iterable[UnitKey]) -> None:
        for pool in self._pools:
            pool.drop(keys)


class GivenUnits:
    """Units that were brought for one request. They need no pins: they live as long as
    whoever holds this."""

    def __init__(
        self,
        units: Mapping[tuple[int, UnitKey], Tensor],
        *,
        tier: str,
        sender: str,
    ) -> None:
        self._units = dict(units)
        self.tier = tier
        self.sender = sender

    @property
    def names(self) -> list[tuple[int, UnitKey]]:
        """Groups and keys of all units."""
        return list(self._units)

    def keep(self, names: Collection[tuple[int, UnitKey]]) -> None:
        """Forget all other units."""
        self._units = {at: unit for at, unit in self._units.items() if at in names}

    def find(self, group: int, key: UnitKey) -> Tensor | None:
        return self._units.get((group, key))

    def pin(self, keys: Iterable[UnitKey]) -> None:
        """Do nothing."""

    def unpin(self, keys: Iterable[UnitKey]) -> None:
        """Do nothing."""

    def drop(self, keys: Iterable[UnitKey]) -> None:
        gone = set(keys)
        self._units = {
            at: unit for at, unit in self._units.items() if at[1] not in gone
        }


class Sources:
    """Several sources, the best one first."""

    def __init__(self, sources: Sequence[UnitSource]) -> None:
        self._sources = sources

    def of(self, group: int, key: UnitKey) -> UnitSource | None:
        """Return the first source that has a unit."""
        for source in self._sources:
            if source.find(group, key) is not None:
                return source
        return None

    def has(self, group: int, key: UnitKey) -> bool:
        return self.of(group, key) is not None

    def unit(self, group: int, key: UnitKey) -> Tensor:
        """Return a unit that some source has."""
        source = self.of(group, key)
        unit = None if source is None else source.find(group, key)
        if unit is None:
            raise RuntimeError(f"unit {key.hex()} of group {group} is gone")
        return unit

    def pin(self, keys: Sequence[UnitKey]) -> None:
        for source in self._sources:
            source.pin(keys)

    def unpin(self, keys: Sequence[UnitKey]) -> None:
        for source in self._sources:
            source.unpin(keys)

    def drop(self, keys: Sequence[UnitKey]) -> None:
        for source in self._sources:
            source.drop(keys)
