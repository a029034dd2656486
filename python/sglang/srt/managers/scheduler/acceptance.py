"""What was accepted lately of drafts of each shape, and what of others would be.

Level j of a draft is reached if all before it were accepted, and passed if its token is
too. Chains of all lengths share the rates of their levels; each tree has its own. Where
a shape was not tried lately, its rates follow from another shape's: a level is passed
by the draft's best token with some rate, and by the next best one in a share of at
most `NEXT_BEST` of what is left, and so on. The tree of the likeliest paths then gains
the sum of their probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import TreeShape

MEMORY, MEMORY_OF_BATCHES = 300.0, 50.0
"""An older draft of a shape counts 1/e after so many drafts, but not before so many
iterations: a large batch makes 300 drafts in ten, which tell too little."""
MEMORY_OF_ITERATIONS = 600.0
"""Iterations, with drafts of any shape or without, after which it does too."""
RECALLED = 50.0
"""When a shape is tried again after a pause, its older drafts count as at most so many,
so that the trial can tell."""
MEMORY_OF_OTHERS = 100.0
"""Iterations after which what a shape's own drafts showed counts 1/e beside what newer
drafts of another shape show: the text may have changed."""
TRUSTED = 12.0
"""Drafts of a shape that count as much as what follows from other shapes."""
FIRST_RATE = 0.6
"""Rate of a draft of which nothing is known."""
NEXT_BEST = 0.35
"""Share of the wrong best tokens after which the next best is right, if the best is no
worse."""
STEPS_OF_RATES = 32


@dataclass(slots=True, kw_only=True)
class _Levels:
    """Decayed counts by level."""

    reached: list[float] = field(default_factory=list)
    passed: list[float] = field(default_factory=list)
    iteration: int = 0
    seen_at: int = 0

    @property
    def weight(self) -> float:
        return self.reached[0] if self.reached else 0.0

    def age(self, iteration: int) -> None:
        """Let the counts decay up to this iteration."""
        self._keep((1.0 - 1.0 / MEMORY_OF_ITERATIONS) ** (iteration - self.iteration))
        self.iteration = iteration

    def limit(self, most: float) -> None:
        """Let all that was seen count as this many drafts at most."""
        if self.weight > most:
            self._keep(most / self.weight)

    def _keep(self, share: float) -> None:
        self.reached = [share * count for count in self.reached]
        self.passed = [share * count for count in self.passed]

    def add(self, accepted: Sequence[int], num_steps: int) -> None:
        missing = num_steps - len(self.reached)
        self.reached += [0.0] * missing
        self.passed += [0.0] * missing
        memory = max(MEMORY, MEMORY_OF_BATCHES * len(accepted))
        keep = (1.0 - 1.0 / memory) ** len(accepted)
        for level in range(num_steps):
            reached = sum(count >= level for count in accepted)
            passed = sum(count > level for count in accepted)
            self.reached[level] = keep * self.reached[level] + reached
            self.passed[level] = keep * self.passed[level] + passed

    def rates(self, num_steps: int) -> list[float]:
        """The rate of each level. One that was rarely reached is like the one before
        it."""
        found, before = [], FIRST_RATE
        for level in range(num_steps):
            reached = passed = 0.0
            if level < len(self.reached):
                reached, passed = self.reached[level], self.passed[level]
            before = (passed + 4.0 * before) / (reached + 4.0)
            found.append(before)
        return found


class Acceptance:
    """The acceptance of the shapes of a ladder.

    Args:
        shapes: of drafts.
    """

    def __init__(self, shapes: Sequence[TreeShape]) -> None:
        chains = _Levels()
        self._levels = {
            shape: chains if shape.topk == 1 else _Levels() for shape in shapes
        }
        self._iteration = 0

    def observe(self, shape: TreeShape | None, accepted: Sequence[int]) -> None:
        """Count an iteration, and its drafts, of which these numbers of tokens were
        accepted; None if it was plain."""
        self._iteration += 1
        if shape is not None and accepted:
            levels = self._levels[shape]
            levels.age(self._iteration)
            if levels.seen_at < self._iteration - 1:
                levels.limit(RECALLED)
            levels.add(accepted, shape.num_steps)
            levels.seen_at = self._iteration

    def expected(self, shape: TreeShape) -> float:
        """Return the tokens that an iteration of this shape gains, with the bonus."""
        for levels in self._levels.values():
            levels.age(self._iteration)
        own = self._levels[shape]
        of_own = _gain_of_levels(own.rates(shape.num_steps))
        others = [
            (self._evidence(levels), other)
            for other, levels in self._levels.items()
            if levels is not own
        ]
        evidence, other = max(others, key=lambda each: each[0], default=(0.0, None))
        if other is None or not evidence:
            return of_own
        known = self._evidence(own)
        trust = known / (known + TRUSTED * evidence / (evidence + TRUSTED))
        return trust * of_own + (1.0 - trust) * self._inferred(shape, other)

    def _evidence(self, levels: _Levels) -> float:
        """Return the number of drafts that tell about the present text."""
        newest = max(each.seen_at for each in self._levels.values())
        return min(levels.weight, MEMORY) * math.exp(
            (levels.seen_at - newest) / MEMORY_OF_OTHERS
        )

    def _inferred(self, shape: TreeShape, other: TreeShape) -> float:
        """Infer a shape's gain from another one's."""
        levels = self._levels[other]
        rates = levels.rates(max(shape.num_steps, other.num_steps))
        if other.topk == 1:
            return _gain_of_tree(shape, tuple(round(rate, 2) for rate in rates))
        gain = _gain_of_levels(rates[: other.num_steps])
        rate = _rate_of(other, round(gain, 2))
        return _gain_of_tree(shape, (rate,) * shape.num_steps)


def _gain_of_levels(rates: Sequence[float]) -> float:
    gain = path = 1.0
    for rate in rates:
        path *= rate
        gain += path
    return gain


@lru_cache(maxsize=1024)
def _gain_of_tree(shape: TreeShape, rates: tuple[float, ...]) -> float:
    """Return the gain of a tree if its best token is right at these rates by level."""
    kept, candidates = [1.0], []
    for rate in rates[: shape.num_steps]:
        ranks, left, right = [], 1.0, rate
        for _ in range(shape.topk):
            ranks.append(left * right)
            left, right = left * (1.0 - right), min(rate, NEXT_BEST)
        level = sorted((p * rank for p in kept for rank in ranks), reverse=True)
        candidates += level
        kept = level[: shape.topk]
    candidates.sort(reverse=True)
    return 1.0 + sum(candidates[: shape.num_draft_tokens - 1])


@lru_cache(maxsize=1024)
def _rate_of(shape: TreeShape, gain: float) -> float:
    """Return the rate of the best token at which a tree has this gain."""
    return max(
        (i / STEPS_OF_RATES for i in range(STEPS_OF_RATES + 1)),
        key=lambda rate: -abs(_gain_of_tree(shape, (rate,) * shape.num_steps) - gain),
    )
