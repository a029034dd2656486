"""Decode steps and prefills of each kind of model, compared with floors and with the
canary.

python benchmark/e2e/bench_models.py --shape gpt-oss-20b Qwen3-30B-A3B

Shapes of models with windows, experts, latents or recurrent states, with dummy weights,
in the whole scheduler. Two schedulers with the same weights, one of them with
`--kv-canary raise`, take turns as in `bench_canary.py`. The floor of a decode step is
the bytes it reads (weights, with only the chosen experts, KV, with only a window in
sliding layers, and states, which it also writes) over the read bandwidth; the floor of
a prefill is its flops over the rate of matrix products. Both rates are measured in the
same run. --cached turns the prefix cache on and serves prompts of which all but the
last tokens are in it. --profile adds the kernels of a step by time. A process of its
own measures each shape; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bench_canary import WARM_STEPS, Side, alternate
from bench_decode import read_bandwidth
from bench_prefill import matrix_rate, profile_kernels
from model_floors import ModelFloors, counting_experts
from model_shapes import SHAPES, write_shape

from sglang.srt.model_executor import model_runner

Json = dict[str, Any]
# Context per request, so that both batches' KV and the weights fit into one GPU.
INPUT_LENS = {"Gemma-3-4B": 8192}
RATIOS = {"Gemma-3-4B": 0.2, "gpt-oss-20b": 0.5}
KINDS = ("Gemma-3-4B", "gpt-oss-20b", "Qwen3-30B-A3B", "DeepSeek-V2-Lite")
LONG_CONTEXT = 32768
CHECKPOINTS = 64
EAGER_STEPS = 3
PROFILED_STEPS = 8
PROFILED_KERNELS = 16


@contextmanager
def same_weights(side: Side) -> Iterator[None]:
    """Give schedulers built in this scope the weights of `side`."""
    load, model = model_runner.load_model, side.scheduler.worker.model_runner.model
    # The canary wraps only the copy's forward.
    model_runner.load_model = lambda *_args, **_kwargs: copy.copy(model)
    try:
        yield
    finally:
        model_runner.load_model = load


def two_sides(args: argparse.Namespace) -> tuple[Side, Side]:
    folder = write_shape(args.shape, Path(tempfile.mkdtemp()))
    ratio = RATIOS.get(args.shape)
    flags: Json = {} if ratio is None else {"swa_full_tokens_ratio": ratio}
    if args.cached and "linear_num_value_heads" in SHAPES[args.shape]:
        # Both sides have to fit into one GPU.
        flags["max_mamba_cache_size"] = args.max_running + CHECKPOINTS
    off = Side(args, folder, None, speculation=flags)
    with same_weights(off):
        return off, Side(args, folder, "raise", speculation=flags)


def experts_of_a_step(side: Side) -> float:
    """Distinct experts of a layer in eager steps of the running decode."""
    runner = side.scheduler.worker.model_runner
    graphs, runner.graph_runner = runner.graph_runner, None
    with counting_experts() as chosen:
        side.block(EAGER_STEPS)
    runner.graph_runner = graphs
    return chosen.mean


def profiled(sides: tuple[Side, Side], steps: int, work: Any) -> list[Json]:
    """The slowest kernels without the canary, and what it launches."""
    plain, checked = (
        profile_kernels(steps, lambda side=side: work(side)) for side in sides
    )
    calls = {row["kernel"]: row["calls"] for row in plain}
    added = [row for row in checked if row["calls"] > calls.get(row["kernel"], 0)]
    for row in added:
        row["kernel"] = f"canary: {row['kernel']}"
    return plain[:PROFILED_KERNELS] + added


def kv_share(side: Side, floors: ModelFloors, length: int) -> float:
    """Return the KV bytes held by a decoding request of `length` tokens, relative to no
    window slots.
    """
    allocator = side.scheduler.cache.allocator
    side.start_decoding(1, length, WARM_STEPS + 64)
    used = allocator.size - allocator.available_size()
    window_slots = used
    for group in allocator.secondary:
        window_slots = group.size - group.available_size()
    side.stop()
    return floors.kv_share(tokens=used, window_slots=window_slots)


class Report:
    """Rows of one shape, printed as they are measured."""

    def __init__(self, shape: str) -> None:
        self.rows: list[Json] = []
        self._shape = shape

    def add(self, what: str, times: Json, floor_ms: float, experts: float) -> None:
        row = {"what": what, "floor_ms": floor_ms, "experts": experts} | times
        self.rows.append(row)
        print(
            f"{self._shape:17s} {what:13s} {times['off_ms']:9.3f} {floor_ms:9.3f} "
            f"{100 * floor_ms / times['off_ms']:6.1f} % {experts:7.1f} "
            f"{times['percent']:7.2f} % ({times['low']:.2f} to {times['high']:.2f})",
            flush=True,
        )


def measure(args: argparse.Namespace) -> Json:
    bandwidth, rate = read_bandwidth(), matrix_rate()
    torch.cuda.empty_cache()
    length = args.input_len or INPUT_LENS.get(args.shape, 1024)
    new = WARM_STEPS + args.block * args.pairs + 96
    args.slots = max(max(args.batch_size) * (length + new), LONG_CONTEXT + 1024)
    args.slots = -(-args.slots // args.page_size) * args.page_size
    args.max_running = max(args.batch_size)
    args.graph_sizes = sorted(args.batch_size)
    sides = two_sides(args)
    off = sides[0].scheduler
    runner = off.worker.model_runner
    states = runner.state_pool
    floors = ModelFloors(
        runner.model,
        off.model_config,
        state_bytes=0 if states is None else states.shape.bytes_per_slot,
    )
    report = Report(args.shape)
    profiles: dict[str, list[Json]] = {}
    for rows in args.batch_size:
        for side in sides:
            side.start_decoding(rows, length, new)
        times = alternate(sides, args.pairs, lambda side, i: side.block(args.block))
        experts = experts_of_a_step(sides[0])
        context = length + WARM_STEPS + args.block * args.pairs / 2
        moved = floors.decode_bytes(rows=rows, context=context, experts=experts)
        report.add(f"decode {rows}", times, moved / bandwidth * 1e3, experts)
        if args.profile:
            profiles[f"decode {rows}"] = profiled(
                sides, PROFILED_STEPS, lambda side: side.block(PROFILED_STEPS)
            )
        for side in sides:
            side.stop()
    for prompt in args.prefill:
        for side in sides:
            side.prefill(prompt, seed=0)
        times = alternate(
            sides, args.pairs, lambda side, i, n=prompt: side.prefill(n, i + 1)
        )
        floor = floors.prefill_flops(prompt) / rate
        report.add(f"prefill {prompt}", times, floor * 1e3, 0.0)
        if args.profile:
            profiles[f"prefill {prompt}"] = profiled(
                sides, 1, lambda side, n=prompt: side.prefill(n, 99)
            )
    for prompt in args.cached:
        for side in sides:
            side.prefill(prompt, seed=0)
        times = alternate(
            sides, args.pairs, lambda side, _, n=prompt: side.prefill(n, 0)
        )
        report.add(f"cached {prompt}", times, 0.0, 0.0)
    share = kv_share(sides[0], floors, LONG_CONTEXT)
    manager = sides[1].scheduler.worker.model_runner.canary_manager
    assert manager is not None and manager.reporter.total == 0
    print(f"{args.shape:17s} KV of {LONG_CONTEXT} tokens: {share:.3f} of all layers'")
    for what, kernels in profiles.items():
        print(f"-- {args.shape}, {what}: us a step, calls, kernel")
        for row in kernels:
            print(f"{row['us']:9.1f} {row['calls']:7.1f}  {row['kernel'][:80]}")
    return {
        "shape": args.shape,
        "gpu": torch.cuda.get_device_name(),
        "bandwidth": bandwidth,
        "matrix_rate": rate,
        "input_len": length,
        "page_size": args.page_size,
        "real_data": args.real_data,
        "kv_share": share,
        "rows": report.rows,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=KINDS)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--input-len", type=int, default=0, help="0: by shape")
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192])
    parser.add_argument("--cached", type=int, nargs="*", default=[])
    parser.add_argument("--real-data", default="partial")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--context-length", type=int, default=LONG_CONTEXT + 1024)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    args.device, args.load_format = "cuda", "dummy"
    args.sweep_interval, args.fill_cache = 0, bool(args.cached)
    args.disable_overlap_schedule = False
    return args


def main() -> None:
    args = parse_args()
    if len(args.shape) == 1:
        args.shape = args.shape[0]
        print(
            f"{'shape':17s} {'what':13s}    off ms  floor ms    floor experts  canary"
        )
        print(json.dumps({"benchmark": "bench_models", "shapes": [measure(args)]}))
        return
    given = sys.argv[1:]
    documents: list[Json] = []
    for shape in args.shape:
        command = [sys.executable, __file__, *given, "--shape", shape]
        lines = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if not line.startswith("{"):
                    print(line, end="", flush=True)
        if process.returncode:
            sys.exit(process.returncode)
        documents += json.loads(lines[-1])["shapes"]
    print(json.dumps({"benchmark": "bench_models", "shapes": documents}))


if __name__ == "__main__":
    main()
