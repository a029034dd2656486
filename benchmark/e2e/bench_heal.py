"""Healing: its cost without a fault, its effect on other requests, and the time it
takes.

python benchmark/e2e/bench_heal.py --batch-size 64 --input-len 2000

Three measurements in one process with dummy weights (or --model-path):

* steps: paired blocks of decode steps in the modes `raise` and `heal`, no fault.
* bystanders: times between two tokens of requests that decode, while one of them is
  damaged and recomputed, and while a prompt as long as its tokens is admitted instead.
* recovery: from the detection to the next token of the damaged request, beside the
  time that such a prompt takes to its first token among the same others.

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import bench_canary
import torch
from bench_canary import CLOCKS, Side, add_side_flags, alternate, synchronize
from model_shapes import write_shape

from sglang.bench_utils.launch import run_report
from sglang.bench_utils.report import Json, format_table, provenance

# Steps watched after a fault or a prompt.
WATCHED_STEPS = 24
P99 = 0.99


def measure_gaps(side: Side, begin: Callable[[], object]) -> list[float]:
    """Return seconds between two tokens of every decoding request, starting with
    `begin`.
    """
    scheduler = side.scheduler
    running = list(scheduler.running.reqs) if scheduler.running else []
    lengths = {req.serial: len(req.tokens) for req in running}
    synchronize()
    last = dict.fromkeys(lengths, time.perf_counter())
    begin()
    gaps = []
    for _ in range(WATCHED_STEPS):
        scheduler.step()
        now = time.perf_counter()
        for req in running:
            gained = len(req.tokens) - lengths[req.serial]
            if gained > 0:
                gaps += [(now - last[req.serial]) / gained] * gained
                lengths[req.serial], last[req.serial] = len(req.tokens), now
    return gaps


class Faults:
    """Damages requests of one side, one after another."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._rng = random.Random(1)
        self._canary = side.scheduler.worker.canary_managers()[0]

    def length(self) -> int:
        """Number of tokens of each running request; all have the same."""
        assert self._side.scheduler.running is not None
        return len(self._side.scheduler.running.reqs[0].tokens)

    def plant(self) -> None:
        """Flip a word of a record of a running request; the next step reads it."""
        scheduler = self._side.scheduler
        assert scheduler.running is not None
        req = self._rng.choice(scheduler.running.reqs)
        position = self._rng.randrange(req.prompt_len)
        slots = scheduler.cache.req_to_token_pool.row_slots(
            req.req_pool_idx, position, position + 1
        )
        self._canary.target.buffers.state.tail[int(slots[0]), 1] ^= 1


def first_token_seconds(side: Side, length: int, seed: int) -> float:
    """Return the time from submitting a prompt to its first token, among running
    requests.
    """
    began = time.perf_counter()
    side.submit(length, 1, torch.Generator().manual_seed(seed))
    finished = side.scheduler.stats_snapshot().num_requests_total
    while side.scheduler.stats_snapshot().num_requests_total == finished:
        side.scheduler.step()
    return time.perf_counter() - began


def recovery_seconds(side: Side, faults: Faults) -> float:
    """Return the time from the detection of damage to the request's next token."""
    scheduler = side.scheduler
    recoveries = scheduler.stats_snapshot().kv_canary_recovery_seconds
    assert recoveries is not None
    before, count = recoveries.sum, sum(recoveries.counts)
    faults.plant()
    while sum(recoveries.counts) == count:
        scheduler.step()
    return recoveries.sum - before


def measure_bystanders(side: Side, args: argparse.Namespace) -> Json:
    """Measure gaps during a healing and during one more prompt, in turn; and
    recoveries.
    """
    faults, healed, admitted = Faults(side), list[float](), list[float]()
    recovered, first = [], []
    for i in range(args.rounds):
        generator = torch.Generator().manual_seed(1000 + i)
        healed += measure_gaps(side, faults.plant)
        length = faults.length()
        admitted += measure_gaps(side, partial(side.submit, length, 1, generator))
        recovered.append(recovery_seconds(side, faults))
        first.append(first_token_seconds(side, faults.length(), 2000 + i))
    return {
        "gap_p99_healed_ms": quantile(healed, P99) * 1e3,
        "gap_p99_admitted_ms": quantile(admitted, P99) * 1e3,
        "gap_median_ms": statistics.median(healed) * 1e3,
        "bystanders": quantile(healed, P99) / quantile(admitted, P99),
        "recovery_ms": statistics.median(recovered) * 1e3,
        "prefill_ms": statistics.median(first) * 1e3,
        "recovery": statistics.median(recovered) / statistics.median(first),
    }


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def run(args: argparse.Namespace) -> Json:
    bench_canary.clock = CLOCKS[args.clock]
    folder = Path(args.model_path or write_shape(args.shape, Path(tempfile.mkdtemp())))
    args.load_format = "auto" if args.model_path else "dummy"
    new = args.pairs * args.block * 2 + args.rounds * (WATCHED_STEPS + 8) * 4 + 64
    if args.input_len + new > args.context_length:
        raise ValueError(
            f"--context-length {args.context_length} is too short: {args.input_len} "
            f"tokens and {new} steps; lower --pairs, --block or --rounds"
        )
    args.max_running = args.batch_size + 1
    args.graph_sizes = sorted({1, args.batch_size, args.max_running})
    args.slots = args.max_running * (args.input_len + new + args.page_size)
    sides = (Side(args, folder, "raise"), Side(args, folder, "heal"))
    for side in sides:
        side.start_decoding(args.batch_size, args.input_len, new)
    steps = alternate(sides, args.pairs, lambda side, i: side.block(args.block))
    return {
        "benchmark": "bench_heal",
        "shape": args.model_path or args.shape,
        "batch_size": args.batch_size,
        "input_len": args.input_len,
        "rounds": args.rounds,
        "steps": steps,
        **measure_bystanders(sides[1], args),
        **provenance(),
    }


def print_table(report: Json) -> None:
    steps = report["steps"]
    print(
        format_table(
            ["measurement", "value", "beside", "ratio"],
            [
                [
                    "decode step, heal beside raise (ms)",
                    f"{steps['on_ms']:.3f}",
                    f"{steps['off_ms']:.3f}",
                    f"{steps['percent']:+.2f} % [{steps['low']:+.2f}, "
                    f"{steps['high']:+.2f}]",
                ],
                [
                    "p99 between tokens, healing beside a prompt (ms)",
                    f"{report['gap_p99_healed_ms']:.2f}",
                    f"{report['gap_p99_admitted_ms']:.2f}",
                    f"{report['bystanders']:.2f}",
                ],
                [
                    "recovery beside a first token (ms)",
                    f"{report['recovery_ms']:.2f}",
                    f"{report['prefill_ms']:.2f}",
                    f"{report['recovery']:.2f}",
                ],
            ],
        )
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="of the steps")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    add_side_flags(parser, input_len=2000, context_length=16384)
    parser.add_argument("--output-file")
    args = parser.parse_args(argv)
    args.sweep_interval, args.fill_cache = 0, False
    return args


if __name__ == "__main__":
    sys.exit(run_report(parse_args, run, print_table))
