"""Reports of blocks that a connector did not load intact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kv_canary.evidence import Owner
from kv_canary.hashing import MASK64
from kv_canary.unit_entry import unit_entry

if TYPE_CHECKING:
    from kv_canary.engines.block_units import UnitDamage
    from kv_canary.engines.engine_canary import EngineCanary
    from kv_canary.violation import Violation


def report_units(
    canary: EngineCanary, rid: str, damages: Sequence[UnitDamage], *, tier: str
) -> None:
    """Report damaged blocks. Nothing was read of them, so that no mode stops.

    Args:
        rid: request that waits for them. tier: where they were loaded from.
    """
    serial = canary.ledger.serial_of(rid)
    entries = [
        unit_entry(
            damage.reason,
            serial=serial,
            slot=damage.slot,
            position=damage.position,
            clock=canary.forwards,
            pool=0,
        )
        for damage in damages
    ]
    by_slot = {damage.slot: damage for damage in damages}

    def details(violation: Violation) -> dict[str, object]:
        damage = by_slot[violation.slot]
        where = "" if damage.layer < 0 else f", first in layer {damage.layer}"
        return {
            "tier": tier,
            "unit": f"{damage.key & MASK64:016x}",
            "sender": f"this model: {damage.note}{where}",
        }

    found = canary.reporter.examine(
        entries,
        owner_of=lambda slot: Owner("nobody: it was being loaded"),
        mode_of=lambda violation: violation.launch,
        branch_of=lambda violation: None,
        details=details,
    )
    canary.reporter.publish(found)
