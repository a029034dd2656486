"""The outcome of a fault: of one run with the canary and, if that stopped, one without
it; then of the fault in all worlds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scripts.mutation.runs import Run

# Outcomes of a world or a fault; the first one that applies to any world is the
# fault's.
NEVER = "never"
AFTER = "after"
BEFORE = "before"
STOPPED = "stopped"
DRAFTS_UNSEEN = "drafts unseen"
DRAFTS_NAMED = "drafts named"
NAMED = "named, no effect"
LOST = "lost"
LEAK = "leak"
GUARD = "guard"
HANG = "hang"
ENDS = "ends"
NONE = "none"
# Ordered within what the fault changes: tokens, drafts, neither.
ORDER = {
    "tokens": (NEVER, AFTER, BEFORE, STOPPED),
    "drafts": (DRAFTS_UNSEEN, DRAFTS_NAMED, STOPPED),
    "other": (LOST, ENDS, HANG, GUARD, LEAK, NAMED, NONE),
}
OUTCOMES = (
    NEVER,
    AFTER,
    BEFORE,
    STOPPED,
    DRAFTS_UNSEEN,
    DRAFTS_NAMED,
    NAMED,
    LOST,
    ENDS,
    HANG,
    GUARD,
    LEAK,
    NONE,
)
SPINNING = ("stall", "steps", "time")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldRow:
    """One fault in one world.

    Fields:
        changes: what the fault changes there: tokens, drafts or other; determined
            without the canary if the canary stopped the engine first. end, detail: end
            of the run with the canary.
        unwatched: end of the run without it, or empty if not needed.
        healed: number of healings in the run with the canary.
    """

    world: str
    seed: int
    outcome: str
    changes: str
    end: str
    detail: str
    steps: int
    sent: int
    wrong_sent: int
    unwatched: str = ""
    healed: int = 0


def needs_unwatched(watched: Run) -> bool:
    """Whether the run alone does not show what the fault changes."""
    is_stopped = watched.end in ("violation", "error", "leak") or watched.failed
    return not watched.wrong_sent and bool(is_stopped)


def classify_changes(run: Run) -> str:
    if run.wrong_sent:
        return "tokens"
    return "drafts" if run.wrong_drafts else "other"


def classify(world: str, seed: int, watched: Run, unwatched: Run | None) -> WorldRow:
    """Return the outcome in one world."""
    changes = classify_changes(unwatched or watched)
    return WorldRow(
        world=world,
        seed=seed,
        outcome=_outcome(watched, changes),
        changes=changes,
        end=watched.end,
        detail=watched.detail,
        steps=watched.steps,
        sent=watched.sent,
        wrong_sent=watched.wrong_sent,
        unwatched="" if unwatched is None else unwatched.end,
        healed=watched.healed,
    )


def _outcome(watched: Run, changes: str) -> str:
    is_idle = watched.end == "idle"
    # The engine's report, or the error that a request got from the front.
    is_named = watched.end == "violation" or (is_idle and watched.named > 0)
    if changes == "tokens":
        if watched.wrong_sent:
            return AFTER if is_named else NEVER
        return BEFORE if is_named else STOPPED
    if changes == "drafts":
        if is_named:
            return DRAFTS_NAMED
        return DRAFTS_UNSEEN if is_idle else STOPPED
    if watched.lost:
        return LOST
    if is_named:
        return NAMED
    if watched.end in SPINNING:
        return HANG
    if is_idle and not watched.failed:
        return ENDS if watched.wrong_ends else NONE
    return LEAK if watched.end == "leak" else GUARD


def lost(world: str, seed: int, detail: str) -> WorldRow:
    """Return the row of a world whose process died or had to be killed."""
    is_late = detail == "killed"
    return WorldRow(
        world=world,
        seed=seed,
        outcome=HANG if is_late else GUARD,
        changes="other",
        end="time" if is_late else "error",
        detail=detail,
        steps=0,
        sent=0,
        wrong_sent=0,
    )


def worst(rows: Sequence[WorldRow]) -> WorldRow:
    """Return the row that represents the fault: by what it changes, then by its
    outcome.
    """
    for changes, outcomes in ORDER.items():
        for outcome in outcomes:
            for row in rows:
                if row.changes == changes and row.outcome == outcome:
                    return row
    raise AssertionError(f"no rows in {rows}")


def as_json(row: WorldRow) -> dict[str, Any]:
    return asdict(row)
