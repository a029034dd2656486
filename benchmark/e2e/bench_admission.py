"""Host time for admitting many cached prompts at once, part by part.

python benchmark/e2e/bench_admission.py                        # H200, 8B shape
python benchmark/e2e/bench_admission.py --device cpu           # mock model

`--rows` prompts whose prefixes are cached are sent at once and served with one new
token each; the CPU time of this process is counted (on a GPU also the time until the
answers), without the model's own forward where that computes on the CPU. The canary is
off and then on. Medians of `--rounds` rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from bench_canary import Side
from model_shapes import SHAPES, write_shape
from served import free_memory

from kv_canary.runtime.runtime import CanaryRuntime
from sglang.bench_utils.launch import run_report
from sglang.bench_utils.report import Json, format_table, provenance
from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler.batch_selector import BatchSelector
from sglang.srt.managers.scheduler.request_intake import RequestIntake
from sglang.srt.managers.scheduler.result_processor import BatchResultProcessor
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.test.tiny_models import write_mock_model


class Part(NamedTuple):
    """A method whose time is counted under a name, without calls counted under other
    names.
    """

    name: str
    owner: type[Any]
    method: str


MODEL = "model"
REST = "rest"
PARTS = (
    Part("take requests in", RequestIntake, "accept"),
    Part("choose the batch", BatchSelector, "_fill_prefill_adder"),
    Part("slots, rows, tokens", ScheduleBatch, "prepare_for_extend"),
    Part("describe the forward", ScheduleBatch, "forward_batch"),
    Part("canary's prefixes", CanaryRuntime, "settle"),
    Part(MODEL, ModelRunner, "forward"),
    Part("take the results", BatchResultProcessor, "process"),
)


class Stopwatch:
    """CPU time of this process by part, each without its inner parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[float] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Scope in which the parts are counted."""
        with ExitStack() as stack:
            for part in PARTS:
                inner = getattr(part.owner, part.method)
                counted = self._counted(part.name, inner)
                if getattr(inner, "__self__", None) is part.owner:
                    counted = staticmethod(counted)
                stack.enter_context(patch.object(part.owner, part.method, counted))
            yield

    def _counted(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return inner(*args, **kwargs)

        return run

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._open.append(0.0)
        begin = time.process_time()
        try:
            yield
        finally:
            whole = time.process_time() - begin
            self.seconds[name] += whole - self._open.pop()
            if self._open:
                self._open[-1] += whole


def admit(side: Side, rows: int, length: int, *, on_gpu: bool) -> dict[str, float]:
    """Return milliseconds by part for serving `rows` prompts of `length` tokens."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(rows):
        side.submit(length, 1, generator)
    watch = Stopwatch()
    begin = time.perf_counter()
    with watch.running(), watch.part(REST):
        side.drain()
    found = {name: 1e3 * seconds for name, seconds in watch.seconds.items()}
    if on_gpu:
        found["until the answers"] = 1e3 * (time.perf_counter() - begin)
    return found


def measure(args: argparse.Namespace, folder: Path, mode: str | None) -> Json:
    """Return medians by part; the prompts are cached before the first round."""
    side, on_gpu = Side(args, folder, mode), args.device == "cuda"
    admit(side, args.rows, args.input_len, on_gpu=on_gpu)
    rounds = [
        admit(side, args.rows, args.input_len, on_gpu=on_gpu)
        for _ in range(args.rounds + 1)
    ][1:]
    cached = side.scheduler.stats_snapshot().cached_tokens_total
    assert cached >= args.rounds * args.rows * (args.input_len - args.page_size)
    medians = {
        name: statistics.median([found.get(name, 0.0) for found in rounds])
        for name in Counter(name for found in rounds for name in found)
    }
    host = sum(ms for name, ms in medians.items() if name in _HOST)
    return {"canary": mode or "off", "parts": medians, "host": host}


def _alone(args: argparse.Namespace, folder: Path, mode: str | None) -> Json:
    """Measure in memory that the next side can have."""
    try:
        return measure(args, folder, mode)
    finally:
        free_memory()


_HOST = {part.name for part in PARTS if part.name != MODEL} | {REST}


def run(args: argparse.Namespace) -> Json:
    torch.set_num_threads(1)
    folder = Path(args.model_path or tempfile.mkdtemp())
    args.load_format = "auto"
    if args.model_path is None and args.device == "cpu":
        write_mock_model(folder, max_position_embeddings=2 * args.input_len)
    elif args.model_path is None:
        write_shape(args.shape, folder)
        args.load_format = "dummy"
    args.context_length = 2 * args.input_len
    args.max_running, args.graph_sizes = args.rows, None
    slots = (args.rows + 8) * (args.input_len + 2 * args.page_size)
    args.slots = -(-slots // args.page_size) * args.page_size
    args.sweep_interval, args.fill_cache = 0, True
    args.real_data, args.disable_overlap_schedule = "partial", False
    return {
        "benchmark": "bench_admission",
        "rows": args.rows,
        "input_len": args.input_len,
        "page_size": args.page_size,
        "sides": [_alone(args, folder, mode) for mode in (None, "raise")],
        **provenance(),
    }


def print_table(report: Json) -> None:
    sides = report["sides"]
    names = [part.name for part in PARTS] + [REST, "until the answers"]
    rows = [
        [name, *(f"{side['parts'].get(name, 0.0):.1f}" for side in sides)]
        for name in names
        if any(name in side["parts"] for side in sides)
    ]
    rows.append(["host without the model", *(f"{side['host']:.1f}" for side in sides)])
    heads = [f"canary {side['canary']}, ms" for side in sides]
    print(format_table([f"{report['rows']} x {report['input_len']}", *heads], rows))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="Llama-3.1-8B")
    parser.add_argument("--model-path", help="a checkpoint instead of a shape or mock")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(run_report(parse_args, run, print_table))
