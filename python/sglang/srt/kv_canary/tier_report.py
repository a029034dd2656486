"""Reports of units that did not arrive intact from another tier.

Nothing was read of them, so the engine drops them and goes on in every mode, also
without a canary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kv_canary.checks import Reason
from kv_canary.evidence import Owner
from kv_canary.records import Launch
from kv_canary.serials import SerialMap
from kv_canary.unit_entry import unit_entry
from kv_canary.violation import GROUPS, POOLS
from sglang.srt.kv_canary.config import CanaryConfig
from sglang.srt.kv_canary.runner.violation_reporter import create_reporter
from sglang.srt.kv_tiers.damage import DamageKind

if TYPE_CHECKING:
    from kv_canary.reporter import ViolationReporter
    from kv_canary.violation import Violation
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.kv_tiers.damage import Damage
    from sglang.srt.server_args import ServerArgs

_REASONS = {
    DamageKind.BYTES: Reason.TIER_BYTES,
    DamageKind.IDENTITY: Reason.TIER_IDENTITY,
    DamageKind.INCOMPLETE: Reason.TIER_INCOMPLETE,
}

# A healing in which no request had to start again.
_NOTHING_READ = {
    "recomputed": [],
    "ended": [],
    "num_recomputed": 0,
    "num_ended": 0,
    "cached_tokens_cut": 0,
    "pages_watched": [],
    "checkpoints_watched": [],
}


class TierReporter:
    """Reports damaged units, as incidents of the canary's reporter if there is one.

    Args:
        manager: the canary of the target, or None without a canary.
        rank: rank of this process, for reports.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        *,
        manager: CanaryManager | None,
        page_size: int,
        rank: int,
    ) -> None:
        self._manager = manager
        self._serials = SerialMap() if manager is None else manager.serials
        self.reporter: ViolationReporter = (
            create_reporter(
                CanaryConfig.from_server_args(server_args),
                page_size=page_size,
                serials=self._serials,
                rank=rank,
            )
            if manager is None
            else manager.reporter
        )

    def report(self, rid: str, serial: int, damages: Sequence[Damage]) -> None:
        """Report units that a request waited for.

        Args:
            serial: the request's number.
        """
        self._serials.add(serial, rid)
        clock = 0 if self._manager is None else self._manager.clock
        entries = [_entry(damage, serial=serial, clock=clock) for damage in damages]
        places = {(d.group, d.position): d for d in damages}

        def details(violation: Violation) -> dict[str, Any]:
            damage = places[violation.group, violation.position]
            return {
                "tier": damage.tier,
                "unit": damage.key.hex(),
                "sender": damage.sender,
            }

        found = self.reporter.examine(
            entries,
            owner_of=lambda slot: Owner("nobody: it was being loaded"),
            mode_of=lambda violation: Launch.TIER.name.lower(),
            branch_of=lambda violation: None,
            details=details,
        )
        self.reporter.publish(found, outcome=_NOTHING_READ)


def _entry(damage: Damage, *, serial: int, clock: int) -> list[int]:
    """Return a damage as an entry of the ring."""
    return unit_entry(
        _REASONS[damage.kind],
        serial=serial,
        slot=damage.slot,
        position=damage.position,
        clock=clock,
        pool=len(POOLS) * GROUPS.index(damage.group),
    )
