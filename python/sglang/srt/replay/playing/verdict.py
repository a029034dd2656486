"""Decides whether a replay shows the same violation at the same forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
# Two violations with equal fields are the same, regardless of who wrote the slot and
# when.
_SAME = ("worker", "group", "launch", "forward", "slot", "position", "rid")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which of an incident's violations a replay shows.

    Fields:
        is_reproduced: whether it shows the first one.
        num_same: number of violations it shows. num_recorded: number of recorded ones.
        nearest: another violation of the replay, the first one from this incident's
            forward or the last one, or None.
    """

    is_reproduced: bool
    num_same: int
    num_recorded: int
    nearest: Json | None = None


def judge(incident: Json, replayed: Sequence[Json]) -> Verdict:
    """Compare an incident with a replay's incidents, oldest first."""
    found = list(_violations(replayed))
    keys = {violation_key(violation) for violation in found}
    recorded = incident["violations"]
    same = [violation for violation in recorded if violation_key(violation) in keys]
    first = recorded[0]
    later = [v for v in found if v["forward"] >= first["forward"]]
    nearest = later[0] if later else found[-1] if found else None
    return Verdict(
        is_reproduced=violation_key(first) in keys,
        num_same=len(same),
        num_recorded=len(recorded),
        nearest=nearest,
    )


def describe(violation: Json) -> str:
    """Describe a violation in one line."""
    rid = "no request" if violation["rid"] is None else f"request {violation['rid']!r}"
    launch = f"{violation['worker']}.{violation['launch']}"
    return (
        f"{'+'.join(violation['reasons'])} of {rid}, slot {violation['slot']}, "
        f"position {violation['position']}, found by {launch} in forward "
        f"{violation['forward']}"
    )


def _violations(incidents: Sequence[Json]) -> Iterator[Json]:
    for incident in incidents:
        yield from incident["violations"]


def violation_key(violation: Json) -> tuple[object, ...]:
    """Return the values that are equal if two violations are the same."""
    reasons = tuple(sorted(violation["reasons"]))
    return (reasons, *(violation[name] for name in _SAME))
