"""One step's input, the same on every tensor parallel rank.

Rank 0 receives and decides; the others follow in the same order. Knows nothing about
the meaning of messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.messages.io_struct import (
    GrammarDecision,
    StepInput,
    TierDecision,
    decode_step_input,
    encode,
)

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import TensorParallelGroup
    from sglang.srt.managers.scheduler.scheduler_io import SchedulerIO


class StepInputs:
    """Broadcasts rank 0's messages and decisions to every rank, once per step.

    Args:
        io: where rank 0 receives messages; unused on other ranks.
        group: the ranks.
    """

    def __init__(self, io: SchedulerIO, group: TensorParallelGroup) -> None:
        self._io = io
        self._group = group
        self._history = 0

    def next(
        self,
        *,
        wait_ms: int,
        grammars: list[GrammarDecision],
        tiers: TierDecision | None = None,
        shape: int = 0,
    ) -> StepInput:
        """Begin a step. Rank 0 waits at most `wait_ms` for messages, the others wait
        for rank 0.

        Args:
            grammars, tiers, shape: rank 0's decisions.

        Raises:
            RuntimeError: the ranks' earlier steps differ.
        """
        if self._group.is_leader:
            step = StepInput(
                requests=self._io.recv(wait_ms=wait_ms),
                grammars=grammars,
                tiers=tiers,
                shape=shape,
                history=self._history,
            )
            if self._group.size > 1:
                self._group.broadcast_bytes(encode(step))
            return step
        step = decode_step_input(self._group.broadcast_bytes(None))
        if step.history != self._history:
            raise RuntimeError(
                f"tensor parallel rank {self._group.rank} has diverged from rank 0"
            )
        return step

    @property
    def are_compared(self) -> bool:
        """Whether there are other ranks, whose digests must match."""
        return self._group.size > 1

    def remember(self, *facts: int) -> None:
        """Add small facts about the step to the digest that the ranks compare."""
        # Integer hashes are the same in every process.
        self._history = hash((self._history, *facts))
