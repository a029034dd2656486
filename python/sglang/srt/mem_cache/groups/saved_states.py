"""Checkpoints of recurrent state as plain data, beside a `SavedTree`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class HeldCheckpoint(NamedTuple):
    """A checkpoint that a request took: its position, and the slot."""

    position: int
    slot: int


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

    tracked: list[HeldCheckpoint]
    saved: HeldCheckpoint | None
    due: HeldCheckpoint | None

    def slots(self) -> dict[int, int]:
        """Return the slot of each checkpoint that was taken, by position."""
        saved = [] if self.saved is None else [self.saved]
        return {held.position: held.slot for held in (*self.tracked, *saved)}
