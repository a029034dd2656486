"""Whether a replay shows the same violation, at the same forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
# The fields that make a violation the same one, whoever wrote the slot and when.
_SAME = ("worker", "group", "launch", "forward", "slot", "position", "rid")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The violations that a replay shows, of those of an incident.

    Fields:
        is_reproduced: the first of them.
        num_same: so many of them; num_recorded: of so many.
        nearest: another violation of the replay, the first from this incident's forward
            on, or its last; None: it has none.
    """

    is_reproduced: bool
    num_same: int
    num_recorded: int
    nearest: Json | None = None


def judge(incident: Json, replayed: Sequence[Json]) -> Verdict:
    """Compare an incident with those of a replay, oldest first."""
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
    """A violation in one line."""
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
    """Return the values by which two violations are the same one."""
    reasons = tuple(sorted(violation["reasons"]))
    return (reasons, *(violation[name] for name in _SAME))
