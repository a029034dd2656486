"""Ring entries about units of KV that the host compared when they arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_canary.records import (
    HALF_BITS,
    RING_WORDS,
    TAG_MANAGER_MASK,
    TOKEN_MASK,
    Launch,
    Ring,
    ring_tag,
)

if TYPE_CHECKING:
    from kv_canary.checks import Reason


def unit_entry(
    reason: Reason, *, serial: int, slot: int, position: int, clock: int, pool: int
) -> list[int]:
    """Return the entry of a damaged unit.

    Args:
        serial: of the request that waits for it. slot, position: the first of the unit,
            or the first that differs. pool: number of the group's pool.
    """
    entry = [0] * RING_WORDS
    entry[Ring.REASONS] = reason
    entry[Ring.REQ_ROW] = -1
    entry[Ring.SERIAL] = serial
    entry[Ring.SLOT] = slot
    entry[Ring.POSITION] = position
    entry[Ring.EXPECTED_WORD0] = (position << HALF_BITS) | TOKEN_MASK
    entry[Ring.FOUND_WORD0] = -1
    entry[Ring.CLOCK] = clock
    entry[Ring.BATCH_ROW] = -1
    entry[Ring.EXPECTED_SLOT] = -1
    entry[Ring.TAG] = ring_tag(Launch.TIER, TAG_MANAGER_MASK, pool)
    return entry
