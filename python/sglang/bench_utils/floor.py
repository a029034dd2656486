"""Lower bound of a decode step: the bytes of the weights over the memory bandwidth.

Weights that stay in a cache are read faster than this bound, so the bandwidth of a
buffer of the weights' size is also measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn

from sglang.bench_utils.report import Json, rate
from sglang.srt.layers.moe.experts import Experts
from sglang.srt.layers.moe.feed_forward import MoeFeedForward
from sglang.srt.layers.ops.head_linear.op import PackedHeads
from sglang.srt.layers.ops.linear.op import PackedWeight
from sglang.srt.layers.vocab_embedding import VocabEmbedding

# Larger than any cache of the machines in question.
BIG_BYTES = 512 * 2**20
BUDGET_SECONDS = 0.3
MIN_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bandwidth in GB/s (1e9 bytes), best of several runs, with this process's threads.

    Fields:
        read_gb_s: reading a buffer that no cache holds.
        copy_gb_s: bytes read plus bytes written while copying one.
        resident_read_gb_s: reading a buffer of the weights' size repeatedly.
    """

    read_gb_s: float
    copy_gb_s: float
    resident_read_gb_s: float


def measure_bandwidth(
    weight_bytes: int,
    *,
    big_bytes: int = BIG_BYTES,
    budget_seconds: float = BUDGET_SECONDS,
) -> Bandwidth:
    """Measure the three bandwidths of the CPU, for about `budget_seconds` each."""
    source = torch.ones(big_bytes // 4)
    target = torch.empty_like(source)
    resident = torch.ones(max(weight_bytes // 4, 1))

    def best(run: Callable[[], object], num_bytes: int) -> float:
        return _best_gb_s(run, num_bytes, budget_seconds=budget_seconds)

    return Bandwidth(
        read_gb_s=best(lambda: source.sum(), big_bytes),
        copy_gb_s=best(lambda: target.copy_(source), 2 * big_bytes),
        resident_read_gb_s=best(lambda: resident.sum(), weight_bytes),
    )


def weight_bytes_per_step(model: nn.Module) -> int:
    """Return the bytes of weights that one decode step of one row reads, as stored.

    The embedding table does not count, because a step reads single rows of it. The head
    counts, and as many experts as a token uses.
    """
    seen: set[int] = set()
    total = 0
    for module in model.modules():
        if isinstance(module, MoeFeedForward):
            total += module.bytes_of_chosen_experts
        if isinstance(module, VocabEmbedding | Experts):
            continue
        held = [p.data for p in module.parameters(recurse=False)]
        packed = (PackedWeight, PackedHeads)
        held += [v.data for v in vars(module).values() if isinstance(v, packed)]
        for tensor in held:
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                total += tensor.nbytes
    return total


def floor_report(weight_bytes: int, bandwidth: Bandwidth) -> Json:
    """Return the time and tokens/s of a batch-1 step that only reads its weights."""
    seconds = rate(weight_bytes, bandwidth.read_gb_s * 1e9)
    resident = rate(weight_bytes, bandwidth.resident_read_gb_s * 1e9)
    return {
        "weight_bytes": weight_bytes,
        **asdict(bandwidth),
        "floor_ms": seconds * 1e3,
        "floor_tok_s": rate(1, seconds),
        "resident_floor_ms": resident * 1e3,
        "resident_floor_tok_s": rate(1, resident),
    }


def _best_gb_s(
    run: Callable[[], object], num_bytes: int, *, budget_seconds: float
) -> float:
    run()
    best, runs = float("inf"), 0
    end = time.perf_counter() + budget_seconds
    while runs < MIN_RUNS or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
        runs += 1
    return rate(num_bytes, best) / 1e9
