"""`python -m sglang.bench_one_batch`: one batch through the model, in this process.

Latency of the prefill and of each decode step, without scheduler, HTTP or prefix cache,
compared with the floor set by memory bandwidth.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from kv_canary.command_line import ends_with_its_reader
from sglang.bench_utils.floor import (
    BIG_BYTES,
    floor_report,
    measure_bandwidth,
    weight_bytes_per_step,
)
from sglang.bench_utils.forward_runner import ForwardRunner
from sglang.bench_utils.launch import run_cli
from sglang.bench_utils.report import (
    Json,
    format_table,
    print_report,
    provenance,
    rate,
    ratio,
)
from sglang.srt.arg_groups.arg_parser import (
    Arg,
    FlagParser,
    add_fields,
    check_values,
    declared_fields,
    flag_name,
    from_namespace,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.logging import configure_logging

DEFAULT_BATCH_SIZE = (1,)
DEFAULT_INPUT_LEN = (1024,)
DEFAULT_OUTPUT_LEN = (16,)
WARMUP_OUTPUT_LEN = 8
COLUMNS = (
    "batch",
    "input",
    "output",
    "prefill ms",
    "prefill tok/s",
    "decode ms",
    "decode tok/s",
    "total ms",
    "total tok/s",
    "of floor",
)


@dataclass(frozen=True, kw_only=True)
class BenchArgs:
    """The flags of this benchmark in addition to the engine's."""

    batch_size: Annotated[list[int] | None, Arg("Batch sizes; unset: 1.")] = None
    input_len: Annotated[
        list[int] | None, Arg("Prompt lengths in tokens; unset: 1024.")
    ] = None
    output_len: Annotated[
        list[int] | None, Arg("Output lengths in tokens; unset: 16.")
    ] = None
    run_name: Annotated[str, Arg("Label of the run in the report.")] = "default"
    result_filename: Annotated[
        str | None, Arg("File to append the report's line to.")
    ] = None
    seed: Annotated[int, Arg("Seed of the prompts.")] = 1
    log_decode_step: Annotated[
        int, Arg("Print the latency every N decode steps; 0: never.", low=0)
    ] = 0

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("batch_size", "input_len", "output_len"):
            values = getattr(self, name)
            if values is not None and (not values or min(values) < 1):
                raise ValueError(
                    f"{flag_name(name)} {values} must hold numbers from 1 on"
                )

    def shapes(self) -> list[tuple[int, int, int]]:
        """Return every (batch size, input length, output length)."""
        return [
            (batch_size, input_len, output_len)
            for batch_size in self.batch_size or DEFAULT_BATCH_SIZE
            for input_len in self.input_len or DEFAULT_INPUT_LEN
            for output_len in self.output_len or DEFAULT_OUTPUT_LEN
        ]


def parse_args(argv: Sequence[str] | None = None) -> tuple[ServerArgs, BenchArgs]:
    """Parse both kinds of flags; --max-running-requests defaults to the largest batch.

    Raises:
        ValueError: a value is invalid; names the flag.
    """
    parser = FlagParser(
        prog="python -m sglang.bench_one_batch",
        description="Time one batch through the model, without a server.",
        preferred=[declared.flag for declared in declared_fields(BenchArgs)],
    )
    add_fields(parser, BenchArgs)
    ServerArgs.add_flags(parser)
    namespace = parser.parse_args(argv)
    bench_args = BenchArgs(**from_namespace(BenchArgs, namespace))
    if namespace.max_running_requests is None:
        largest = max(batch_size for batch_size, _, _ in bench_args.shapes())
        namespace.max_running_requests = largest
    return ServerArgs(**ServerArgs.given(namespace)), bench_args


def run_one_batch(
    runner: ForwardRunner,
    *,
    batch_size: int,
    input_len: int,
    output_len: int,
    seed: int,
    log_decode_step: int = 0,
) -> Json:
    """Measure the latencies of one batch of random prompts.

    The prefill yields the first token, so there are `output_len - 1` decode steps.

    Raises:
        ValueError: the batch does not fit.
    """
    rng = random.Random(seed)
    vocab = range(runner.vocab_size)
    prompts = [rng.choices(vocab, k=input_len) for _ in range(batch_size)]
    steps: list[float] = []
    runner.synchronize()
    began = last = time.perf_counter()
    try:
        tokens = runner.prefill(prompts)
        runner.synchronize()
        last = time.perf_counter()
        prefill = last - began
        for step in range(output_len - 1):
            tokens = runner.decode(tokens)
            runner.synchronize()
            now = time.perf_counter()
            steps.append(now - last)
            last = now
            if log_decode_step and step % log_decode_step == 0:
                print(f"  decode step {step}: {steps[-1] * 1e3:.3f} ms")
    finally:
        runner.release()
    total = last - began
    median = statistics.median(steps) if steps else 0.0
    return {
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "prefill_latency": prefill,
        "prefill_throughput": rate(batch_size * input_len, prefill),
        "median_decode_latency": median,
        "median_decode_throughput": rate(batch_size, median),
        "total_latency": total,
        "overall_throughput": rate(batch_size * (input_len + output_len), total),
    }


def run_benchmark(
    server_args: ServerArgs, bench_args: BenchArgs, *, floor_bytes: int = BIG_BYTES
) -> Json:
    """Measure every shape, after a warm-up of the same shape; return the report."""
    configure_logging(server_args.log_level)
    runner = ForwardRunner(server_args)
    weight_bytes = weight_bytes_per_step(runner.runner.model)
    bandwidth = measure_bandwidth(weight_bytes, big_bytes=floor_bytes)
    floor = floor_report(weight_bytes, bandwidth)
    results = []
    for batch_size, input_len, output_len in bench_args.shapes():
        for is_warmup in (True, False):
            result = run_one_batch(
                runner,
                batch_size=batch_size,
                input_len=input_len,
                output_len=min(output_len, WARMUP_OUTPUT_LEN)
                if is_warmup
                else output_len,
                seed=bench_args.seed,
                log_decode_step=0 if is_warmup else bench_args.log_decode_step,
            )
        decode_ms = result["median_decode_latency"] * 1e3
        result["floor_share"] = ratio(floor["floor_ms"], decode_ms)
        results.append(result)
    return {
        "benchmark": "one_batch",
        "run_name": bench_args.run_name,
        "model_path": server_args.model_path,
        "dtype": server_args.dtype,
        "attention_backend": server_args.attention_backend,
        "threads": torch.get_num_threads(),
        "floor": floor,
        "results": results,
        **provenance(),
    }


def print_table(report: Json) -> None:
    rows = [
        (
            result["batch_size"],
            result["input_len"],
            result["output_len"],
            result["prefill_latency"] * 1e3,
            result["prefill_throughput"],
            result["median_decode_latency"] * 1e3,
            result["median_decode_throughput"],
            result["total_latency"] * 1e3,
            result["overall_throughput"],
            result["floor_share"],
        )
        for result in report["results"]
    ]
    print(format_table(COLUMNS, rows))
    floor = report["floor"]
    print(
        f"floor of a decode step: {floor['floor_ms']:.2f} ms = "
        f"{floor['weight_bytes'] / 1e6:.1f} MB of weights / "
        f"{floor['read_gb_s']:.1f} GB/s (read; copy {floor['copy_gb_s']:.1f}); "
        f"at the speed of a cache-warm buffer of that size: "
        f"{floor['resident_floor_ms']:.2f} ms"
    )


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    def run() -> int:
        server_args, bench_args = parse_args(argv)
        report = run_benchmark(server_args, bench_args)
        print_table(report)
        print_report(report, output_file=bench_args.result_filename)
        return 0

    return run_cli(run)


if __name__ == "__main__":
    sys.exit(main())
