"""The divergence report: proof that windows were at work while nothing was found.

Every N launches one line, `kv_canary_swa_divergence={json}`:

* `full_elements`, `swa_elements`: verified in each group since the start;
* `rows`: of the forward that follows, and of their tokens
  `inside_window`: those that it reads in the window group,
  `outside_window`: those that only full layers read,
  `differing_slots`: those inside whose window slot has another number than the slot;
* `stale_mappings`: entries of the mapping on the device that are not the host's.

For tests: each report waits for the device.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from kv_canary.records import Counter

if TYPE_CHECKING:
    from kv_canary.state import CanaryState
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.kv_canary.groups import WindowGroup
    from sglang.srt.kv_canary.single_forward_manager.manager import CanaryTarget

logger = logging.getLogger(__name__)

MARK = "kv_canary_swa_divergence="


class SwaDivergence:
    """Reports every `every` launches."""

    def __init__(self, target: CanaryTarget, group: WindowGroup, *, every: int) -> None:
        self._target = target
        self._group = group
        self._every = every
        self._launches = 0

    def on_launch(self, forward_batch: ForwardBatch) -> None:
        """Count a launch, before it runs; log the report if it is due."""
        self._launches += 1
        if self._launches % self._every == 0:
            values = self.values(forward_batch)
            logger.info("%s%s", MARK, json.dumps(values, separators=(",", ":")))

    def values(self, forward_batch: ForwardBatch) -> dict[str, int]:
        """The numbers of a report, about a forward that has not run yet."""
        windows, pool = self._group.slots, self._target.req_to_token_pool
        mapping = windows.mapping.cpu()
        inside = outside = differing = rows = 0
        for row, length in zip(
            forward_batch.req_pool_indices.tolist(),
            forward_batch.prefix_lens.tolist(),
            strict=True,
        ):
            if not row:
                continue
            rows += 1
            begin = max(length - windows.window + 1, 0)
            slots = pool.row_slots(row, begin, length)
            inside += len(slots)
            outside += begin
            differing += int((mapping[slots] != slots).sum())
        return {
            "launch": self._launches,
            "full_elements": _verified(self._target.buffers.state),
            "swa_elements": _verified(self._group.state),
            "rows": rows,
            "inside_window": inside,
            "outside_window": outside,
            "differing_slots": differing,
            "stale_mappings": int((mapping != windows.expected_mapping()).sum()),
        }


def _verified(state: CanaryState) -> int:
    return int(state.counters[Counter.VERIFIED_SLOTS])
