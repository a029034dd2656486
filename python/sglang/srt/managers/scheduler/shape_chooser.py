"""Chooses the shape that gains most tokens per second.

Its speed is the tokens that it is expected to gain over the seconds that an iteration
takes. A choice stands until another one is clearly faster, and a shape that may have
become better is tried for a few iterations, at an expected loss of `TRYING` of the
time at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.managers.scheduler.acceptance import Acceptance
from sglang.srt.managers.scheduler.step_costs import StepCosts, size_class

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import TreeShape

PLAIN = 0
"""Index of plain decoding in every ladder."""
DECIDE_EVERY = 8
"""Iterations between two decisions."""
CLEARLY = 1.015
"""Speed-up for which the shape changes."""
TRYING = 0.004
"""Share of the time that may be lost by trying shapes."""
FIRST_SAVED = 1.0
"""Iterations whose time may be lost by the first trials at a batch size."""
TRIAL_ITERATIONS, TRIAL_DRAFTS = 4, 32
"""Iterations of a trial, and drafts of all requests together, at least."""
TIMED_TOGETHER = 2
"""Iterations whose mean time is learned at once."""
MAX_PATIENCE = 32.0
"""A trial in vain doubles what the next one of that shape must have saved, up to this
factor."""
HORIZON = 64
"""Iterations in which the catching up of drafts must pay off."""


@dataclass(slots=True, kw_only=True)
class _Standing:
    """The choice for one class of batch sizes.

    Fields:
        index: the choice. asked: iterations since the last decision.
        saved: seconds that may be lost by trying.
        patience: factor by index. trial, left: index under trial and its iterations.
    """

    index: int
    asked: int = DECIDE_EVERY
    saved: float = 0.0
    patience: dict[int, float] = field(default_factory=dict)
    trial: int = PLAIN
    left: int = 0


@dataclass(slots=True, kw_only=True)
class _Timed:
    """Iterations of one shape and size whose mean time is to be learned."""

    index: int
    rows: int
    count: int = 0
    seconds: float = 0.0


class ShapeChooser:
    """A `ShapePolicy` by measured costs and acceptance.

    Args:
        ladder: None, plain decoding, then shapes.
        costs: of the ladder's indices.
    """

    def __init__(self, ladder: Sequence[TreeShape | None], costs: StepCosts) -> None:
        self._ladder = tuple(ladder)
        self.costs = costs
        self.acceptance = Acceptance([shape for shape in ladder if shape is not None])
        self._standings: dict[int, _Standing] = {}
        self._timed = _Timed(index=PLAIN, rows=0)
        self._before = PLAIN

    def choose(self, rows: int, behind: Callable[[], int]) -> int:
        """As `ShapePolicy.choose`."""
        standing = self._standings.get(size_class(rows))
        if standing is None:
            standing = self._new_standing(rows)
        if standing.left:
            standing.left -= 1
            if not standing.left:
                standing.asked = DECIDE_EVERY
            return standing.trial
        if standing.asked < DECIDE_EVERY:
            standing.asked += 1
            return standing.index
        standing.asked = 1
        self._decide(standing, rows, behind())
        self._before = standing.index
        return standing.trial if standing.left else standing.index

    def _new_standing(self, rows: int) -> _Standing:
        """Begin with the last choice, and with time for a first trial."""
        saved = FIRST_SAVED * self.costs.expected(self._before, rows)
        standing = _Standing(index=self._before, saved=saved)
        self._standings[size_class(rows)] = standing
        return standing

    def observe(
        self, index: int, accepted: Sequence[int], *, rows: int, seconds: float | None
    ) -> None:
        """Learn from an iteration.

        Args:
            accepted: drafts of each request that were accepted; ignored if plain.
            rows: all requests of the iteration.
            seconds: that it took, if nothing else ran in between.
        """
        self.acceptance.observe(self._ladder[index], accepted)
        if seconds is None:
            return
        timed = self._timed
        if timed.index != index or timed.rows != rows:
            timed = self._timed = _Timed(index=index, rows=rows)
        timed.count += 1
        timed.seconds += seconds
        if timed.count == TIMED_TOGETHER:
            self.costs.observe(index, rows, timed.seconds / timed.count)
            timed.count, timed.seconds = 0, 0.0

    def speeds(self, rows: int) -> list[float]:
        """Return the expected tokens per second and request of each index."""
        return [
            self._gain(index) / self.costs.expected(index, rows)
            for index in range(len(self._ladder))
        ]

    def _gain(self, index: int) -> float:
        shape = self._ladder[index]
        return 1.0 if shape is None else self.acceptance.expected(shape)

    def _decide(self, standing: _Standing, rows: int, behind: int) -> None:
        speeds, old = self.speeds(rows), standing.index
        standing.saved += TRYING * DECIDE_EVERY * self.costs.expected(old, rows)
        best = max(range(len(speeds)), key=speeds.__getitem__)
        ratio = speeds[best] / speeds[old]
        late = self._catch_up_seconds(rows, behind) if old == PLAIN else 0.0
        gained = HORIZON * self.costs.expected(best, rows) * (ratio - 1.0)
        if ratio > CLEARLY and gained > late:
            standing.index = best
            standing.patience.clear()
        elif standing.trial:
            patience = standing.patience.get(standing.trial, 1.0)
            standing.patience[standing.trial] = min(2.0 * patience, MAX_PATIENCE)
        standing.trial = PLAIN
        if standing.index == old:
            self._try_another(standing, rows, speeds, late)

    def _try_another(
        self, standing: _Standing, rows: int, speeds: Sequence[float], late: float
    ) -> None:
        """Begin a trial if enough time was saved for it."""
        index, prices = standing.index, {}
        for other in range(len(self._ladder)):
            if other == index or self._is_known(index, other, rows):
                continue
            slower = max(1.0 - speeds[other] / speeds[index], 0.01)
            lost = slower * self._trial(other, rows) * self.costs.expected(other, rows)
            patience = standing.patience.get(other, 1.0)
            prices[other] = patience * (lost + (0.0 if other == PLAIN else late))
        if not prices:
            return
        trial = min(prices, key=prices.__getitem__)
        standing.saved = min(standing.saved, 2.0 * max(prices.values()))
        if standing.saved >= prices[trial]:
            standing.saved -= prices[trial]
            standing.trial, standing.left = trial, self._trial(trial, rows)

    @staticmethod
    def _trial(index: int, rows: int) -> int:
        """Return the iterations of a trial: without drafts it is about costs alone."""
        drafts = 0 if index == PLAIN else TRIAL_DRAFTS // max(rows, 1)
        return max(TRIAL_ITERATIONS, drafts)

    def _is_known(self, index: int, other: int, rows: int) -> bool:
        """Whether the speed of `other` is known while `index` runs."""
        return self.costs.is_known(other, rows) and _tells(
            self._ladder[index], self._ladder[other]
        )

    def _catch_up_seconds(self, rows: int, behind: int) -> float:
        """Return what catching up takes: a token no longer than it takes as one more
        node of a draft."""
        smallest = self._ladder[1]
        assert smallest is not None
        more = self.costs.expected(1, rows) - self.costs.expected(PLAIN, rows)
        return behind * max(more, 0.0) / (rows * smallest.accept_width)


def _tells(shape: TreeShape | None, other: TreeShape | None) -> bool:
    """Whether drafts of `shape` show what `other` gains: a chain is the beginning of a
    longer one, and plain decoding gains one token."""
    if other is None:
        return True
    if shape is None or shape.topk > 1 or other.topk > 1:
        return False
    return other.num_steps <= shape.num_steps
