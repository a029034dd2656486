"""Cost of the canary inside a stock SGLang: a decode step with it and without.

    python benchmark/engines/bench_sglang_plugin.py             # Llama-3.1-8B's shape
    python benchmark/engines/bench_sglang_plugin.py --model FOLDER --load-format auto

Each turn starts an engine per mode, in processes of their own and one after the other:
without `KV_CANARY`, and with `raise` under each `KV_CANARY_REAL_DATA` that is named. A
step is the difference of a long and a short generation of the same requests, by the
steps in which they differ, so that prefills fall out; an engine's figure is the median
of the rounds. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
CHECKED = "the first forward is checked"
"""Of the log, with a canary."""


def serve(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """In this process: milliseconds per decode step at each batch size, and a digest of
    the answers."""
    from sglang import Engine

    engine = Engine(
        model_path=model,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        attention_backend=args.attention_backend,
        sampling_backend="pytorch",
        grammar_backend="none",
        cuda_graph_bs_decode=args.batches,
        disable_prefill_cuda_graph=True,
        disable_radix_cache=True,
        max_running_requests=max(args.batches),
        max_total_tokens=max(args.batches) * (args.input_len + args.output_len + 16),
        mem_fraction_static=0.8,
        log_level="warning",
    )
    digest, steps = hashlib.sha256(), {}
    try:
        for batch in args.batches:
            prompts = [
                [(7 * row + 13 * i) % 1000 + 10 for i in range(args.input_len)]
                for row in range(batch)
            ]
            found = []
            for number in range(args.rounds + 1):
                seconds = {}
                for length in (args.output_len // 8, args.output_len):
                    params = {
                        "temperature": 0,
                        "max_new_tokens": length,
                        "ignore_eos": True,
                    }
                    began = time.perf_counter()
                    outputs = engine.generate(input_ids=prompts, sampling_params=params)
                    seconds[length] = time.perf_counter() - began
                if number:
                    short, long = seconds.values()
                    steps_between = args.output_len - args.output_len // 8
                    found.append(1e3 * (long - short) / steps_between)
            digest.update(json.dumps([o["output_ids"] for o in outputs]).encode())
            steps[batch] = statistics.median(found)
    finally:
        engine.shutdown()
    return {"ms": steps, "answers": digest.hexdigest()[:16]}


def in_a_process(mode: str, model: str) -> dict[str, Any]:
    """Args: mode: `off`, or a `KV_CANARY_REAL_DATA` under `raise`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("KV_CANARY")}
    if mode != "off":
        env |= {"KV_CANARY": "raise", "KV_CANARY_REAL_DATA": mode}
    done = subprocess.run(
        [sys.executable, *sys.argv, "--serve", "--model", model],
        env=env,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"ms"')]
    if done.returncode or not lines:
        raise SystemExit((done.stdout + done.stderr)[-3000:])
    if (
        mode != "off"
        and "the first forward is checked" not in done.stderr + done.stdout
    ):
        raise SystemExit("nothing was checked:\n" + done.stderr[-2000:])
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a model")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--modes", nargs="+", default=["off", "partial", "all"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        print(json.dumps(serve(args, args.model)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or folder
        if args.model is None:
            Path(folder, "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        turns: list[dict[str, Any]] = []
        for _ in range(args.turns):
            turns.append({})
            for mode in args.modes:
                turns[-1][mode] = in_a_process(mode, model)
                print(f"{mode:8} {turns[-1][mode]}", flush=True)
    if len({found["answers"] for turn in turns for found in turn.values()}) > 1:
        print("the answers differ")
    medians = {
        mode: {
            batch: round(
                statistics.median(turn[mode]["ms"][batch] for turn in turns), 3
            )
            for batch in turns[0][mode]["ms"]
        }
        for mode in args.modes
    }
    print(json.dumps({"benchmark": "bench_sglang_plugin", "decode_ms": medians}))


if __name__ == "__main__":
    main()
