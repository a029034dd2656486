"""Decode steps of the whole scheduler on a real model shape with dummy weights.

python benchmark/e2e/bench_decode.py --shape Llama-3.1-8B --batch-size 1 16 64 256

With --temperature, --top-p, --top-k or --min-p tokens are drawn; with --tp-size the
model is spread over as many GPUs. Requests of
--input-len tokens are prefilled, then decode together; a step is the time
between two rounds of the scheduler loop once all of them run. Also shown: the host's
time without waiting for the device, the floor from the bytes of weights and KV over the
read bandwidth measured in the same run, and the step's matrix products alone.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from model_shapes import SHAPES, write_shape
from served import build_served, first_of_ranks

from sglang.srt.configs.attention_backends import supported_names
from sglang.srt.configs.quantization_config import ONLINE_METHODS
from sglang.srt.managers.batch.forward_result import GenerationBatchResult
from sglang.srt.managers.messages.io_struct import (
    FlushCacheReq,
    GenerateReq,
    ShutdownReq,
)
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

WARM_STEPS = 8
CHUNK = 8192


class WaitClock:
    """Time that the host spends blocked on results."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._wait = GenerationBatchResult.wait

    def install(self) -> None:
        clock = self

        def wait(result: GenerationBatchResult) -> None:
            began = time.perf_counter()
            clock._wait(result)
            clock.seconds += time.perf_counter() - began

        GenerationBatchResult.wait = wait  # type: ignore[method-assign]


def read_bandwidth() -> float:
    """Return the bytes per second of summing 8 GiB, best of 5."""
    data = torch.empty(2**32, dtype=torch.float16, device="cuda").zero_()
    best = 0.0
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        data.view(torch.float32).sum()
        stop.record()
        torch.cuda.synchronize()
        best = max(best, data.nbytes / (start.elapsed_time(stop) / 1e3))
    return best


def gemm_ms(shape: dict[str, Any], rows: int, ranks: int) -> float:
    """Time the matrix products of one decode step of a rank alone, through cuBLAS in a
    graph."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"] // ranks
    head_dim = shape["head_dim"]
    q = shape["num_attention_heads"] * head_dim // ranks
    kv = shape["num_key_value_heads"] * head_dim // ranks
    sizes = [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]
    layers = shape["num_hidden_layers"]
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    weights = [[torch.randn(s, **options) for s in sizes] for _ in range(layers)]
    head = torch.randn(shape["vocab_size"] // ranks, hidden, **options)
    inputs = {k: torch.randn(rows, k, **options) for k in {s[1] for s in sizes}}

    def run() -> None:
        for layer in weights:
            for weight in layer:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        torch.nn.functional.linear(inputs[hidden], head)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(12):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def weight_bytes_of_a_step(model: torch.nn.Module, shape: dict[str, Any]) -> int:
    """Bytes of the weights that a decode step reads: all, but the rows of an embedding
    that is not the head too."""
    every = sum(p.nbytes for p in model.parameters())
    if shape["tie_word_embeddings"]:
        return every
    return every - model.get_parameter("model.embed_tokens.weight").nbytes


def measure(
    scheduler: Scheduler,
    io: ListIO,
    clock: WaitClock,
    args: argparse.Namespace,
    rows: int,
) -> dict[str, float]:
    vocab = scheduler.model_config.vocab_size
    generator = torch.Generator().manual_seed(rows)
    # The first ones may decode between the chunks of the last.
    chunks = rows * (1 + args.input_len // CHUNK)
    for i in range(rows):
        ids = torch.randint(0, vocab, (args.input_len,), generator=generator)
        params = SamplingParams(
            max_new_tokens=args.steps + 64 + chunks,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            sampling_seed=i,
            ignore_eos=True,
        )
        io.requests.append(
            GenerateReq(
                rid=f"{rows}-{i}", input_ids=ids.tolist(), sampling_params=params
            )
        )
    began = time.perf_counter()
    while True:
        scheduler.step()
        running = 0 if scheduler.running is None else len(scheduler.running)
        if running == rows and not scheduler.waiting:
            break
    torch.cuda.synchronize()
    prefill_s = time.perf_counter() - began
    for _ in range(WARM_STEPS):
        scheduler.step()
    clock.seconds = 0.0
    steps, loop_began = [], time.perf_counter()
    for _ in range(args.steps):
        before = time.perf_counter()
        scheduler.step()
        steps.append(time.perf_counter() - before)
    total = time.perf_counter() - loop_began
    waited = clock.seconds
    assert scheduler.running is not None and len(scheduler.running) == rows
    while scheduler.has_work():
        scheduler.step()
    io.requests.append(FlushCacheReq(call_id=0))
    scheduler.step()
    io.responses.clear()
    return {
        "rows": rows,
        "ms_median": statistics.median(steps) * 1e3,
        "ms_mean": total / args.steps * 1e3,
        "host_ms": (total - waited) / args.steps * 1e3,
        "prefill_tok_s": rows * args.input_len / prefill_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="Llama-3.1-8B")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--context-length", type=int, default=16384)
    parser.add_argument("--attention-backend", choices=supported_names("cuda"))
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--disable-custom-all-reduce", action="store_true")
    parser.add_argument("--quantization", choices=ONLINE_METHODS)
    parser.add_argument("--fp8-gemm-backend", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kv-canary", default="none")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--min-p", type=float, default=0.0)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    bandwidth = read_bandwidth()
    gemms = {rows: gemm_ms(shape, rows, args.tp_size) for rows in args.batch_size}
    torch.cuda.empty_cache()
    server_args = ServerArgs(
        model_path=str(write_shape(args.shape, Path(tempfile.mkdtemp()))),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cuda",
        context_length=args.context_length,
        chunked_prefill_size=CHUNK,
        max_running_requests=max(args.batch_size),
        cuda_graph_bs=sorted(args.batch_size),
        disable_radix_cache=True,
        attention_backend=args.attention_backend,
        page_size=args.page_size,
        tp_size=args.tp_size,
        disable_custom_all_reduce=args.disable_custom_all_reduce,
        kv_canary=args.kv_canary,
        quantization=args.quantization,
        fp8_gemm_runner_backend=args.fp8_gemm_backend,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    with first_of_ranks(server_args):
        document = run(args, server_args, shape, gemms, bandwidth)
    print(json.dumps(document))


def run(
    args: argparse.Namespace,
    server_args: ServerArgs,
    shape: dict[str, Any],
    gemms: dict[int, float],
    bandwidth: float,
) -> dict[str, Any]:
    """Measure all batch sizes. Returns the document."""
    io, clock = ListIO(), WaitClock()
    began = time.perf_counter()
    scheduler = build_served(server_args, io)
    start_s = time.perf_counter() - began
    clock.install()
    weight_bytes = weight_bytes_of_a_step(scheduler.worker.model_runner.model, shape)
    kv = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"]
    pool = scheduler.worker.model_runner.token_to_kv_pool
    kv_bytes = kv * shape["head_dim"] * pool.dtype.itemsize // args.tp_size
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s, started in {start_s:.1f} s")
    print("batch  step ms  (mean)  host ms  floor ms  GEMMs ms  prefill tok/s")
    results = []
    for rows in args.batch_size:
        result = measure(scheduler, io, clock, args, rows)
        context = args.input_len + WARM_STEPS + args.steps / 2
        moved = weight_bytes + rows * context * kv_bytes
        result |= {"floor_ms": moved / bandwidth * 1e3, "gemm_ms": gemms[rows]}
        results.append(result)
        print(
            f"{rows:5d}  {result['ms_median']:7.3f}  {result['ms_mean']:6.3f}  "
            f"{result['host_ms']:7.3f}  {result['floor_ms']:8.3f}  "
            f"{result['gemm_ms']:8.3f}  {result['prefill_tok_s']:10.0f}",
            flush=True,
        )
    io.requests.append(ShutdownReq())
    scheduler.run_event_loop()
    return {
        "benchmark": "bench_decode",
        "shape": args.shape,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "input_len": args.input_len,
        "attention_backend": scheduler.worker.model_runner.attn_backend.name,
        "page_size": args.page_size,
        "tp_size": args.tp_size,
        "kv_canary": args.kv_canary,
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "read_bandwidth": bandwidth,
        "start_s": start_s,
        "results": results,
    }


if __name__ == "__main__":
    main()
