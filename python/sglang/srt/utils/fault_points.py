"""Historical faults that `SGLANG_DEBUG_REVERT_PR` re-opens at a named place.

A test then proves that a check sees them. All are memory-safe: nothing outside the
engine's own buffers is ever touched.
"""

from __future__ import annotations

from sglang.srt.environ import envs

# A live request's pages are freed one step before its last forward.
EARLY_FREE = "EARLY_FREE"
# Draft positions are incremented before the draft forward instead of after it.
EARLY_POSITIONS = "25015"
# The draft's last token of a chunk that does not end the prompt is the sampled one.
SAMPLED_TAIL = "26329"
# Rows are widened by the draft tokens only, not by the reserve.
NARROW_ROWS = "26972"
# Index buffers of draft branches are sized without the factor top-k.
SMALL_INDEX_BUFFER = "27338"
# Draft branches list the slots of one step less than they read.
SHORT_BRANCH_TABLE = "27360"
# The draft's last token of a chunk is looked up in the prompt alone.
PROMPT_TAIL = "28254"

FAULT_POINTS = frozenset(
    {
        EARLY_FREE,
        EARLY_POSITIONS,
        SAMPLED_TAIL,
        NARROW_ROWS,
        SMALL_INDEX_BUFFER,
        SHORT_BRANCH_TABLE,
        PROMPT_TAIL,
    }
)


def reverted() -> str | None:
    """The fault point that is open, or None.

    Raises:
        ValueError: the variable names none.
    """
    name = envs.SGLANG_DEBUG_REVERT_PR.get()
    if not name:
        return None
    if name not in FAULT_POINTS:
        raise ValueError(
            f"SGLANG_DEBUG_REVERT_PR={name!r} names no fault point; choose from "
            f"{', '.join(sorted(FAULT_POINTS))}, or unset it"
        )
    return name


def is_reverted(name: str) -> bool:
    """Whether this fault point is open; to be asked at construction, not per step."""
    return reverted() == name
