"""Checkpoints of recurrent state as plain data, beside a `SavedTree`."""

from __future__ import annotations

from dataclasses import dataclass

Held = tuple[int, int]
"""Position and slot of a `HeldCheckpoint`."""


@dataclass(frozen=True, kw_only=True)
class SavedStates:
    """The checkpoints of a prefix cache.

    Fields:
        free: free slots, in reverse order of reuse.
        runs: (run, slot) of each checkpoint; a run is an index in the saved tree.
        queue: (last use, run) of the runs that wait for their eviction, in order.
    """

    free: list[int]
    runs: list[tuple[int, int]]
    queue: list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class SavedHold:
    """The checkpoints of a request; fields as of `StateHold`."""

    tracked: list[Held]
    saved: Held | None
    due: Held | None

    def slots(self) -> dict[int, int]:
        """Return the slot of each checkpoint that was taken, by position."""
        saved = [] if self.saved is None else [self.saved]
        return dict([*self.tracked, *saved])
