"""Prefill of the whole scheduler on a real model shape with dummy weights.

python benchmark/e2e/bench_prefill.py --shape Llama-3.1-8B --case 64x1024 1x8192 4x32500
python benchmark/e2e/bench_prefill.py --kv-canary raise --profile

A case is requests x prompt tokens, one new token each, no shared prefix; its time runs
from the first scheduler round to the last result. Also shown is the floor: flops of the
model's products and causal attention over the matrix rate measured in the same run.
With --profile the kernels of each case follow, by time. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from model_shapes import SHAPES, write_shape
from served import build_served

from sglang.bench_utils.report import Json
from sglang.srt.managers.messages.io_struct import GenerateReq
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs


def matrix_rate() -> float:
    """Return the bf16 flops/s of an 8192-cubed random product, median of 10."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    times = []
    for _ in range(13):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.mm(a, b)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return 2 * 8192**3 / statistics.median(times[3:])


def prefill_flops(shape: dict[str, Any], rows: int, length: int) -> float:
    """Count all tokens' products, causal attention, and the head of one token a row."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    q = shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    per_token = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inner
    attention = 4 * q * length * (length + 1) / 2
    layers = shape["num_hidden_layers"]
    head = 2 * hidden * shape["vocab_size"]
    return rows * (layers * (2 * per_token * length + attention) + head)


def run_case(
    scheduler: Scheduler, io: ListIO, rows: int, length: int, seed: int
) -> float:
    """Return the seconds from the first round to the last answer.

    Raises:
        RuntimeError: a request was rejected.
    """
    generator = torch.Generator().manual_seed(seed)
    vocab = scheduler.model_config.vocab_size
    ids = torch.randint(0, vocab, (rows, length), generator=generator).tolist()
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(ids):
        io.requests.append(
            GenerateReq(rid=f"{seed}-{i}", input_ids=prompt, sampling_params=params)
        )
    torch.cuda.synchronize()
    began = time.perf_counter()
    while io.requests or scheduler.has_work():
        scheduler.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    for message in io.responses:
        for output in getattr(message, "outputs", ()):
            reason = output.finish_reason
            if reason is not None and reason.type == "abort":
                raise RuntimeError(f"{rows}x{length}: {reason.message}")
    io.responses.clear()
    return seconds


def profile_kernels(steps: int, work: Callable[[], object]) -> list[Json]:
    """Return microseconds per step of each kernel, slowest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    rows = [
        {
            "kernel": event.key,
            "us": event.self_device_time_total / steps,
            "calls": event.count / steps,
        }
        for event in profile.key_averages()
        if event.self_device_time_total
    ]
    return sorted(rows, key=lambda row: -row["us"])


def print_kernels(kernels: list[Json], most: int = 14) -> None:
    for each in kernels[:most]:
        name = str(each["kernel"])[:60]
        print(f"  {each['us'] / 1e3:9.2f} ms {each['calls']:6.0f} x {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="Llama-3.1-8B")
    parser.add_argument("--case", nargs="+", default=["64x1024", "1x8192"])
    parser.add_argument("--attention-backend", default=None)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-canary", default="none")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    cases = [tuple(map(int, case.split("x"))) for case in args.case]
    rate = matrix_rate()
    io = ListIO()
    scheduler = build_served(
        ServerArgs(
            model_path=str(write_shape(args.shape, Path(tempfile.mkdtemp()))),
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cuda",
            context_length=max(length for _, length in cases) + 64,
            kv_canary=args.kv_canary,
            max_running_requests=64,
            attention_backend=args.attention_backend,
            page_size=args.page_size,
            disable_radix_cache=True,
            disable_cuda_graph=True,
        ),
        io,
    )
    backend = scheduler.server_args.attention_backend
    print(f"matrix rate {rate / 1e12:.0f} TFLOP/s, backend {backend}")
    print("case        ms   (best)    tok/s  floor ms")
    results: list[dict[str, Any]] = []
    for case, (rows, length) in zip(args.case, cases, strict=True):
        run_case(scheduler, io, rows, length, seed=0)
        times = [
            run_case(scheduler, io, rows, length, seed=1 + i)
            for i in range(args.repeats)
        ]
        median = statistics.median(times)
        floor = prefill_flops(SHAPES[args.shape], rows, length) / rate
        results.append(
            {
                "case": case,
                "ms_median": median * 1e3,
                "ms_best": min(times) * 1e3,
                "tok_s": rows * length / median,
                "floor_ms": floor * 1e3,
            }
        )
        print(
            f"{case:9s} {median * 1e3:7.1f} {min(times) * 1e3:8.1f} "
            f"{rows * length / median:8.0f} {floor * 1e3:9.1f}",
            flush=True,
        )
        if args.profile:
            again = partial(run_case, scheduler, io, rows, length, seed=1000)
            results[-1]["kernels"] = profile_kernels(1, again)
            print_kernels(results[-1]["kernels"])
    document = {
        "benchmark": "bench_prefill",
        "shape": args.shape,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "attention_backend": backend,
        "page_size": args.page_size,
        "kv_canary": args.kv_canary,
        "matrix_rate": rate,
        "results": results,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
