"""Measurement of sides in turn on the same work, with the processor use of others.

Rounds alternate (A B, B A, ...), so that a drift of the machine affects all sides
equally. Before a side's turn the others become idle and the side warms up.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.bench_utils.machine_load import LoadWatch, MachineUsage
from sglang.bench_utils.report import Json, rate, ratio
from sglang.bench_utils.worker import BenchWorker
from sglang.bench_utils.workloads import Workload

# Thread pools may spin for a moment after their last work.
SETTLE_SECONDS = 0.3
CALIBRATION_TRIES = 2
WARM_UP = Workload(prompts=[[*range(1, 17)]], output_lens=[8], is_sequential=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A worker with `generate`, and the options that this side passes to it.

    `prepare` is called before each measurement, unmeasured.
    """

    name: str
    worker: BenchWorker
    options: Json = field(default_factory=dict)
    prepare: Callable[[], object] = lambda: None

    def generate(self, workload: Workload) -> Json:
        """Return the worker's answer after checking the lengths of its outputs.

        Raises:
            RuntimeError: the length of an output differs from the requested one.
        """
        answer: Json = self.worker.call(
            "generate",
            prompts=workload.prompts,
            output_lens=workload.output_lens,
            is_sequential=workload.is_sequential,
            **self.options,
        )
        lens = [len(output) for output in answer["outputs"]]
        if lens != workload.output_lens:
            raise RuntimeError(
                f"{self.name} generated {lens} tokens, not {workload.output_lens}"
            )
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One side, one round."""

    tok_s: float
    usage: MachineUsage
    answer: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All rounds of one scenario. `rounds` maps a side to its measurements."""

    rounds: Mapping[str, Sequence[Measurement]]

    def speeds(self, side: str) -> list[float]:
        return [m.tok_s for m in self.rounds[side]]

    def median(self, side: str) -> float:
        return statistics.median(self.speeds(side))

    def ratio(self, side: str, other: str) -> float | None:
        """Return the ratio of the two medians."""
        return ratio(self.median(side), self.median(other))

    def report(self) -> Json:
        """Return the figures of each side, and the worst disturbance by others."""
        every = [m.usage for ms in self.rounds.values() for m in ms]
        return {
            "tok_s": {name: self.median(name) for name in self.rounds},
            "rounds": {name: self.speeds(name) for name in self.rounds},
            "waiting_cores": max(usage.waiting for usage in every),
            "foreign_cores": statistics.median(usage.foreign for usage in every),
        }


class Arena:
    """Measures one side at a time on the cores that all of them are pinned to.

    Args:
        is_quick: no pauses and one try, to see that it works.
    """

    def __init__(self, cores: Collection[int], *, is_quick: bool = False) -> None:
        self._cores = cores
        self._settle_seconds = 0.0 if is_quick else SETTLE_SECONDS
        self._tries = 1 if is_quick else CALIBRATION_TRIES
        self._roots: dict[str, int] = {}

    def enter(self, worker: BenchWorker) -> None:
        """Also watch this worker."""
        self._roots[worker.name] = worker.pid

    def leave(self, worker: BenchWorker) -> None:
        del self._roots[worker.name]

    def compare(
        self,
        sides: Sequence[Side],
        make_workload: Callable[[int], Workload],
        *,
        rounds: int,
    ) -> Comparison:
        """Measure all sides on `make_workload(round)`, `rounds` times."""
        results: dict[str, list[Measurement]] = {side.name: [] for side in sides}
        for round_ in range(rounds):
            workload = make_workload(round_)
            order = sides if round_ % 2 == 0 else list(reversed(sides))
            for side in order:
                measured = self.measure(side, workload)
                results[side.name].append(measured)
                _show_progress(f"round {round_ + 1}/{rounds}", side, measured)
        return Comparison(rounds=results)

    def measure(self, side: Side, workload: Workload) -> Measurement:
        time.sleep(self._settle_seconds)
        side.generate(WARM_UP)
        side.prepare()
        watch = LoadWatch(self._roots, self._cores)
        answer = side.generate(workload)
        usage = watch.usage(side.worker.name)
        return Measurement(
            tok_s=rate(workload.num_tokens, answer["seconds"]),
            usage=usage,
            answer=answer,
        )

    def best(
        self, sides: Sequence[Side], workload: Workload
    ) -> tuple[Side, dict[str, float]]:
        """Return the fastest variant of a peer, and the best speed of each."""
        speeds = dict.fromkeys((side.name for side in sides), 0.0)
        for side in sides:
            for _ in range(self._tries):
                measured = self.measure(side, workload)
                speeds[side.name] = max(speeds[side.name], measured.tok_s)
                _show_progress("calibration", side, measured)
        return max(sides, key=lambda side: speeds[side.name]), speeds


def _show_progress(what: str, side: Side, measured: Measurement) -> None:
    print(
        f"{what}: {side.name} {measured.tok_s:.1f} tok/s, others use "
        f"{measured.usage.foreign:.2f} cores",
        file=sys.stderr,
        flush=True,
    )


def common_prefix_share(left: Sequence[Any], right: Sequence[Any]) -> float:
    """Return the share of tokens before the first difference, over pairs of outputs."""
    same = total = 0
    for a, b in zip(left, right, strict=True):
        total += len(a)
        for x, y in zip(a, b, strict=True):
            if x != y:
                break
            same += 1
    return rate(same, total)
