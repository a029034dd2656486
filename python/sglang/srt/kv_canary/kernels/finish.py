"""What a forward found, as it travels to the host.

Findings are int64 [STATUS_WORDS + R]: entries in the ring, counters, then the verdicts
of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.kv_canary.kernels.records import NUM_COUNTERS

STATUS_WORDS = 1 + NUM_COUNTERS
"""Words of findings before the verdicts."""


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
    def unpack(cls, words: list[int]) -> StepFindings:
        """`words`: findings, on the host."""
        return cls(
            verdicts=words[STATUS_WORDS:],
            ring_entries=words[0],
            counters=words[1:STATUS_WORDS],
        )

    @property
    def is_clean(self) -> bool:
        return self.ring_entries == 0 and not any(self.verdicts)
