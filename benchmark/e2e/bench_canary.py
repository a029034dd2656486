"""Overhead of the KV canary: pairs of steps with and without it, in one process.

python benchmark/e2e/bench_canary.py --measure decode prefill

Two schedulers with the same dummy weights, one of them with `--kv-canary raise`,
captured in one process, take turns: blocks of --block decode steps, prefills, batches
of random requests. What counts is the paired difference, its median with a 95 %
interval (order statistics of the pairs), of wall time, or with --clock cpu of the
process's CPU time, which a busy machine disturbs less. The last line is one JSON
document. --measure runs the named measurements (all-of-them: every one), each with
flags and a process of its own, within --limit seconds; other flags are passed on.

What each takes on an H200 with the 8B shape, 20 s for loading and capture included:
decode 90 s, prefill 35 s, rotate 90 s, all 40 s, sweep 150 s, throughput 170 s,
in-order (steps that wait for their result) 80 s.

With `--record N` (the measurement `record`) both have the canary, and what is compared
is keeping the decisions of the last N forwards (`--kv-canary-record`). With `--draws`
(the measurement `draws`) both have it, too, and what is compared is the check of what
is sampled; `--temperature` samples.

With `--trees` (topk,steps,draft tokens; the measurement `spec`) the two speculate with
an EAGLE3 head of dummy weights, and a block is one of whole cycles: draft, verify,
accept, extend. Random weights accept nothing; the time of a cycle is what counts.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from model_shapes import SHAPES, write_draft_shape, write_shape
from served import build_served, free_memory
from spec_trees import Tree

from kv_canary.records import NUM_COUNTERS
from sglang.srt.configs.draft_layout import alloc_len_per_decode
from sglang.srt.kv_canary.runner import launch_order
from sglang.srt.managers.messages.io_struct import AbortReq, GenerateReq
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

WARM_STEPS = 16
# Measurements of --measure, as flags of this script.
MEASUREMENTS: dict[str, list[str]] = {
    "decode": ["--prefill"],
    "prefill": ["--batch-size", "--pairs", "1"],
    "rotate": ["--real-data", "rotate", "--prefill", "8192"],
    "all": ["--real-data", "all", "--batch-size"],
    "sweep": [
        *("--sweep-interval", "10", "--throughput", "3", "--fill-cache"),
        *("--batch-size", "--prefill"),
    ],
    "throughput": ["--throughput", "3", "--batch-size", "--prefill"],
    "in-order": ["--disable-overlap-schedule", "--prefill"],
    "record": ["--record", "1000", "--batch-size", "1", "16", "--prefill"],
    "draws": ["--draws", "--prefill", "128", "8192"],
    "spec": [
        *("--trees", "8,5,64", "1,3,4", "--page-size", "64", "--block", "32"),
        *("--batch-size", "1", "16", "--prefill"),
    ],
}
# Of the exact interval for a median: P(fewer than k of n pairs lie below) <= 2.5 %.
CONFIDENCE_TAIL = 0.025


class Side:
    """One scheduler and the requests sent to it; `canary`: its mode, `record`: the
    forwards it records."""

    def __init__(
        self,
        args: argparse.Namespace,
        folder: Path,
        canary: str | None,
        *,
        speculation: dict[str, Any] | None = None,
        record: int = 0,
    ) -> None:
        flags = dict(speculation or {})
        if record:
            flags |= {"kv_canary_record": record, "kv_canary_report_dir": str(folder)}
        if canary is not None:
            flags |= {
                "kv_canary": canary,
                **({"kv_canary_heal_limit": 0} if canary == "heal" else {}),
                "kv_canary_real_data": args.real_data,
                "kv_canary_sweep_interval": args.sweep_interval,
            }
        on_gpu = args.device == "cuda"
        self.io = ListIO()
        self.scheduler: Scheduler = build_served(
            ServerArgs(
                model_path=str(folder),
                load_format=args.load_format,
                skip_tokenizer_init=True,
                device=args.device,
                context_length=args.context_length,
                max_running_requests=args.max_running,
                max_total_tokens=args.slots,
                page_size=args.page_size,
                cuda_graph_bs=args.graph_sizes if on_gpu else None,
                disable_radix_cache=not (args.sweep_interval or args.fill_cache),
                disable_overlap_schedule=args.disable_overlap_schedule,
                skip_server_warmup=getattr(args, "skip_server_warmup", False),
                **flags,
            ),
            self.io,
        )
        self.slots = args.slots
        self._temperature = getattr(args, "temperature", 0.0)
        self._count = 0

    def leave_out_draws(self) -> None:
        """Do not check what is sampled."""
        manager = self.scheduler.worker.model_runner.canary_manager
        assert manager is not None and manager.draws is not None
        manager.draws.is_on = False

    def submit(self, length: int, new: int, generator: torch.Generator) -> None:
        vocab = self.scheduler.model_config.vocab_size
        ids = torch.randint(0, vocab, (length,), generator=generator).tolist()
        params = SamplingParams(
            max_new_tokens=new, temperature=self._temperature, ignore_eos=True
        )
        self._count += 1
        self.io.requests.append(
            GenerateReq(rid=str(self._count), input_ids=ids, sampling_params=params)
        )

    def drain(self) -> None:
        while self.io.requests or self.scheduler.has_work():
            self.scheduler.step()
        self.io.responses.clear()

    def stop(self) -> None:
        """Abort all running requests."""
        self.io.requests.append(AbortReq(abort_all=True, message="measured"))
        self.drain()

    def start_decoding(
        self, rows: int, length: int, new: int, *, warm_steps: int = WARM_STEPS
    ) -> None:
        generator = torch.Generator().manual_seed(rows)
        for _ in range(rows):
            self.submit(length, new, generator)
        while True:
            self.scheduler.step()
            running = self.scheduler.running or ()
            if len(running) == rows and not self.scheduler.waiting:
                break
        for _ in range(warm_steps):
            self.scheduler.step()

    def block(self, steps: int) -> float:
        """Return the mean seconds of a decode step over a block."""
        return timed(lambda: [self.scheduler.step() for _ in range(steps)]) / steps

    def fill_cache(self) -> int:
        """Run one-token requests until the prefix cache holds nearly all slots.

        They share no prefixes with later requests. Returns the cached slots.
        """
        cache, generator = self.scheduler.cache, torch.Generator().manual_seed(99)
        length = min(4096, self.slots // 8)
        for _ in range(self.slots * 9 // 10 // length):
            self.submit(length, 1, generator)
        self.drain()
        return len(cache.cached_slots())

    def prefill(self, length: int, seed: int) -> float:
        self.submit(length, 1, torch.Generator().manual_seed(seed))
        return timed(self.drain)

    def throughput(self, requests: int, seed: int) -> float:
        """Return the seconds of random requests, 100 to 1,024 tokens in and out."""
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(requests):
            self.submit(rng.randint(100, 1024), rng.randint(100, 1024), generator)
        return timed(self.drain)


CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "cpu": time.process_time,
}
clock = CLOCKS["wall"]


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of `work` by the chosen clock."""
    synchronize()
    began = clock()
    work()
    synchronize()
    return clock() - began


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def paired(off: list[float], on: list[float]) -> dict[str, float]:
    """Return the overhead in percent: the median of the pairs and its 95 % interval."""
    ratios = sorted(b / a - 1 for a, b in zip(off, on, strict=True))
    n, tail, below = len(ratios), 0.0, 0
    probability = 0.5**n
    while below < n // 2 and tail + probability <= CONFIDENCE_TAIL:
        tail += probability
        probability = probability * (n - below) / (below + 1)
        below += 1
    low = max(below - 1, 0)
    return {
        "off_ms": statistics.median(off) * 1e3,
        "on_ms": statistics.median(on) * 1e3,
        "percent": statistics.median(ratios) * 100,
        "low": ratios[low] * 100,
        "high": ratios[n - 1 - low] * 100,
        "pairs": n,
    }


def alternate(sides: tuple[Side, Side], pairs: int, measure: Any) -> dict[str, float]:
    """Run `measure(side, i)` in turns, alternating the order from pair to pair."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(pairs):
        for k in (0, 1) if i % 2 == 0 else (1, 0):
            times[k].append(measure(sides[k], i))
    return paired(*times)


def main() -> None:
    args, rest = measurements_parser().parse_known_args()
    if args.measure:
        run_measurements(args.measure, rest, limit=args.limit)
    else:
        compare(parse_args())


def measurements_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    names = [*MEASUREMENTS, "all-of-them"]
    parser.add_argument("--measure", nargs="+", choices=names, default=[])
    parser.add_argument("--limit", type=float, default=900, help="seconds in all")
    return parser


def add_side_flags(
    parser: argparse.ArgumentParser, *, input_len: int, context_length: int
) -> None:
    """The flags of a `Side`: its model, its prompts, its pool."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="Llama-3.1-8B")
    parser.add_argument("--model-path", help="a checkpoint instead of a dummy shape")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--real-data", default="partial")
    parser.add_argument("--input-len", type=int, default=input_len)
    parser.add_argument("--context-length", type=int, default=context_length)
    parser.add_argument("--disable-overlap-schedule", action="store_true")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[measurements_parser()],
    )
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument(
        "--fill-cache", action="store_true", help="before the throughput"
    )
    parser.add_argument(
        "--beside",
        choices=["auto", "always", "never"],
        default="auto",
        help="whether the launches run beside the model: forms to compare",
    )
    add_side_flags(parser, input_len=1024, context_length=16384)
    parser.add_argument("--sweep-interval", type=int, default=0)
    parser.add_argument("--batch-size", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192])
    parser.add_argument("--throughput", type=int, default=0, help="pairs of batches")
    parser.add_argument("--requests", type=int, default=256, help="of a batch")
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument(
        "--record", type=int, default=0, help="compare recording of so many forwards"
    )
    parser.add_argument("--draws", action="store_true", help="compare their check")
    parser.add_argument("--trees", type=Tree.parse, nargs="*", default=[])
    parser.add_argument("--algorithm", default="EAGLE3")
    parser.add_argument("--draft-model-path", help="a draft instead of a dummy head")
    return parser.parse_args()


def run_measurements(names: list[str], flags: list[str], *, limit: float) -> None:
    """Run every measurement in a process of its own; this one loads nothing."""
    wanted = list(MEASUREMENTS) if "all-of-them" in names else names
    began, documents = time.perf_counter(), {}
    for name in wanted:
        left = limit - (time.perf_counter() - began)
        if left < 60:
            print(f"== {name}: not started, {left:.0f} s are left", flush=True)
            continue
        print(f"== {name}: {shlex.join(MEASUREMENTS[name])}", flush=True)
        command = [sys.executable, __file__, *flags, *MEASUREMENTS[name]]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, timeout=left, check=True
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"== {name}: {error}", flush=True)
            continue
        *lines, last = done.stdout.splitlines()
        print("\n".join(lines), flush=True)
        documents[name] = json.loads(last)
    print(json.dumps({"benchmark": "bench_canary", "measurements": documents}))


Show = Callable[[str, dict[str, float]], None]


def measure_steps(
    args: argparse.Namespace, folder: Path, show: Show
) -> tuple[list[int], list[int]]:
    """Measure paired decode steps, prefills and batches.

    Also returns the canary's counters and the sizes of the prefix caches.
    """
    new = WARM_STEPS + args.block * args.pairs + 96
    # Requests of the throughput have about 1,130 tokens, in addition to a full cache.
    # Both sides of the 8B shape have to fit into one GPU.
    requests = args.requests if args.throughput else 0
    args.max_running = max(*args.batch_size, requests, 1)
    sizes = {1, 16, 64, 128, 192, requests} if requests else {1}
    args.graph_sizes = sorted(sizes | set(args.batch_size))
    args.slots = args.slots or max(
        max(args.batch_size, default=1) * (args.input_len + new),
        *args.prefill,
        requests * 1400,
    )
    plain = "raise" if args.record or args.draws else None
    sides = (
        Side(args, folder, plain),
        Side(args, folder, "raise", record=args.record),
    )
    if args.draws:
        sides[0].leave_out_draws()
    for rows in args.batch_size:
        for side in sides:
            side.start_decoding(rows, args.input_len, new)
        show(
            f"decode {rows}",
            alternate(sides, args.pairs, lambda side, i: side.block(args.block)),
        )
        for side in sides:
            side.drain()
    for length in args.prefill:
        for side in sides:
            side.prefill(length, seed=0)
        show(
            f"prefill {length}",
            alternate(sides, 12, lambda side, i, n=length: side.prefill(n, i + 1)),
        )
    cached = []
    if args.throughput:
        for side in sides:
            if args.fill_cache:
                cached.append(side.fill_cache())
            side.throughput(min(args.requests, 32), seed=0)
        show(
            f"throughput {args.requests}",
            alternate(
                sides,
                args.throughput,
                lambda side, i: side.throughput(args.requests, i + 1),
            ),
        )
    manager = sides[1].scheduler.worker.model_runner.canary_manager
    assert manager is not None and manager.reporter.total == 0
    return manager.counters, cached


def measure_trees(
    args: argparse.Namespace, folder: Path, show: Show
) -> tuple[list[int], list[int]]:
    """Measure paired cycles of each tree; sum the canary's counters over both pools."""
    draft = args.draft_model_path or write_draft_shape(
        args.shape, Path(tempfile.mkdtemp())
    )
    total = [0] * NUM_COUNTERS
    args.max_running = max(args.batch_size)
    args.graph_sizes = sorted(args.batch_size)
    for tree in args.trees:
        speculation = tree.flags() | {
            "speculative_algorithm": args.algorithm,
            "speculative_draft_model_path": str(draft),
        }
        # Room for the longest outputs that these cycles can have, and the reserve.
        cycles = WARM_STEPS + args.block * args.pairs + 96
        new = cycles * (tree.steps + 1)
        reserve = (tree.steps + 1) + alloc_len_per_decode(
            page_size=args.page_size,
            topk=tree.topk,
            num_steps=tree.steps,
            num_draft_tokens=tree.nodes,
        )
        longest = args.input_len + new + reserve + args.page_size
        pages = args.max_running * -(-longest // args.page_size)
        args.slots = pages * args.page_size
        off = Side(args, folder, None, speculation=speculation)
        on = Side(args, folder, "raise", speculation=speculation)
        for rows in args.batch_size:
            for side in (off, on):
                side.start_decoding(rows, args.input_len, new)
            show(
                f"tree {tree.topk},{tree.steps},{tree.nodes} x {rows}",
                alternate(
                    (off, on), args.pairs, lambda side, i: side.block(args.block)
                ),
            )
            for side in (off, on):
                side.stop()
        managers = on.scheduler.worker.canary_managers()
        assert managers and managers[0].reporter.total == 0
        for manager in managers:
            total = [a + b for a, b in zip(total, manager.counters, strict=True)]
        # The next tree's graphs and weights need the memory.
        del off, on, side, managers, manager
        free_memory()
    return total, []


def compare(args: argparse.Namespace) -> None:
    """Compare two schedulers in this process, as the flags specify."""
    global clock
    clock = CLOCKS[args.clock]
    if args.beside != "auto":
        is_always = args.beside == "always"
        launch_order.BESIDE_FROM_TOKENS = 0 if is_always else sys.maxsize
        launch_order.TAIL_BESIDE_HEAD = is_always
        launch_order.LAUNCH_BEHIND_GRAPH = is_always
    args.load_format = "auto" if args.model_path else "dummy"
    folder = Path(args.model_path or write_shape(args.shape, Path(tempfile.mkdtemp())))
    results: dict[str, dict[str, float]] = {}

    def show(name: str, result: dict[str, float]) -> None:
        results[name] = result
        print(
            f"{name:18s} {result['off_ms']:10.3f} {result['on_ms']:10.3f} "
            f"{result['percent']:8.2f} % ({result['low']:.2f} to {result['high']:.2f})",
            flush=True,
        )

    print(f"real data {args.real_data}, sweep interval {args.sweep_interval}")
    print("what                   off ms      on ms  overhead (95 % interval)")
    measure = measure_trees if args.trees else measure_steps
    counters, cached = measure(args, folder, show)
    document = {
        "benchmark": "bench_canary",
        "shape": args.model_path or args.shape,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "real_data": args.real_data,
        "sweep_interval": args.sweep_interval,
        "overlap": not args.disable_overlap_schedule,
        "clock": args.clock,
        "beside": args.beside,
        "cached_slots": cached,
        "input_len": args.input_len,
        "page_size": args.page_size,
        "counters": counters,
        "results": results,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
