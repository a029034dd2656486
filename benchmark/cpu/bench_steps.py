"""Decode steps of the whole scheduler on the CPU: the demo model at batch 1.

python benchmark/cpu/bench_steps.py [--steps 1000]

One request decodes, first without the KV canary, then with `--kv-canary raise`. The
last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from demo_decoding import demo_decoding

PROMPT = range(5, 149)
WARM_STEPS = 60


def step_ms(kv_canary: str, steps: int) -> list[float]:
    """Milliseconds of each step."""
    scheduler = demo_decoding(
        kv_canary=kv_canary, prompt=PROMPT, warm=WARM_STEPS, tokens=steps
    )
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        scheduler.step()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    print("canary  median ms  first quartile ms")
    for kv_canary in ("none", "raise"):
        times = step_ms(kv_canary, args.steps)
        median, quartile = statistics.median(times), statistics.quantiles(times)[0]
        results.append({"name": kv_canary, "ms_median": median, "ms_q1": quartile})
        print(f"{kv_canary:6}  {median:9.3f}  {quartile:9.3f}")
    document = {"benchmark": "bench_steps", "threads": args.threads}
    print(json.dumps(document | {"steps": args.steps, "results": results}))


if __name__ == "__main__":
    main()
