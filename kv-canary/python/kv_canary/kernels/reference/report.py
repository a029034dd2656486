"""Ring entries, verdicts and phases in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kv_canary.checks import Reason
from kv_canary.findings import RING, STATUS_WORDS
from kv_canary.records import RING_WORDS, Launch, Phase, Ring, ring_tag
from kv_canary.view import NO_MANAGER

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.state import CanaryState


class Report:
    """Appends the ring entries of one launch and sets the verdicts of their rows.

    Args:
        clock_offset: added to the clock to get the forward that found the entries.
        findings: findings of the batch's rows that were gathered before this launch.
            They get the verdicts, which the next gather must not tell again.
    """

    def __init__(
        self,
        state: CanaryState,
        launch: Launch,
        manager: int,
        *,
        clock_offset: int = 0,
        findings: Tensor | None = None,
    ) -> None:
        self._findings = findings
        self._clock_offset = clock_offset
        self._state = state
        self._tag = ring_tag(launch, manager, state.pool)

    def add(self, columns: dict[Ring, Tensor]) -> None:
        """Append the entries that have a reason. Columns are [n]; a missing one is
        filled with 0, or -1 for a slot."""
        state = self._state
        bad = columns[Ring.REASONS] != 0
        n = int(bad.sum())
        if n == 0:
            return
        entries = state.ring.new_zeros(n, RING_WORDS)
        entries[:, [Ring.SLOT, Ring.EXPECTED_SLOT]] = -1
        entries[:, Ring.CLOCK] = state.clock + self._clock_offset
        entries[:, Ring.TAG] = self._tag
        for column, values in columns.items():
            entries[:, column] = values[bad]
        start = int(state.ring_count)
        free = state.ring[start:]
        free[:n] = entries[: free.shape[0]]
        state.ring_count.add_(n)
        self._set_verdicts(entries)

    def _set_verdicts(self, entries: Tensor) -> None:
        verdicts, row = self._state.verdict, Ring.REQ_ROW
        if self._findings is not None:
            verdicts, row = self._findings[STATUS_WORDS:], Ring.BATCH_ROW
            known = self._findings[RING]
            self._findings[RING] = torch.maximum(known, self._state.ring_count[0])
        for reason in Reason:
            has = (entries[:, Ring.REASONS] & reason) != 0
            hit = entries[has, row]
            verdicts[hit] |= reason

    def step_phase(self, manager: int, due: Phase, following: Phase) -> None:
        """Move the manager's phase from `due` to `following`; report and repair a
        breach."""
        if manager == NO_MANAGER:
            return
        found = self._state.phase[manager : manager + 1].to(torch.int64)
        one = torch.ones_like(found)
        self.add(
            {
                Ring.REASONS: flag(Reason.PHASE, found != due),
                Ring.POSITION: -one,
                Ring.BATCH_ROW: -one,
                Ring.EXPECTED_WORD0: one * due,
                Ring.FOUND_WORD0: found,
            }
        )
        self._state.phase[manager] = following


def flag(reason: Reason, where: Tensor) -> Tensor:
    """Return the bit of a reason, int64, where a condition holds, else 0."""
    return torch.where(where, int(reason), 0)
