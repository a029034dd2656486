"""Chooses the shape that gains most tokens per second.

Its speed is the tokens that it is expected to gain over the seconds that an iteration
takes. A choice stands until another one is clearly faster. A larger shape of which
nothing is known is tried at once if that loses little. Later, a shape that may have
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
FIRST_LOST, NEW_DRAFTS = 12.0, 64
"""Plain iterations whose time may be lost by each trial of a shape until an engine has
made so many drafts that tell about it. What is accepted hardly depends on the batch
size, and a longest chain tells about the others."""
TRIAL_ITERATIONS, TRIAL_DRAFTS = 5, 32
"""Iterations of a trial, and drafts of all requests together, at least."""
MAX_PATIENCE = 3.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Iteration:
    """An iteration that was timed.

    While one runs, the host launches the next. So where the shape changes, the times on
    both sides are mixed, and only their sum is known.

    Fields:
        follows: whether the one before was of the same shape and batch size.
    """

    index: int
    rows: int
    seconds: float
    follows: bool


@dataclass(slots=True, kw_only=True)
class _CatchUp:
    """What catching up takes, beside what as many nodes of drafts take.

    Fields:
        seconds, due: decayed sums of both.
        late, awaited: seconds that an iteration with a catch-up and the one before it
            took more than expected, and what was due for it, while the next one runs.
    """

    seconds: float = 0.0
    due: float = 0.0
    late: float = 0.0
    awaited: float = 0.0

    @property
    def ratio(self) -> float:
        """Until it was seen, a token is as dear as a node, which is too much."""
        return self.seconds / self.due if self.due else 1.0

    def end(self, late: float) -> None:
        """Note by how much the iteration after a catch-up took longer than expected."""
        # A pause of the machine is no catching up.
        seconds = min(max(self.late + late, 0.0), 2.0 * self.awaited)
        self.seconds = 0.9 * self.seconds + seconds
        self.due = 0.9 * self.due + self.awaited
        self.awaited = 0.0


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
        # Drafts that told about each shape.
        self._seen = [0] * len(self._ladder)
        self._newest: _Iteration | None = None
        self._catch_up = _CatchUp()
        self._before = PLAIN
        self._begun = 0

    def choose(self, rows: int, behind: Callable[[], int]) -> int:
        """As `ShapePolicy.choose`."""
        standing = self._standings.get(size_class(rows))
        if standing is None:
            standing = self._new_standing(rows)
        elif self._begun >= max(rows / 2, 1):
            # What their first iterations take says how others compare. A trial may have
            # been decided before.
            standing.asked, standing.left, standing.trial = 0, 0, PLAIN
        self._begun = 0
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

    def on_begun(self, rows: int) -> None:
        """Note that so many requests begin to decode: if they are most of a batch, its
        contexts have become short at once."""
        self._begun += rows

    def _new_standing(self, rows: int) -> _Standing:
        """Begin with the last choice, and with time for a first trial."""
        saved = FIRST_SAVED * self.costs.expected(self._before, rows)
        standing = _Standing(index=self._before, saved=saved)
        self._standings[size_class(rows)] = standing
        return standing

    def observe(
        self,
        index: int,
        accepted: Sequence[int],
        *,
        rows: int,
        seconds: float | None,
        caught_up: int = 0,
    ) -> None:
        """Learn from an iteration.

        Args:
            accepted: drafts of each request that were accepted; ignored if plain.
            rows: all requests of the iteration.
            seconds: that it took, if nothing else ran in between.
            caught_up: tokens of all requests that the draft caught up before.
        """
        self.acceptance.observe(self._ladder[index], accepted)
        self._count(index, len(accepted))
        before = self._newest
        if seconds is None:
            self._newest, self._catch_up.awaited = None, 0.0
            return
        follows = (
            before is not None
            and (before.index, before.rows) == (index, rows)
            and not caught_up
        )
        if before is not None and before.follows and follows:
            self.costs.observe(index, rows, before.seconds)
        newest = _Iteration(index=index, rows=rows, seconds=seconds, follows=follows)
        self._newest = newest
        if self._catch_up.awaited:
            self._catch_up.end(self._late(newest))
        if caught_up:
            late = self._late(newest) + (0.0 if before is None else self._late(before))
            self._catch_up.late = late
            self._catch_up.awaited = self._as_nodes(rows, caught_up)

    def _late(self, iteration: _Iteration) -> float:
        """Return the seconds that it took more than expected."""
        expected = self.costs.expected(iteration.index, iteration.rows)
        return iteration.seconds - expected

    def _count(self, index: int, drafts: int) -> None:
        """Note which shapes drafts of this one tell about."""
        if not self._is_new(index):
            return
        for other, shape in enumerate(self._ladder):
            if other == index or _tells(self._ladder[index], shape):
                self._seen[other] += drafts

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
        """Begin a trial of a new shape, or of another one if enough time was saved for
        it."""
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
        standing.saved = min(standing.saved, 2.0 * max(prices.values()))
        first = FIRST_LOST * self.costs.expected(PLAIN, rows)
        new = [
            other
            for other, price in prices.items()
            if other > index and self._is_new(other) and price <= first
        ]
        if new:
            trial = max(new)
            # In vain, it does not count.
            standing.patience[trial] = 0.5
        else:
            trial = min(prices, key=prices.__getitem__)
            if standing.saved < prices[trial]:
                return
            standing.saved -= prices[trial]
        standing.trial, standing.left = trial, self._trial(trial, rows)

    def _is_new(self, index: int) -> bool:
        """Whether too few drafts tell about a shape."""
        return index != PLAIN and self._seen[index] < NEW_DRAFTS

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
        return self._catch_up.ratio * self._as_nodes(rows, behind)

    def _as_nodes(self, rows: int, tokens: int) -> float:
        """Return what these tokens of all requests would take as nodes of drafts."""
        smallest = self._ladder[1]
        assert smallest is not None
        more = self.costs.expected(1, rows) - self.costs.expected(PLAIN, rows)
        return tokens * max(more, 0.0) / (rows * smallest.accept_width)


def _tells(shape: TreeShape | None, other: TreeShape | None) -> bool:
    """Whether drafts of `shape` show what `other` gains: a chain is the beginning of a
    longer one, and plain decoding gains one token."""
    if other is None:
        return True
    if shape is None or shape.topk > 1 or other.topk > 1:
        return False
    return other.num_steps <= shape.num_steps
