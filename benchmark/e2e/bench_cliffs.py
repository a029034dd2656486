"""Cliffs that a warm benchmark hides: first uses compared with second ones, and points
of a curve compared with the line through their neighbors.

python benchmark/e2e/bench_cliffs.py                          # H200, 8B shape
python benchmark/e2e/bench_cliffs.py --quick                  # a minute
python benchmark/e2e/bench_cliffs.py --skip-server-warmup     # what the start hides
python benchmark/e2e/bench_cliffs.py --offline 256            # an engine's first batch
python benchmark/e2e/bench_cliffs.py --device cpu \
    --model-path python/sglang/assets/demo_model --context-length 2048 \
    --batch-sizes 1 2 4 8 --contexts 128 256 512 --prompts 128 512 --rows 4 8

A fresh engine does one thing after another, each twice with different tokens:

* prompts of several lengths, alone, fresh and then found in the cache;
* several rows at once, fresh and then cached;
* every option of the sampler, and log probabilities;
* decode steps of several batch sizes, and of several contexts at batch 1.

*first / second* is the price of being the first: compilation, captures, lazy loading;
beside it the kernels that were compiled or loaded then.
`--offline N` measures nothing but a batch of N random requests, first and second time.
*beside the line* is a step's time over the straight line between the next smaller and
the next larger point. The last lines name the worst of both; the last one is JSON.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_canary import WARM_STEPS, Side, add_side_flags, timed
from model_shapes import write_shape

from sglang.bench_utils.launch import run_report
from sglang.bench_utils.report import Json, format_table, provenance
from sglang.srt.kv_canary.config import CanaryMode
from sglang.srt.managers.messages.io_struct import GenerateReq
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.kernel_loads import KernelLoads

# Rows of a batch of prompts have this many tokens each.
ROW_TOKENS = 1024
BLOCK = 24


QUICK: dict[str, list[int]] = {
    "batch_sizes": [1, 16, 100, 256],
    "contexts": [128, 1024, 8192],
    "prompts": [64, 300, 1100, 8192],
    "rows": [2, 16, 64, 256],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k, top-p, min-p": {
        **{"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05}
    },
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logit bias": {"logit_bias": {5: 1.0}},
    "log probabilities": {"return_logprob": True, "top_logprobs_num": 5},
    "input log probabilities": {"return_logprob": True, "logprob_start_len": 0},
}
OF_REQUEST = ("return_logprob", "top_logprobs_num", "logprob_start_len")
OPTION_ROWS, OPTION_LENGTH, OPTION_TOKENS = 5, 150, 8


class Use(NamedTuple):
    """One kind of work, done twice: milliseconds, and kernels loaded the first time."""

    what: str
    first: float
    second: float
    kernels: dict[str, int]

    @property
    def ratio(self) -> float:
        return self.first / self.second


class Point(NamedTuple):
    """A decode step of `x` rows or `x` tokens, in milliseconds. `line` is the value on
    its neighbors' line, or None at the ends.
    """

    what: str
    x: int
    ms: float
    line: float | None

    @property
    def ratio(self) -> float:
        return 1.0 if self.line is None else self.ms / self.line


class Loads:
    """The kernels loaded since the last call."""

    def __init__(self, device: str) -> None:
        self._loads = KernelLoads()
        if device == "cuda":
            self._loads.start()

    def take(self) -> dict[str, int]:
        names = dict(self._loads.names)
        self._loads.names.clear()
        return names


def options_ms(side: Side, options: dict[str, Any], seed: int) -> float:
    """Return the milliseconds of a few requests with `options`."""
    generator = torch.Generator().manual_seed(seed)
    vocab = side.scheduler.model_config.vocab_size
    fields = {key: options[key] for key in options if key in OF_REQUEST}
    params = {key: options[key] for key in options if key not in OF_REQUEST}
    for row in range(OPTION_ROWS):
        ids = torch.randint(0, vocab, (OPTION_LENGTH,), generator=generator).tolist()
        side.io.requests.append(
            GenerateReq(
                rid=f"options-{seed}-{row}",
                input_ids=ids,
                sampling_params=SamplingParams(
                    max_new_tokens=OPTION_TOKENS, ignore_eos=True, **params
                ),
                **fields,
            )
        )
    return timed(side.drain) * 1e3


def uses_of_options(side: Side, loads: Loads) -> Iterator[Use]:
    for i, (what, options) in enumerate(OPTIONS.items()):
        first = options_ms(side, options, 2 * i)
        kernels = loads.take()
        yield Use(what, first, options_ms(side, options, 2 * i + 1), kernels)


def prompts_ms(side: Side, length: int, rows: int, seed: int) -> float:
    """Return the milliseconds from sending `rows` prompts at once to the last one's
    token.
    """
    generator = torch.Generator().manual_seed(seed)

    def serve() -> None:
        for _ in range(rows):
            side.submit(length, 1, generator)
        side.drain()

    return timed(serve) * 1e3


def uses_of_prompts(
    side: Side, args: argparse.Namespace, loads: Loads
) -> Iterator[Use]:
    """Measure prompts of each length and batches of rows, fresh and cached."""
    kinds = [(n, 1, f"prompt of {n}") for n in args.prompts]
    length = min(ROW_TOKENS, args.context_length // 2)
    kinds += [(length, rows, f"{rows} prompts of {length}") for rows in args.rows]
    for i, (length, rows, what) in enumerate(kinds):
        # Both times cached prompts follow fresh ones, for which the host waits: its
        # first work after a wait takes longer, whatever was served before.
        times = []
        for seed in (1000 + 2 * i, 1001 + 2 * i):
            for _ in range(2):
                times.append((prompts_ms(side, length, rows, seed), loads.take()))
        for how, place in (("", 0), (", cached", 1)):
            first, kernels = times[place]
            second, _ = times[place + 2]
            yield Use(what + how, first, second, kernels)


def decode_uses(side: Side, what: str, rows: int, length: int, loads: Loads) -> Use:
    """Measure two blocks of decode steps; the first one contains the first steps of its
    kind.
    """
    side.start_decoding(rows, length, WARM_STEPS + 2 * BLOCK + 8, warm_steps=0)
    first = side.block(BLOCK) * 1e3
    kernels = loads.take()
    second = side.block(BLOCK) * 1e3
    side.stop()
    return Use(what, first, second, kernels)


def batch_ms(side: Side, requests: int, seed: int) -> float:
    """Return the milliseconds of a batch of random lengths, the same for each seed."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(seed)
    for _ in range(requests):
        side.submit(rng.randint(100, 1024), rng.randint(100, 1024), generator)
    return timed(side.drain) * 1e3


def use_of_batch(side: Side, requests: int, loads: Loads) -> Use:
    first = batch_ms(side, requests, 0)
    kernels = loads.take()
    return Use(f"{requests} offline", first, batch_ms(side, requests, 1), kernels)


def curve(what: str, xs: Sequence[int], times: Sequence[float]) -> list[Point]:
    """Return each point with the line through its neighbors."""
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
    loads = Loads(args.device)
    began = time.perf_counter()
    side = Side(args, folder, mode)
    start = time.perf_counter() - began
    at_start = loads.take()
    curves: list[Point] = []
    if args.offline:
        uses = [use_of_batch(side, args.offline, loads)]
    else:
        uses = [*uses_of_prompts(side, args, loads), *uses_of_options(side, loads)]

    def of_batches(rows: int) -> Use:
        what = f"decode, {rows} rows"
        return decode_uses(side, what, rows, args.input_len, loads)

    def of_contexts(length: int) -> Use:
        return decode_uses(side, f"decode, context of {length}", 1, length, loads)

    for what, xs, measure in (
        ("decode, rows", args.batch_sizes, of_batches),
        ("decode, context", args.contexts, of_contexts),
    ):
        measured = [] if args.offline else [measure(x) for x in xs]
        xs = xs[: len(measured)]
        uses += measured
        curves += curve(what, xs, [use.second for use in measured])
    return {
        "benchmark": "bench_cliffs",
        "shape": args.model_path or args.shape,
        "kv_canary": args.kv_canary,
        "input_len": args.input_len,
        "start_seconds": start,
        "kernels_at_start": at_start,
        "kernels_later": sum(sum(use.kernels.values()) for use in uses),
        "uses": [{**use._asdict(), "ratio": use.ratio} for use in uses],
        "curves": [{**point._asdict(), "ratio": point.ratio} for point in curves],
        "worst_first_use": worst(uses),
        "worst_of_curves": worst(curves) if curves else None,
        **provenance(),
    }


def named(kernels: dict[str, int]) -> str:
    return ", ".join(f"{name} x{count}" for name, count in kernels.items())


def print_table(report: Json) -> None:
    rows = [
        [
            *(u["what"], f"{u['first']:.2f}", f"{u['second']:.2f}"),
            *(f"{u['ratio']:.2f}", named(u["kernels"])),
        ]
        for u in report["uses"]
    ]
    heads = ["what", "first, ms", "second, ms", "first / second", "kernels"]
    print(format_table(heads, rows))
    curves = [p for p in report["curves"] if p["line"] is not None]
    rows = [
        [p["what"], str(p["x"]), *(f"{p[key]:.3f}" for key in ("ms", "line", "ratio"))]
        for p in curves
    ]
    if curves:
        print(format_table(["curve", "at", "ms", "line", "beside the line"], rows))
    at_start = sum(report["kernels_at_start"].values())
    print(f"start            {report['start_seconds']:.1f} s, {at_start} kernels")
    print(f"kernels later    {report['kernels_later']}")
    print(f"worst first use  {report['worst_first_use']}")
    if curves:
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
    parser.add_argument("--quick", action="store_true", help="few points, a minute")
    parser.add_argument("--offline", type=int, default=0, help="requests of a batch")
    parser.add_argument("--skip-server-warmup", action="store_true")
    parser.add_argument("--output-file")
    args = parser.parse_args(argv)
    if args.quick:
        vars(args).update(QUICK)
    # Prompts must be found in the cache.
    args.sweep_interval, args.fill_cache = 0, True
    return args


if __name__ == "__main__":
    sys.exit(run_report(parse_args, run, print_table))
