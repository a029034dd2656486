"""Which units of which groups a request needs that goes on after some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.kv_tiers.tiers import KVTiers
    from sglang.srt.kv_tiers.unit import UnitKey


def most_needed(tiers: KVTiers, first: int, last: int) -> list[int]:
    """Return how many of the units [first, last) a request can need of each group but
    the first, at most."""
    return [
        max(
            end - _first_needed(tiers, number, end, first)
            for end in range(first + 1, last + 1)
        )
        for number in range(1, len(tiers.groups))
    ]


def needed_units(
    tiers: KVTiers, keys: Sequence[UnitKey], *, first: int
) -> list[tuple[int, int]]:
    """Return the units in host memory of all groups but the first, as group and number,
    that complete the longest prefix.

    Args:
        keys: of a sequence whose units are all there in the first group.
        first: the receiver has those before this number.
    """
    for end in range(len(keys), first, -1):
        needed = [
            (number, unit)
            for number in range(1, len(tiers.groups))
            for unit in range(_first_needed(tiers, number, end, first), end)
        ]
        if all(keys[unit] in tiers.pools[number] for number, unit in needed):
            return needed
    return []


def _first_needed(tiers: KVTiers, number: int, end: int, first: int) -> int:
    """Return the first unit that a request needs of a group which goes on after `end`
    units and has the first `first` ones."""
    places = tiers.groups[number].places
    return max(places.first_read(end * tiers.unit) // tiers.unit, first)
