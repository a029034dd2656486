"""The offline `Engine` on the CPU alone and beside a process that keeps a core busy.

python benchmark/cpu/bench_busy_machine.py [--rounds 5] [--batch-size 4]

Two engines with the demo model stay loaded: one with its default of a thread per core,
one with a single thread. In every round each answers the same batch, in turn alone and
next to the busy processes. The last column is the mean number of cores that other
processes used meanwhile: figures from a busy machine mean little. The last line is one
JSON document.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from sglang import Engine
from sglang.bench_utils.machine_load import LoadWatch
from sglang.bench_utils.report import (
    Json,
    format_table,
    print_report,
    provenance,
    rate,
    ratio,
)
from sglang.srt.environ import envs
from sglang.srt.managers.front.scheduler_process import available_cores

BUSY_LOOP = "while True: pass"
SETTLE_SECONDS = 0.3
WARM_TOKENS = 8
SLOTS = 16384
OURS = "ours"
COLUMNS = (
    "threads",
    "busy processes",
    "tok/s",
    "least",
    "most",
    "of 1 thread alone",
    "foreign cores",
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests of one measurement."""

    batch_size: int
    input_len: int
    output_len: int

    def run(self, engine: Engine, output_len: int) -> float:
        """Answer the batch; returns output tokens per second."""
        prompts = [
            [5 + (7 * row + i) % 3000 for i in range(self.input_len)]
            for row in range(self.batch_size)
        ]
        params = {
            "temperature": 0.0,
            "max_new_tokens": output_len,
            "ignore_eos": True,
        }
        began = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=params)
        return rate(self.batch_size * output_len, time.perf_counter() - began)


@dataclass(kw_only=True)
class Case:
    """One row of the table: an engine next to `num_busy` processes.

    Fields:
        rates: tok/s in each round.
        foreign: cores used by others in each round.
    """

    threads: int
    num_busy: int
    engine: Engine
    rates: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)

    def measure(self, load: Load) -> None:
        with busy_processes(self.num_busy):
            watch = LoadWatch({OURS: os.getpid()}, os.sched_getaffinity(0))
            self.rates.append(load.run(self.engine, load.output_len))
            self.foreign.append(watch.usage(OURS).foreign)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    command = [sys.executable, "-c", BUSY_LOOP]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        if count:
            time.sleep(SETTLE_SECONDS)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def start_engine(stack: ExitStack, model_path: str | None, threads: int) -> Engine:
    flags: Json = {"max_total_tokens": SLOTS, "disable_radix_cache": True}
    if model_path is not None:
        flags["model_path"] = model_path
    with envs.OMP_NUM_THREADS.override(threads):
        return stack.enter_context(Engine(device="cpu", **flags))


def measure(args: argparse.Namespace) -> list[Case]:
    load = Load(
        batch_size=args.batch_size, input_len=args.input_len, output_len=args.output_len
    )
    with ExitStack() as stack:
        cases = []
        for threads in sorted({available_cores(), 1}, reverse=True):
            engine = start_engine(stack, args.model_path, threads)
            load.run(engine, WARM_TOKENS)
            for num_busy in (0, args.busy):
                cases.append(Case(threads=threads, num_busy=num_busy, engine=engine))
        for round_index in range(args.rounds):
            for case in cases if round_index % 2 == 0 else reversed(cases):
                case.measure(load)
    return cases


def summary(case: Case, alone: float) -> Json:
    return {
        "threads": case.threads,
        "busy_processes": case.num_busy,
        "tok_s": statistics.median(case.rates),
        "tok_s_min": min(case.rates),
        "tok_s_max": max(case.rates),
        "of_one_thread_alone": ratio(statistics.median(case.rates), alone),
        "foreign_cores": statistics.median(case.foreign),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", help="unset: the demo model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=1, help="busy processes")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()
    cases = measure(args)
    one_alone = next(c for c in cases if c.threads == 1 and c.num_busy == 0)
    alone = statistics.median(one_alone.rates)
    results = [summary(case, alone) for case in cases]
    print(format_table(COLUMNS, [list(result.values()) for result in results]))
    print_report(
        provenance()
        | {"benchmark": "bench_busy_machine", **vars(args)}
        | {"results": results}
    )


if __name__ == "__main__":
    main()
