"""Cost of the canary inside a stock vLLM: offline throughput with and without it.

.engines-venv/bin/python lab/engines/bench_vllm_plugin.py --model FOLDER

Each turn starts two engines one after another in separate processes: one with
`KV_CANARY` unset, one with it set. An engine serves the same greedy requests `--rounds`
times after a warm-up; its figure is the best of them. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any


def serve(args: argparse.Namespace) -> dict[str, Any]:
    """Child process: measure tokens per second, seconds of CPU time, and the
    answers.
    """
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=args.model,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=args.requests,
        enable_prefix_caching=True,
        enforce_eager=True,
        seed=0,
    )
    tokenizer = engine.get_tokenizer()
    text = "A key-value cache keeps what attention has read of earlier tokens. " * 20
    ids = tokenizer.encode(text)
    prompts = [
        {"prompt_token_ids": [100 + i, *ids[: args.input_len - 1]]}
        for i in range(args.requests)
    ]
    params = SamplingParams(
        temperature=0.0, max_tokens=args.output_len, ignore_eos=True
    )
    answers: list[list[int]] = []
    rates, cpu = [], []
    for turn in range(args.rounds + 1):
        began, cpu_began = time.perf_counter(), time.process_time()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds, spent = time.perf_counter() - began, time.process_time() - cpu_began
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        if turn:
            rates.append(args.requests * args.output_len / seconds)
            cpu.append(spent)
        engine.reset_prefix_cache()
    return {"tok_s": max(rates), "cpu_s": min(cpu), "answers": answers}


def in_a_process(environ: dict[str, str]) -> dict[str, Any]:
    """Run this command with `--serve`, and return the document that it prints."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("KV_CANARY")}
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    env |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        **environ,
    }
    done = subprocess.run(
        [sys.executable, *sys.argv, "--serve"], env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--mode", default="raise", choices=["log", "raise"])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        print(json.dumps(serve(args)))
        return
    pairs = []
    print("turn  without, tok/s  with, tok/s  ratio  CPU time")
    for turn in range(args.turns):
        plain, checked = in_a_process({}), in_a_process({"KV_CANARY": args.mode})
        if plain["answers"] != checked["answers"]:
            raise SystemExit("the answers differ")
        pairs.append((plain, checked))
        print(
            f"{turn:4} {plain['tok_s']:15.1f} {checked['tok_s']:12.1f} "
            f"{checked['tok_s'] / plain['tok_s']:6.3f} "
            f"{checked['cpu_s'] / plain['cpu_s']:9.3f}",
            flush=True,
        )
    document = {
        "benchmark": "bench_vllm_plugin",
        "model": os.path.basename(args.model.rstrip("/")),
        "mode": args.mode,
        "requests": args.requests,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "without_tok_s": statistics.median(p["tok_s"] for p, _ in pairs),
        "with_tok_s": statistics.median(c["tok_s"] for _, c in pairs),
        "ratio": statistics.median(c["tok_s"] / p["tok_s"] for p, c in pairs),
        "cpu_ratio": statistics.median(c["cpu_s"] / p["cpu_s"] for p, c in pairs),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
