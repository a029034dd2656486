"""Timing of CUDA work inside graphs, on inputs that the cache does not hold."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

L2_BYTES = 64 << 20


def graph_us(calls: Sequence[Callable[[], object]], *, replays: int = 15) -> float:
    """Return median microseconds per call of one graph of `calls` in sequence."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        graph.replay()
        times = []
        for _ in range(replays):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return statistics.median(times) * 1e3 / len(calls)


def copies_for(nbytes: int, *, most: int = 64) -> int:
    """Return how many inputs of `nbytes` must alternate so that none stays in L2."""
    return max(2, min(most, -(-6 * L2_BYTES // max(nbytes, 1))))


def weights(n: int, k: int, copies: int) -> list[Tensor]:
    """Return `copies` random bfloat16 [n, k] matrices, products near unit variance."""
    return [
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16).mul_(k**-0.5)
        for _ in range(copies)
    ]


def bandwidths() -> dict[str, float]:
    """Measure the GB/s of a copy (read + write) and of reading alone."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    # A product by one: the copy engine that copy_ takes in a graph is slower.
    copy_us = graph_us([lambda: torch.mul(source, 1.0, out=target)] * 3)
    read_us = graph_us([lambda: torch.sum(source)] * 3)
    nbytes = source.nbytes
    return {"copy": 2 * nbytes / copy_us / 1e3, "read": nbytes / read_us / 1e3}
