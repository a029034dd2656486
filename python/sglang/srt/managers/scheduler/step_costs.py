"""Seconds of an iteration by shape and batch size: measured before the engine is ready,
then observed while it serves.
"""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NO_SHAPE = -1
SETTLING = 8
"""Observations after a change that tell what a shape costs beside the others; later
ones tell what changes for all, such as longer contexts."""
COMPARED = 15
"""Of these a shape keeps the newest, and their median counts."""
OUTLIER = 0.2
"""A later observation counts as at most this much above or below what is due."""
LEVEL_WEIGHT = 0.025
"""Weight of an observation in what has changed for all."""
LATELY = 3
"""Observations whose median tells how slow the machine is just now."""
STALE = 400
"""Observations in a size class after which a shape's own are out of date."""


def size_class(rows: int) -> int:
    """Return the class of batch sizes that `rows` belongs to: powers of two."""
    return max(rows, 1).bit_length()


@dataclass(slots=True, kw_only=True)
class _Observed:
    """What a shape costs more than was measured, beside what all do.

    Fields:
        found: newest observations: seconds, or factors. more: their median.
        at: number of the newest observation in its size class.
    """

    more: float
    found: deque[float] = field(default_factory=lambda: deque(maxlen=COMPARED))
    at: int = 0


@dataclass(slots=True, kw_only=True)
class _SizeClass:
    """The observations of batches of similar sizes.

    Fields:
        shapes: by index. level: what all cost more than was measured. lately: newest
            observations of that, by shape `reference`, with which others are compared.
        current, in_a_row: the newest index, and how often it was observed since the
            last change. count: of all observations.
    """

    level: float
    lately: deque[float] = field(default_factory=lambda: deque(maxlen=LATELY))
    reference: int = NO_SHAPE
    shapes: dict[int, _Observed] = field(default_factory=dict)
    current: int = NO_SHAPE
    in_a_row: int = 0
    count: int = 0


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
        self._adds, self._neutral = adds, 0.0 if adds else 1.0
        self._at_sizes: dict[tuple[int, int], float] = {}
        self._classes: dict[int, _SizeClass] = {}

    def measured(self, index: int, rows: int) -> float:
        """Return what was measured, interpolated or extended between batch sizes, once
        for each."""
        key = index, rows
        if key not in self._at_sizes:
            self._at_sizes[key] = self._interpolate(index, rows)
        return self._at_sizes[key]

    def _interpolate(self, index: int, rows: int) -> float:
        sizes, costs = self._sizes, [each[index] for each in self._measured]
        if len(sizes) == 1:
            return costs[0]
        at = min(max(bisect.bisect_left(sizes, rows), 1), len(sizes) - 1)
        left, right = sizes[at - 1], sizes[at]
        slope = (costs[at] - costs[at - 1]) / (right - left)
        return max(costs[at - 1] + slope * (rows - left), costs[0] / 2)

    def is_known(self, index: int, rows: int) -> bool:
        """Whether this shape was lately observed at such a batch size."""
        of_class = self._classes.get(size_class(rows))
        own = None if of_class is None else of_class.shapes.get(index)
        return (
            own is not None and of_class is not None and own.at + STALE > of_class.count
        )

    def expected(self, index: int, rows: int) -> float:
        """Return the seconds that an iteration will take."""
        of_class = self._classes.get(size_class(rows))
        if of_class is None:
            return self.measured(index, rows)
        return self._cost(of_class, index, rows)

    def observe(self, index: int, rows: int, seconds: float) -> None:
        """Learn that iterations took `seconds` each."""
        size = size_class(rows)
        if size not in self._classes:
            self._classes[size] = _SizeClass(level=self._neutral)
        of_class = self._classes[size]
        own = of_class.shapes.setdefault(index, _Observed(more=self._neutral))
        if of_class.current != index:
            of_class.current, of_class.in_a_row = index, 0
        of_class.in_a_row += 1
        of_class.count += 1
        own.at = of_class.count
        more = self._beyond(seconds, self.measured(index, rows))
        is_another = of_class.reference not in (NO_SHAPE, index)
        if is_another and of_class.in_a_row <= SETTLING:
            # So a shape that runs while the machine is slow does not look slower.
            own.found.append(self._beyond(more, statistics.median(of_class.lately)))
            own.more = statistics.median(own.found)
            return
        of_class.reference = index
        of_class.lately.append(self._beyond(more, own.more))
        if of_class.count <= LATELY:
            of_class.level = statistics.median(of_class.lately)
            return
        due = self._cost(of_class, index, rows)
        # A pause of the machine says nothing about a shape.
        near = min(max(seconds, due * (1.0 - OUTLIER)), due * (1.0 + OUTLIER))
        if self._adds:
            of_class.level += LEVEL_WEIGHT * (near - due)
        else:
            of_class.level *= 1.0 + LEVEL_WEIGHT * (near / due - 1.0)

    def _beyond(self, value: float, other: float) -> float:
        return value - other if self._adds else value / other

    def _cost(self, of_class: _SizeClass, index: int, rows: int) -> float:
        own = of_class.shapes.get(index)
        if own is not None:
            return self._with(of_class, index, rows, own.more)
        others = of_class.shapes
        if not others:
            return self._with(of_class, index, rows, self._neutral)
        # As much more as the others on average, and no more than any larger one.
        mean = statistics.fmean(other.more for other in others.values())
        larger = (
            self._with(of_class, i, rows, other.more)
            for i, other in others.items()
            if i > index
        )
        return min([self._with(of_class, index, rows, mean), *larger])

    def _with(self, of_class: _SizeClass, index: int, rows: int, more: float) -> float:
        measured = self.measured(index, rows)
        if not self._adds:
            return measured * of_class.level * more
        return max(measured + of_class.level + more, measured / 4)
