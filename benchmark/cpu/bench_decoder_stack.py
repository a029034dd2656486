"""Decode steps with the layer stack as one operator, and layer by layer, by turns.

python benchmark/cpu/bench_decoder_stack.py [--pairs 30] [--kv-canary raise]
    [--drafting]

One request of the demo model decodes in one process of one thread; blocks of steps
alternate between both forms. `--drafting`: with the EAGLE3 head that comes with the
model; a step is then drafts, verification and extend. Times are processor time, as
other work may share the machine. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from demo_decoding import demo_decoding

from sglang.bench_utils.workloads import DEMO_DRAFTS
from sglang.srt.layers.attention.paged_backend import PagedAttnBackend
from sglang.srt.managers.scheduler.scheduler import Scheduler

BLOCK_STEPS = 8
# Upper bound; the model has 2,048 positions.
TOKENS_PER_CYCLE = 4
WARM_STEPS = 40
PROMPT = range(5, 69)


def block_us(scheduler: Scheduler) -> float:
    """Microseconds of processor time per step."""
    began = time.process_time_ns()
    for _ in range(BLOCK_STEPS):
        scheduler.step()
    return (time.process_time_ns() - began) / BLOCK_STEPS / 1e3


def find_backends(scheduler: Scheduler) -> list[PagedAttnBackend]:
    """Return the attention backends of the target and of the draft, if any."""
    worker: Any = scheduler.worker
    runners = [worker.model_runner]
    if hasattr(worker, "draft_worker"):
        runners.append(worker.draft_worker.draft_runner)
    return [runner.attn_backend for runner in runners]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--kv-canary", default="none")
    parser.add_argument("--drafting", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    scheduler = demo_decoding(
        kv_canary=args.kv_canary,
        prompt=PROMPT,
        warm=WARM_STEPS,
        tokens=2
        * BLOCK_STEPS
        * args.pairs
        * (TOKENS_PER_CYCLE if args.drafting else 1),
        **(DEMO_DRAFTS if args.drafting else {}),
    )
    backends = find_backends(scheduler)
    ops = [backend.stack_op for backend in backends]
    whole, layers = [], []
    for _ in range(args.pairs):
        for backend, op in zip(backends, ops, strict=True):
            backend.stack_op = op
        whole.append(block_us(scheduler))
        for backend in backends:
            backend.stack_op = None
        layers.append(block_us(scheduler))
    ratios = [b / a for a, b in zip(whole, layers, strict=True)]
    result = {
        "us_whole": statistics.median(whole),
        "us_layers": statistics.median(layers),
        "speedup_median": statistics.median(ratios),
        "speedup_quartiles": statistics.quantiles(ratios)[::2],
    }
    for name, value in result.items():
        print(f"{name:18} {value}")
    print(json.dumps({"benchmark": "bench_decoder_stack"} | vars(args) | result))


if __name__ == "__main__":
    main()
