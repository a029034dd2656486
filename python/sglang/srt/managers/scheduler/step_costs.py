"""Seconds of an iteration by shape and batch size: measured before the engine is ready,
corrected by what is seen while it serves.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

SETTLING = 4
"""Observations after a change that tell what a shape costs beside the others; later
ones tell what has changed for all, such as longer contexts."""
OWN_WEIGHT, COMMON_WEIGHT = 0.1, 0.05
FORGET = 1e-3
"""Share of a shape's own correction that is forgotten at an observation: without this,
noise would move those of the shapes that are seen away from the others."""


def size_class(rows: int) -> int:
    """Return the class of batch sizes that `rows` belongs to: powers of two."""
    return max(rows, 1).bit_length()


class StepCosts:
    """The costs of the shapes of a ladder.

    Args:
        measured: seconds of each index of the ladder, by number of requests.
        adds: whether what changes for all shapes is added to their costs, as on a GPU,
            where a longer context is read once for all nodes. On a CPU it multiplies
            them.
    """

    def __init__(self, measured: Mapping[int, Sequence[float]], *, adds: bool) -> None:
        self._sizes = sorted(measured)
        self._measured = [list(measured[size]) for size in self._sizes]
        self._adds = adds
        # By size class: common correction; by (index, size class): own factor.
        self._common: dict[int, float] = {}
        self._own: dict[tuple[int, int], float] = {}
        self._current: tuple[int, int] | None = None
        self._seen = 0

    def measured(self, index: int, rows: int) -> float:
        """Return what was measured, interpolated or extended between batch sizes."""
        sizes, costs = self._sizes, [each[index] for each in self._measured]
        if len(sizes) == 1:
            return costs[0] * max(rows / sizes[0], 1.0)
        at = min(max(bisect.bisect_left(sizes, rows), 1), len(sizes) - 1)
        left, right = sizes[at - 1], sizes[at]
        slope = (costs[at] - costs[at - 1]) / (right - left)
        return max(costs[at - 1] + slope * (rows - left), costs[0] / 2)

    def expected(self, index: int, rows: int) -> float:
        """Return the seconds that an iteration will take."""
        size = size_class(rows)
        base = self.measured(index, rows) * self._own.get((index, size), 1.0)
        common = self._common.get(size)
        if common is None:
            return base
        return max(base + common, base / 4) if self._adds else base * common

    def observe(self, index: int, rows: int, seconds: float) -> None:
        """Correct the costs: iterations took `seconds` each."""
        size = size_class(rows)
        due = self.expected(index, rows)
        # A pause of the machine says nothing about a shape.
        seconds = min(max(seconds, due / 2), due * 2)
        if self._current != (index, size):
            self._current, self._seen = (index, size), 0
        self._seen += 1
        for each in self._own:
            if each[1] == size:
                self._own[each] += FORGET * (1.0 - self._own[each])
        measured = self.measured(index, rows)
        own = self._own.get((index, size), 1.0)
        neutral = 0.0 if self._adds else 1.0
        common = self._common.get(size, neutral)
        if size in self._common and self._seen <= SETTLING:
            target = (seconds - common if self._adds else seconds / common) / measured
            own += OWN_WEIGHT * (min(max(target, 0.5), 2.0) - own)
            self._own[index, size] = own
            return
        base = measured * own
        target = seconds - base if self._adds else seconds / base
        weight = COMMON_WEIGHT if size in self._common else 1.0
        self._common[size] = common + weight * (target - common)
