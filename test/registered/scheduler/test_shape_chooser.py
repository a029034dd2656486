"""The choice of a shape against simulated machines: what it loses against the best
fixed shape, and how it learns of others."""

from __future__ import annotations

import itertools
import math
import operator
import random
import statistics

import pytest

from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.managers.scheduler.acceptance import Acceptance
from sglang.srt.managers.scheduler.shape_chooser import PLAIN, ShapeChooser
from sglang.srt.managers.scheduler.step_costs import StepCosts
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count, is_full

register_cpu_ci(est_time=5, suite="cpu", full_time=60)

TREE = TreeShape(topk=4, num_steps=5, num_draft_tokens=8)
LADDER = (None, TreeShape.chain(1), TreeShape.chain(3), TREE)
SIZES = (1, 4, 16, 64, 256)
# Milliseconds of a cycle of the ladder's shapes at these sizes: of an 8B model on one
# H200 (but at 256), and of a small model on two cores.
GPU = {
    1: (4.0, 4.6, 5.1, 5.6),
    4: (4.4, 4.9, 5.3, 6.2),
    16: (4.6, 5.4, 6.0, 7.4),
    64: (5.8, 7.2, 10.2, 17.5),
    256: (15.8, 24.0, 38.0, 66.0),
}
CPU = {
    1: (0.9, 1.1, 1.5, 2.3),
    4: (2.4, 3.2, 5.0, 8.6),
    16: (8.0, 12.0, 20.0, 36.0),
    64: (31.0, 48.0, 80.0, 140.0),
    256: (124.0, 192.0, 320.0, 560.0),
}

# A 1.5B model on one H200, as measured at start. While it served, iterations took
# `SMALL_REALLY` times as long, at 8 requests.
SMALL = {8: (1.52, 1.94, 2.3, 2.73), 32: (1.69, 2.48, 2.71, 3.44)}
SMALL_REALLY = (1.09, 1.0, 1.02, 0.94)

# The demo model on one core: its drafts are accepted more often the deeper they are.
DEMO = {
    1: (1.3, 2.26, 3.06, 9.0),
    4: (1.97, 3.97, 7.44, 20.0),
    16: (5.35, 12, 24.8, 60),
}
DEMO_RATES = (0.68, 0.82, 0.85, 0.85, 0.85)


class Machine:
    """Runs iterations of drafts whose best token is right with probability `rate`.

    Args:
        rate: or one of each level.
        length: tokens of requests, all of a batch at once, whose longer contexts cost
            more, up to 40 %; 0 is one endless request.
        sway: of the machine, which is slow and fast for some twenty observations.
        pauses: share of the iterations that take up to three times as long.
        is_late: whether an iteration is seen to take what the one before it did, as
            where the host takes longer than the GPU.
        costs: milliseconds as measured at start, at batches of `sizes`. really: factors
            by index, that they take while it serves.
    """

    def __init__(
        self,
        costs,
        *,
        rate,
        seed=0,
        really=(1, 1, 1, 1),
        adds=True,
        sizes=SIZES,
        sway=0.0,
        pauses=0.0,
        is_late=False,
        length=0,
    ):
        self.rate, self.rng = rate, random.Random(seed)
        measured = {n: [t / 1e3 for t in costs[n]] for n in costs}
        self.true = StepCosts(measured, adds=adds)
        self.really = really
        known = {n: measured[n] for n in sizes}
        self.chooser = ShapeChooser(LADDER, StepCosts(known, adds=adds))
        self.counts = [0] * len(LADDER)
        self.sway, self.slow, self.pauses = sway, 0.0, pauses
        self.is_late, self.before = is_late, None
        self.length, self.done, self.behind = length, 0.0, 0

    def seconds(self, index, rows):
        return self.true.measured(index, rows) * self.really[index]

    def rates(self, shape):
        """Return the probability of each level."""
        others = (shape.num_draft_tokens - 1) / shape.num_steps - 1
        best = self.rate
        if isinstance(best, float):
            best = (best,) * shape.num_steps
        return [1 - (1 - rate) * 0.65**others for rate in best[: shape.num_steps]]

    def accepted(self, shape):
        count, rates = 0, self.rates(shape)
        while count < shape.num_steps and self.rng.random() < rates[count]:
            count += 1
        return count

    def run(self, rows, seconds):
        """Return tokens per second and request over that time."""
        spent = tokens = 0.0
        while spent < seconds:
            index = self.chooser.choose(rows, lambda: self.behind)
            self.counts[index] += 1
            took = self.seconds(index, rows)
            spent += took
            shape = LADDER[index]
            accepted = []
            if shape is not None:
                accepted = [self.accepted(shape) for _ in range(rows)]
                tokens += sum(accepted) / rows
            tokens += 1
            self.done += 1 + sum(accepted) / rows
            is_first = False
            if self.length:
                self.behind = self.behind + rows if shape is None else 0
                if self.done >= self.length:
                    self.done, self.behind, is_first = 0.0, 0, True
                    self.chooser.on_begun(rows)
                took *= 0.8 + 0.4 * self.done / self.length
            seen, self.before = self.before if self.is_late else took, took
            noisy = (seen or took) * self.rng.uniform(0.97, 1.05)
            if self.sway:
                self.slow = 0.95 * self.slow + self.rng.gauss(0, 0.3 * self.sway)
                noisy *= math.exp(self.slow)
            if self.rng.random() < self.pauses:
                noisy *= self.rng.uniform(1.3, 3.0)
            self.chooser.observe(
                index, accepted, rows=rows, seconds=None if is_first else noisy
            )
        return tokens / spent

    def share(self, rows, seconds):
        """Run, and return the expected speed of the shapes chosen over the best's."""
        self.counts = [0] * len(LADDER)
        self.run(rows, seconds)
        spent = sum(n * self.seconds(i, rows) for i, n in enumerate(self.counts))
        gained = sum(n * self.gain(LADDER[i]) for i, n in enumerate(self.counts))
        return gained / spent / self.best(rows)

    def best(self, rows):
        """Return the greatest tokens per second and request of a fixed shape."""
        return max(
            self.gain(shape) / self.seconds(index, rows)
            for index, shape in enumerate(LADDER)
        )

    def gain(self, shape):
        if shape is None:
            return 1.0
        return 1.0 + sum(itertools.accumulate(self.rates(shape), operator.mul))


@pytest.mark.parametrize("rows", SIZES if is_full() else (1, 16, 64))
@pytest.mark.parametrize(
    "rate", [0.05, 0.3, 0.6, 0.8, 0.95] if is_full() else [0.3, 0.8]
)
@pytest.mark.parametrize("costs", [GPU, CPU], ids=["gpu", "cpu"])
def test_at_most_three_percent_slower_than_the_best(costs, rate, rows):
    machine = Machine(costs, rate=rate, seed=rows)
    settle = 300 * machine.seconds(PLAIN, rows)
    machine.run(rows, settle)
    assert machine.share(rows, count(ci=3, full=20) * settle) > 0.97, machine.counts


def test_what_only_a_longer_draft_shows_is_tried_soon():
    """Drafts of one token lose 3 % here and those of three gain 15 %, which the first
    do not show: known after some 150 tokens, and then at other batch sizes too."""
    shares = []
    for seed in range(16):
        machine = Machine(
            DEMO, rate=DEMO_RATES, seed=seed, adds=False, sizes=(1, 4, 16)
        )
        machine.run(1, 0.15)
        shares.append(machine.share(1, 0.6))
        assert machine.share(16, 2.0) > 0.97, machine.counts
    assert statistics.mean(shares) > 0.985, shares


def test_requests_that_begin_make_no_shape_look_fast():
    """All contexts of a batch become short at once, just when drafts need not catch
    up and are tried."""
    shares = []
    for seed in range(8):
        machine = Machine(
            DEMO, rate=0.8, seed=seed, adds=False, sizes=(1, 4, 16), length=160
        )
        machine.run(4, 2.0)
        shares.append(machine.share(4, 4.0))
    assert min(shares) > 0.97, shares


@pytest.mark.parametrize("costs", [GPU, CPU], ids=["gpu", "cpu"])
def test_a_machine_that_is_now_slow_and_now_fast(costs):
    """By a fifth, as beside other processes: shapes that ran at different times are
    compared all the same."""
    shares = []
    for rate, seed in itertools.product([0.2, 0.4, 0.6], range(6)):
        machine = Machine(costs, rate=rate, seed=seed, adds=costs is GPU, sway=0.2)
        settle = 300 * machine.seconds(PLAIN, 4)
        machine.run(4, settle)
        shares.append(machine.share(4, 3 * settle))
    assert statistics.mean(shares) > 0.975, shares


def test_pauses_make_no_shape_look_dear():
    """What a shape costs beside the one that runs stays known while it does not run."""
    shares = []
    for rate, seed in itertools.product([0.05, 0.2, 0.4], range(8)):
        machine = Machine(
            SMALL, rate=rate, seed=seed, really=SMALL_REALLY, sizes=(8,), pauses=0.02
        )
        machine.run(8, 0.6)
        shares.append(machine.share(8, 1.0))
    assert statistics.mean(shares) > 0.98, shares
    assert statistics.quantiles(shares, n=10)[0] > 0.955, shares


def test_a_change_of_shape_tells_nothing_about_either():
    shares = []
    for rate, seed in itertools.product([0.05, 0.2, 0.3], range(8)):
        machine = Machine(
            SMALL, rate=rate, seed=seed, really=SMALL_REALLY, sizes=(8,), is_late=True
        )
        machine.run(8, 0.6)
        shares.append(machine.share(8, 1.0))
    assert statistics.mean(shares) > 0.985, shares


@pytest.mark.parametrize(
    ("before", "after"), [(0.1, 0.9), (0.3, 0.8), (0.8, 0.3), (0.9, 0.1)]
)
@pytest.mark.parametrize(("rows", "seconds"), [(1, 20.0), (16, 2.0), (64, 2.0)])
def test_another_text_is_noticed(before, after, rows, seconds):
    machine = Machine(GPU, rate=before)
    machine.run(rows, 5.0)
    machine.rate = after
    machine.run(rows, seconds)
    assert machine.share(rows, 5.0) > 0.96, machine.counts


@pytest.mark.parametrize("really", [(1, 1.5, 1.5, 1.5), (1, 1, 1, 0.6)])
def test_costs_that_were_measured_badly_are_corrected(really):
    machine = Machine(GPU, rate=0.6, really=really)
    machine.run(16, 8.0)
    assert machine.share(16, 8.0) > 0.96, machine.counts


@pytest.mark.parametrize("rate", [0.3, 0.8])
@pytest.mark.parametrize("sizes", [(1,), (1, 4), (1, 4, 16)])
def test_sizes_that_were_not_measured_are_learned(sizes, rate):
    machine = Machine(GPU, rate=rate, sizes=sizes)
    machine.run(16, 4.0)
    machine.rate = 0.8
    machine.run(4, 4.0)
    machine.rate = rate
    machine.run(64, 8.0)
    assert machine.share(64, 8.0) > 0.97, machine.counts


def test_a_chain_tells_about_a_tree_and_back():
    chain, tree = TreeShape.chain(3), TREE
    for rate in (0.2, 0.5, 0.8):
        machine = Machine(GPU, rate=rate)
        for known, other in ((chain, tree), (tree, chain)):
            acceptance = Acceptance(LADDER[1:])
            for _ in range(400):
                acceptance.observe(known, [machine.accepted(known)])
            assert acceptance.expected(known) == pytest.approx(
                machine.gain(known), rel=0.15
            )
            assert acceptance.expected(other) == pytest.approx(
                machine.gain(other), rel=0.3
            )


def test_catching_up_must_pay_off():
    """At a size where drafting gains little, requests far behind stay plain."""
    machine = Machine(GPU, rate=0.3)
    chooser = machine.chooser
    for _ in range(400):
        chooser.observe(1, [machine.accepted(LADDER[1])], rows=16, seconds=None)
    speeds = chooser.speeds(16)
    assert max(speeds) > 1.02 * speeds[PLAIN]
    assert chooser.choose(16, lambda: 10**6) == PLAIN
    again = ShapeChooser(LADDER, chooser.costs)
    again.acceptance = chooser.acceptance
    assert again.choose(16, lambda: 0) != PLAIN


def test_what_catching_up_takes_is_learned():
    """Not as a part of the shape's own time."""
    chooser = Machine(GPU, rate=0.6).chooser
    feared = chooser._catch_up_seconds(16, 800)
    cost = chooser.costs.expected(1, 16)
    plain = chooser.costs.expected(PLAIN, 16)
    for _ in range(8):
        # The host may launch it in the time of the iteration before.
        chooser.observe(PLAIN, (), rows=16, seconds=plain + feared / 5)
        chooser.observe(1, [1] * 16, rows=16, seconds=cost + feared / 20, caught_up=800)
        chooser.observe(1, [1] * 16, rows=16, seconds=cost)
    assert chooser._catch_up_seconds(16, 800) == pytest.approx(feared / 4)
    assert chooser.costs.expected(1, 16) == cost
    chooser.observe(1, [1] * 16, rows=16, seconds=cost + 99.0, caught_up=800)
    chooser.observe(1, [1] * 16, rows=16, seconds=cost)
    assert chooser._catch_up_seconds(16, 800) < feared


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
