"""What `launches.finish_step` packed, read on the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sglang.srt.kv_canary.kernels.records import NUM_COUNTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFindings:
    """Fields:
    verdicts: reasons per row of the forward.
    ring_entries: entries in the ring, dropped ones included.
    counters: by `records.Counter`.
    """

    verdicts: list[int]
    ring_entries: int
    counters: list[int]

    @classmethod
    def unpack(cls, packed: Tensor) -> StepFindings:
        """`packed`: what `finish_step` returned behind the tokens, on the host."""
        values = packed.tolist()
        rows = len(values) - 1 - NUM_COUNTERS
        return cls(
            verdicts=values[:rows],
            ring_entries=values[rows],
            counters=values[rows + 1 :],
        )

    @property
    def is_clean(self) -> bool:
        return self.ring_entries == 0 and not any(self.verdicts)
