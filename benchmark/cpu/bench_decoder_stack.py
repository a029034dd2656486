"""Decode steps with the layer stack as one operator, and layer by layer, by turns.

python benchmark/cpu/bench_decoder_stack.py [--pairs 60] [--kv-canary raise]

One request of the demo model decodes in one process of one thread; blocks of steps
alternate between both forms. Times are processor time, as other work may share the
machine. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import cast

import torch
from demo_decoding import demo_decoding

from sglang.srt.layers.attention.paged_backend import PagedAttnBackend
from sglang.srt.managers.scheduler import Scheduler

BLOCK_STEPS = 8
WARM_STEPS = 40
PROMPT = range(5, 69)


def block_us(scheduler: Scheduler) -> float:
    """Microseconds of processor time per step."""
    began = time.process_time_ns()
    for _ in range(BLOCK_STEPS):
        scheduler.step()
    return (time.process_time_ns() - began) / BLOCK_STEPS / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--kv-canary", default="none")
    args = parser.parse_args()
    torch.set_num_threads(1)
    scheduler = demo_decoding(
        kv_canary=args.kv_canary,
        prompt=PROMPT,
        warm=WARM_STEPS,
        steps=2 * BLOCK_STEPS * args.pairs,
    )
    backend = cast(PagedAttnBackend, scheduler.worker.model_runner.attn_backend)
    whole_op = backend.stack_op
    whole, layers = [], []
    for _ in range(args.pairs):
        backend.stack_op = whole_op
        whole.append(block_us(scheduler))
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
    print(
        json.dumps(
            {"benchmark": "bench_decoder_stack", "canary": args.kv_canary} | result
        )
    )


if __name__ == "__main__":
    main()
