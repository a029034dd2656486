"""Seconds of an iteration by shape and batch size: measured before the engine is ready,
then observed while it serves.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SETTLING = 4
"""Observations after a change that tell what a shape costs beside the others; later
ones tell what changes for all, such as longer contexts."""
SETTLING_WEIGHT, LATER_WEIGHT = 0.3, 0.05
LATELY_WEIGHT = 0.3
"""Weight of an observation in how slow the machine is just now."""
STALE = 200
"""Observations in a size class after which a shape's own are out of date."""


def size_class(rows: int) -> int:
    """Return the class of batch sizes that `rows` belongs to: powers of two."""
    return max(rows, 1).bit_length()


@dataclass(slots=True, kw_only=True)
class _Observed:
    """What a shape costs more than was measured.

    Fields:
        more: seconds, or a factor. drift: of the size class at that time.
        at: number of that observation in its size class.
    """

    more: float
    drift: float
    at: int


@dataclass(slots=True, kw_only=True)
class _SizeClass:
    """The observations of batches of similar sizes.

    Fields:
        shapes: by index. drift: what has changed for all of them. lately: what an
            iteration takes just now, of whichever shape, more than is expected of it.
        current, in_a_row: the newest index, and how often it was observed since the
            last change. count: of all observations.
    """

    drift: float
    lately: float
    shapes: dict[int, _Observed] = field(default_factory=dict)
    current: int = -1
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
        self._adds = adds
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
        measured = self.measured(index, rows)
        of_class = self._classes.get(size_class(rows))
        if of_class is None:
            return measured
        return self._with(measured, self._more(of_class, index))

    def observe(self, index: int, rows: int, seconds: float) -> None:
        """Learn that iterations took `seconds` each."""
        size, neutral = size_class(rows), 0.0 if self._adds else 1.0
        if size not in self._classes:
            self._classes[size] = _SizeClass(drift=neutral, lately=neutral)
        of_class = self._classes[size]
        measured, before = self.measured(index, rows), self._more(of_class, index)
        if of_class.count:
            due = self._with(measured, before)
            # A pause of the machine says nothing about a shape.
            seconds = min(max(seconds, due / 2), due * 2)
        if of_class.current != index:
            of_class.current, of_class.in_a_row = index, 0
        of_class.in_a_row += 1
        of_class.count += 1
        more = seconds - measured if self._adds else seconds / measured
        is_new = index not in of_class.shapes
        is_settling = is_new or of_class.in_a_row <= SETTLING
        if is_settling:
            # So a shape that runs while the machine is slow does not look slower.
            more = more - of_class.lately if self._adds else more / of_class.lately
        else:
            lately = more - before if self._adds else more / before
            of_class.lately += LATELY_WEIGHT * (lately - of_class.lately)
        weight = SETTLING_WEIGHT if is_settling else LATER_WEIGHT
        now = before + (1.0 if is_new else weight) * (more - before)
        if not is_settling:
            of_class.drift += (
                now - before if self._adds else of_class.drift * (now / before - 1.0)
            )
        of_class.shapes[index] = _Observed(
            more=now, drift=of_class.drift, at=of_class.count
        )

    def _more(self, of_class: _SizeClass, index: int) -> float:
        """Return what a shape costs more now. If it was not observed, as much as the
        others do on average."""
        own, drift = of_class.shapes.get(index), of_class.drift
        if own is not None:
            return self._now(own, drift)
        if not of_class.shapes:
            return 0.0 if self._adds else 1.0
        found = [self._now(each, drift) for each in of_class.shapes.values()]
        return sum(found) / len(found)

    def _now(self, each: _Observed, drift: float) -> float:
        if self._adds:
            return each.more + drift - each.drift
        return each.more * drift / each.drift

    def _with(self, measured: float, more: float) -> float:
        if not self._adds:
            return measured * more
        return max(measured + more, measured / 4)
