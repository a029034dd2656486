"""Size limits of the canary's launches, fixed at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kv_canary.records import RECORD_WORDS, RING_WORDS
from kv_canary.state_sums import StateCells

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.mem_cache.state_pool import StateShape

WORD_BYTES = 8
# Head and tail.
RECORDS_PER_SLOT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryLaunchCapacities:
    """Sizes that a launch may not exceed.

    Fields:
        num_slots: slots of the pool, scratch page included.
        req_rows: rows of `req_to_token`, padding row included.
        max_rows: rows of one forward at most.
        ring_capacity: violations kept between two results.
        sweep_budget: slots of one sweep pass at most.
    """

    num_slots: int
    req_rows: int
    max_rows: int
    ring_capacity: int
    sweep_budget: int

    @property
    def record_bytes(self) -> int:
        """Bytes of the records of all slots (64 per slot)."""
        return self.num_slots * RECORDS_PER_SLOT * RECORD_WORDS * WORD_BYTES

    @property
    def workspace_bytes(self) -> int:
        """Bytes of everything else that stays on the device."""
        # Expected lineage and the next one, verdict, its copy in the findings.
        per_row = 3 * WORD_BYTES + WORD_BYTES // 2
        return self.req_rows * per_row + self.ring_capacity * RING_WORDS * WORD_BYTES

    def check(self, forward_batch: ForwardBatch) -> None:
        """Refuse a forward that is too large to be checked whole.

        Raises:
            RuntimeError: it has more rows than `max_rows`.
        """
        bs = forward_batch.batch_size
        if bs > self.max_rows:
            raise RuntimeError(
                f"a forward of {bs} rows, but the KV canary was set up for "
                f"{self.max_rows}"
            )


def bytes_per_slot() -> int:
    """Return the bytes that the canary adds to each KV slot."""
    return RECORDS_PER_SLOT * RECORD_WORDS * WORD_BYTES


def bytes_per_state(shape: StateShape, *, keeps_sums: bool) -> int:
    """Return the bytes that the canary adds to each slot of recurrent state: records,
    and, if all bytes are compared, sums and a mark of each layer."""
    if not keeps_sums:
        return bytes_per_slot()
    sizes = (size for size in (shape.conv_size, shape.matrix_size) if size is not None)
    states = (torch.empty(1, *size, device="meta") for size in sizes)
    sums = sum(StateCells.of(state).number for state in states) * torch.int64.itemsize
    return bytes_per_slot() + len(shape.layers) * (sums + torch.int32.itemsize)
