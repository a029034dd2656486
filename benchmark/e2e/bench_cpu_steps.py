"""Decode steps of the whole scheduler on the CPU: the demo model at batch 1.

python benchmark/e2e/bench_cpu_steps.py [--steps 1000]

One request decodes, first without the KV canary, then with `--kv-canary raise`. The
last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from sglang.srt.managers.io_struct import GenerateReq
from sglang.srt.managers.scheduler_components.build import build_scheduler
from sglang.srt.managers.scheduler_components.scheduler_io import ListIO
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

PROMPT = range(5, 149)
WARM_STEPS = 60


def step_ms(kv_canary: str, steps: int) -> list[float]:
    """Milliseconds of each step."""
    io = ListIO()
    scheduler = build_scheduler(
        ServerArgs(
            device="cpu",
            skip_tokenizer_init=True,
            kv_canary=kv_canary,
            max_total_tokens=8192,
        ),
        io,
    )
    params = SamplingParams(
        max_new_tokens=WARM_STEPS + steps + 64, temperature=0.0, ignore_eos=True
    )
    request = GenerateReq(rid="a", input_ids=list(PROMPT), sampling_params=params)
    io.requests.append(request)
    for _ in range(WARM_STEPS):
        scheduler.step()
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
    document = {"benchmark": "bench_cpu_steps", "threads": args.threads}
    print(json.dumps(document | {"steps": args.steps, "results": results}))


if __name__ == "__main__":
    main()
