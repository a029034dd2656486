"""Offline throughput of `Engine` on a real model shape with dummy weights.

python benchmark/e2e/bench_offline.py --shape Llama-3.1-8B
python benchmark/e2e/bench_offline.py --requests 512 --each 1024 --quantization fp8

256 requests at once, prompts of 100 to 1,024 tokens (135k in all), 100 to 1,024 new
tokens each (141k), or exactly --each of both; ignore_eos, greedy; one run of other
prompts comes first. Also the time from the start of the import to a ready engine. The
last line is one JSON document.
"""

from __future__ import annotations

import time

# Draws lengths that add up to 134,974 and 141,036.
LENGTHS_SEED = 11
BEGAN = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

from model_shapes import SHAPES, write_shape  # noqa: E402

from sglang import Engine  # noqa: E402
from sglang.srt.configs.quantization_config import ONLINE_METHODS  # noqa: E402


def draw_lengths(count: int, rng: random.Random) -> list[tuple[int, int]]:
    return [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(count)]


def run(
    engine: Engine, lengths: list[tuple[int, int]], vocab: int, seed: int
) -> dict[str, float]:
    rng = random.Random(seed)
    ids = [[rng.randrange(vocab - 1) for _ in range(n)] for n, _ in lengths]
    params = [
        {"temperature": 0.0, "max_new_tokens": n, "ignore_eos": True}
        for _, n in lengths
    ]
    began = time.perf_counter()
    answers = engine.generate(input_ids=ids, sampling_params=params)
    seconds = time.perf_counter() - began
    assert isinstance(answers, list)
    outputs = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    assert outputs == sum(n for _, n in lengths), "a request ended early"
    return {
        "seconds": seconds,
        "input_tokens": sum(n for n, _ in lengths),
        "output_tokens": outputs,
        "output_tok_s": outputs / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="Llama-3.1-8B")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--each", type=int, help="tokens in, and out, of every request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quantization", choices=ONLINE_METHODS)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kv-canary", default="none")
    parser.add_argument("--attention-backend", default=None)
    parser.add_argument("--tp-size", type=int, default=1)
    args = parser.parse_args()
    lengths = [(args.each, args.each)] * args.requests
    if args.each is None:
        lengths = draw_lengths(args.requests, random.Random(LENGTHS_SEED))
    vocab = SHAPES[args.shape]["vocab_size"]
    with Engine(
        model_path=str(write_shape(args.shape, Path(tempfile.mkdtemp()))),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cuda",
        max_running_requests=args.requests,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        kv_canary=args.kv_canary,
        attention_backend=args.attention_backend,
        tp_size=args.tp_size,
    ) as engine:
        start_s = time.perf_counter() - BEGAN
        run(engine, lengths, vocab, seed=99)
        results = [run(engine, lengths, vocab, seed=i) for i in range(args.repeats)]
    rates = [result["output_tok_s"] for result in results]
    print(f"started in {start_s:.1f} s")
    print("run   seconds  input tok  output tok  output tok/s")
    for i, result in enumerate(results):
        print(
            f"{i:3d}  {result['seconds']:8.2f}  {result['input_tokens']:9.0f}  "
            f"{result['output_tokens']:10.0f}  {result['output_tok_s']:12.0f}"
        )
    print(f"median {statistics.median(rates):.0f} output tok/s")
    print(
        json.dumps(
            {
                "benchmark": "bench_offline",
                "shape": args.shape,
                "each": args.each,
                "tp_size": args.tp_size,
                "quantization": args.quantization,
                "kv_cache_dtype": args.kv_cache_dtype,
                "kv_canary": args.kv_canary,
                "start_s": start_s,
                "output_tok_s": statistics.median(rates),
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
