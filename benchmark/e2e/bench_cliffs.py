"""Cliffs: what a warm benchmark hides. First uses beside second ones, and the points of
a curve beside the line through their neighbours.

python benchmark/e2e/bench_cliffs.py                          # H200, 8B shape
python benchmark/e2e/bench_cliffs.py --device cpu \
    --model-path python/sglang/assets/demo_model --context-length 2048 \
    --batch-sizes 1 2 4 8 --contexts 128 256 512 --prompts 128 512 --rows 4 8

A fresh engine is asked for one thing after the other, each twice with other tokens:

* prompts of several lengths, alone, fresh and then found in the cache;
* several rows at once, fresh and then cached;
* decode steps of several batch sizes, and of several contexts at batch 1.

*first / second* is the price of being the first: compilation, captures, lazy loading.
*beside the line* is a step's time over the straight line between the next smaller and
the next larger point. The last lines name the worst of both; the last one is JSON.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from bench_canary import WARM_STEPS, Side, add_side_flags, timed
from model_shapes import write_shape

from sglang.bench_utils.launch import run_report
from sglang.bench_utils.report import Json, format_table, provenance
from sglang.srt.kv_canary.config import CanaryMode

# Rows of a batch of prompts have this many tokens each.
ROW_TOKENS = 1024
BLOCK = 24


class Use(NamedTuple):
    """One kind of work, done twice: milliseconds."""

    what: str
    first: float
    second: float

    @property
    def ratio(self) -> float:
        return self.first / self.second


class Point(NamedTuple):
    """A decode step of `x` rows or `x` tokens; `line`: of its neighbours, None at the
    ends. Milliseconds."""

    what: str
    x: int
    ms: float
    line: float | None

    @property
    def ratio(self) -> float:
        return 1.0 if self.line is None else self.ms / self.line


def prompts_ms(side: Side, length: int, rows: int, seed: int) -> float:
    """From `rows` prompts that are sent at once to the last one's only token."""
    generator = torch.Generator().manual_seed(seed)

    def serve() -> None:
        for _ in range(rows):
            side.submit(length, 1, generator)
        side.drain()

    return timed(serve) * 1e3


def uses_of_prompts(side: Side, args: argparse.Namespace) -> Iterator[Use]:
    """Prompts of each length and batches of rows, fresh and cached."""
    kinds = [(n, 1, f"prompt of {n}") for n in args.prompts]
    length = min(ROW_TOKENS, args.context_length // 2)
    kinds += [(length, rows, f"{rows} prompts of {length}") for rows in args.rows]
    for i, (length, rows, what) in enumerate(kinds):
        seeds = (1000 + 2 * i, 1001 + 2 * i)
        fresh = [prompts_ms(side, length, rows, seed) for seed in seeds]
        cached = [prompts_ms(side, length, rows, seed) for seed in seeds]
        yield Use(what, *fresh)
        yield Use(f"{what}, cached", *cached)


def decode_uses(side: Side, what: str, rows: int, length: int) -> Use:
    """Two blocks of decode steps; the first one has the first steps of its kind."""
    side.start_decoding(rows, length, WARM_STEPS + 2 * BLOCK + 8, warm_steps=0)
    first, second = (side.block(BLOCK) * 1e3 for _ in range(2))
    side.stop()
    return Use(what, first, second)


def curve(what: str, xs: Sequence[int], times: Sequence[float]) -> list[Point]:
    """Each point beside the line through its neighbours."""
    points = []
    for i, (x, ms) in enumerate(zip(xs, times, strict=True)):
        line = None
        if 0 < i < len(xs) - 1:
            share = (x - xs[i - 1]) / (xs[i + 1] - xs[i - 1])
            line = times[i - 1] + share * (times[i + 1] - times[i - 1])
        points.append(Point(what, x, ms, line))
    return points


def worst(found: Sequence[Use] | Sequence[Point]) -> str:
    top = max(found, key=lambda each: each.ratio)
    where = f" {top.x}" if isinstance(top, Point) else ""
    return f"{top.what}{where}: {top.ratio:.2f}"


def run(args: argparse.Namespace) -> Json:
    folder = Path(args.model_path or write_shape(args.shape, Path(tempfile.mkdtemp())))
    args.load_format = "auto" if args.model_path else "dummy"
    args.max_running = max(*args.batch_sizes, *args.rows)
    args.graph_sizes = None
    most = max(
        max(args.batch_sizes) * (args.input_len + 2 * BLOCK + 64),
        2 * max(args.rows) * ROW_TOKENS,
        2 * max(args.contexts),
    )
    args.slots = -(-most // args.page_size) * args.page_size
    mode = None if args.kv_canary == "none" else args.kv_canary
    side = Side(args, folder, mode)
    uses = list(uses_of_prompts(side, args))
    curves: list[Point] = []

    def of_batches(rows: int) -> Use:
        return decode_uses(side, f"decode, {rows} rows", rows, args.input_len)

    def of_contexts(length: int) -> Use:
        return decode_uses(side, f"decode, context of {length}", 1, length)

    for what, xs, measure in (
        ("decode, rows", args.batch_sizes, of_batches),
        ("decode, context", args.contexts, of_contexts),
    ):
        measured = [measure(x) for x in xs]
        uses += measured
        curves += curve(what, xs, [use.second for use in measured])
    return {
        "benchmark": "bench_cliffs",
        "shape": args.model_path or args.shape,
        "kv_canary": args.kv_canary,
        "input_len": args.input_len,
        "uses": [{**use._asdict(), "ratio": use.ratio} for use in uses],
        "curves": [{**point._asdict(), "ratio": point.ratio} for point in curves],
        "worst_first_use": worst(uses),
        "worst_of_curves": worst(curves),
        **provenance(),
    }


def print_table(report: Json) -> None:
    rows = [
        [u["what"], f"{u['first']:.2f}", f"{u['second']:.2f}", f"{u['ratio']:.2f}"]
        for u in report["uses"]
    ]
    print(format_table(["what", "first, ms", "second, ms", "first / second"], rows))
    rows = [
        [p["what"], str(p["x"]), *(f"{p[key]:.3f}" for key in ("ms", "line", "ratio"))]
        for p in report["curves"]
        if p["line"] is not None
    ]
    print(format_table(["curve", "at", "ms", "line", "beside the line"], rows))
    print(f"worst first use  {report['worst_first_use']}")
    print(f"worst of curves  {report['worst_of_curves']}")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = [mode.value for mode in CanaryMode]
    parser.add_argument("--kv-canary", default="raise", choices=modes)
    add_side_flags(parser, input_len=128, context_length=40_000)
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 100, 128, 160, 200, 230, 256]
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=sizes)
    lengths = [128, 256, 512, 1024, 2048, 4096, 8192, 12_000, 16_000, 24_000, 32_000]
    parser.add_argument("--contexts", type=int, nargs="+", default=lengths)
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[64, 128, 512, 1024, 4096, 8192]
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8, 16, 64, 256])
    parser.add_argument("--output-file")
    args = parser.parse_args(argv)
    # Prompts are to be found in the cache.
    args.sweep_interval, args.fill_cache = 0, True
    return args


if __name__ == "__main__":
    sys.exit(run_report(parse_args, run, print_table))
