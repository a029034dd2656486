"""Cost of recording (`--kv-canary-record`) per decode step, on the CPU.

python benchmark/e2e/bench_canary_record.py [--batch-sizes 1 16] [--steps 200]

Per batch: the median of the time that a step spends in the recorder and the journal of
pages, and its share of a step of the same run; the same calls with nothing in between;
and the difference of whole steps of two engines, one with and one without a recorder,
that take turns. Then the cost of a checkpoint by the size of the
prefix tree, shared by the forwards between two. The last line is one JSON document.
On a GPU: `bench_canary.py --measure record`, whole steps, paired.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from served import build_served

from sglang.srt.managers.messages.io_struct import GenerateReq, StepInput
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.mem_cache.base_prefix_cache import RadixKey
from sglang.srt.mem_cache.page_ledger import PageJournal
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.replay.recording.recorder import RUNS_PER_FORWARD, Recorder
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.tiny_models import write_mock_model

PROMPT_TOKENS, WARM_STEPS, TURN = 40, 20, 20
STEP_MS = 4.0
METHODS = ("begin_round", "on_launch")


def engine(
    model: str | None, folder: str, *, record: int, batch_size: int, steps: int
) -> Scheduler:
    """Return a scheduler that decodes `batch_size` requests."""
    io = ListIO()
    tokens = PROMPT_TOKENS + WARM_STEPS + steps + 64
    scheduler = build_served(
        ServerArgs(
            model_path=model,
            device="cpu",
            skip_tokenizer_init=True,
            kv_canary="raise",
            kv_canary_report_dir=folder,
            kv_canary_record=record,
            max_total_tokens=batch_size * tokens,
            max_running_requests=batch_size,
            chunked_prefill_size=-1,
            log_level="error",
        ),
        io,
    )
    params = SamplingParams(max_new_tokens=steps + 200, temperature=0, ignore_eos=True)
    for i in range(batch_size):
        ids = [(7 * i + j) % 500 + 5 for j in range(PROMPT_TOKENS)]
        request = GenerateReq(rid=f"r{i}", input_ids=ids, sampling_params=params)
        io.requests.append(request)
    for _ in range(WARM_STEPS):
        scheduler.step()
    return scheduler


class Stopwatch:
    """Sums the time in wrapped calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            result = call(*args, **kwargs)
            self.seconds += clock() - began
            return result

        return timed


def direct_us(scheduler: Scheduler, steps: int) -> tuple[float, float]:
    """Return (median, first quartile) of a step's microseconds in the recorder,
    including the journal's appends. The quartile is more useful on a shared machine.
    """
    recorder, watch, times = scheduler.recorder, Stopwatch(), []
    assert recorder is not None
    for name in METHODS:
        setattr(recorder, name, watch.around(getattr(recorder, name)))
    for _ in range(steps):
        before = watch.seconds
        scheduler.step()
        times.append(watch.seconds - before)
    journal, pages, appends = PageJournal(), np.arange(8), []
    for _ in range(1000):
        began = time.perf_counter()
        journal.taken.append(pages)
        journal.given.append(pages)
        appends.append(time.perf_counter() - began)
    journal_us = statistics.median(appends) * 1e6
    quartile, median, _ = statistics.quantiles(times)
    return median * 1e6 + journal_us, quartile * 1e6 + journal_us


def alone_us(scheduler: Scheduler) -> float:
    """Return the median microseconds of a step's recorder calls, with nothing in
    between.
    """
    recorder, batch = scheduler.recorder, scheduler.running
    assert recorder is not None and batch is not None
    inputs, launched, times = StepInput(), batch.record(), []
    for _ in range(2000):
        began = time.perf_counter()
        recorder.begin_round(inputs, resolves=False)
        recorder.on_launch(batch, launched)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def step_ms(scheduler: Scheduler) -> float:
    began = time.perf_counter()
    for _ in range(TURN):
        scheduler.step()
    return (time.perf_counter() - began) / TURN * 1e3


def paired_percent(off: Scheduler, on: Scheduler, turns: int) -> tuple[float, float]:
    """Return (median step without, median difference in percent) over turns in both
    orders.
    """
    plain, differences = [], []
    for turn in range(turns):
        order = (off, on) if turn % 2 else (on, off)
        times = {id(scheduler): step_ms(scheduler) for scheduler in order}
        plain.append(times[id(off)])
        differences.append((times[id(on)] / times[id(off)] - 1.0) * 100.0)
    return statistics.median(plain), statistics.median(differences)


def checkpoint_ms(scheduler: Scheduler, runs: int) -> float:
    """Return the milliseconds of a checkpoint with a prefix tree of `runs` runs."""
    cache = scheduler.cache
    assert isinstance(cache, RadixCache)
    have = sum(1 for _ in cache.iter_nodes())
    for i in range(have, runs):
        slots = cache.allocator.alloc(1)
        assert slots is not None
        cache.insert(RadixKey([100_000 + i], None, cache.bigram), slots)
    recorder = Recorder(scheduler, num_forwards=1000, has_tokens=False)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        recorder.begin_generation()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=int, nargs="+", default=[100, 1000, 10_000])
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps, checkpoints = [], []
    with tempfile.TemporaryDirectory() as folder:
        print("batch  us/step  of a step  us alone  step ms  paired")
        for batch_size in args.batch_sizes:
            options = {"batch_size": batch_size, "steps": 2 * args.steps}
            off = engine(None, folder, record=0, **options)
            on = engine(None, folder, record=1000, **options)
            plain, percent = paired_percent(off, on, args.steps // TURN)
            alone = alone_us(on)
            median, quartile = direct_us(on, args.steps)
            share = median / plain / 10.0
            steps.append(
                {
                    "batch_size": batch_size,
                    "recorder_us_median": median,
                    "recorder_us_q1": quartile,
                    "recorder_us_alone": alone,
                    "share_of_step_percent": share,
                    "alone_share_of_4_ms_percent": alone / STEP_MS / 10.0,
                    "step_ms": plain,
                    "paired_percent": percent,
                }
            )
            print(
                f"{batch_size:5}  {median:7.2f}  {share:7.3f} %  {alone:8.2f}  "
                f"{plain:7.3f}  {percent:5.2f} %"
            )
        model = write_mock_model(
            Path(folder) / "mock",
            vocab_size=1000,
            max_position_embeddings=512,
        )
        idle = build_served(
            ServerArgs(
                model_path=str(model),
                device="cpu",
                skip_tokenizer_init=True,
                kv_canary="raise",
                max_total_tokens=2 * max(args.runs),
                log_level="error",
            ),
            ListIO(),
        )
        print("runs   checkpoint ms  us per forward")
        for runs in args.runs:
            spent = checkpoint_ms(idle, runs)
            forwards = max(1000, runs // RUNS_PER_FORWARD)
            each = spent * 1e3 / forwards
            checkpoints.append(
                {"runs": runs, "checkpoint_ms": spent, "us_per_forward": each}
            )
            print(f"{runs:6}  {spent:12.3f}  {each:14.3f}")
    document = {"benchmark": "bench_canary_record", "steps": steps}
    print(json.dumps(document | {"checkpoints": checkpoints}))


if __name__ == "__main__":
    main()
