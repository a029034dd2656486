"""Speed of one layer's experts, compared with the floor of the bytes they touch.

python benchmark/kernels/bench_moe.py [--shape qwen3-30b-a3b] [--tokens 1,16,256]
Runs on a CUDA device if there is one, otherwise on the CPU. Prints a table, and as the
last line one JSON object with every measurement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from cuda_timing import bandwidths, graph_us
from torch import Tensor

from sglang.bench_utils.floor import measure_bandwidth
from sglang.srt.layers.ops.activation.op import silu_and_mul
from sglang.srt.layers.ops.linear.op import PackedWeight, linear, pack_weight
from sglang.srt.layers.ops.moe.op import ExpertWeights, moe_experts, pack_experts
from sglang.srt.layers.ops.moe_routing.op import RoutingRule, route

CHOICES = 16
"""Random choices of experts that alternate, so that no cache holds their weights."""
SECONDS = 1.0
Row = dict[str, float]
Choice = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    inner: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in bfloat16."""
        return 2 * 3 * self.hidden * self.inner


SHAPES = {
    "qwen3-30b-a3b": Shape(experts=128, top_k=8, hidden=2048, inner=768),
    "qwen1.5-moe-a2.7b": Shape(experts=60, top_k=4, hidden=2048, inner=1408),
    "gpt-oss-20b": Shape(experts=32, top_k=4, hidden=2880, inner=2880),
}


def random_weights(shape: Shape, device: str) -> ExpertWeights:
    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device).mul_(sizes[-1] ** -0.5).bfloat16()

    return ExpertWeights(
        gate_up=draw(shape.experts, 2 * shape.inner, shape.hidden),
        down=draw(shape.experts, shape.hidden, shape.inner),
        inner=shape.inner,
    )


def random_choices(shape: Shape, tokens: int, device: str) -> list[Choice]:
    rule = RoutingRule(top_k=shape.top_k, renormalise=True)
    return [
        route(torch.randn(tokens, shape.experts, device=device), rule)
        for _ in range(CHOICES)
    ]


def touched(choices: Sequence[Choice]) -> float:
    """Mean number of experts that a call reads."""
    return sum(len(ids.unique()) for _, ids in choices) / len(choices)


class ExpertLoop:
    """The dense product, expert by expert: a comparison for the op on the CPU."""

    def __init__(self, weights: ExpertWeights) -> None:
        self._gate_up = self._packed(weights.gate_up)
        self._down = self._packed(weights.down)

    @staticmethod
    def _packed(stack: Tensor) -> list[PackedWeight]:
        return [pack_weight(matrix) for matrix in stack]

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            inner = silu_and_mul(linear(x[token], self._gate_up[expert]))
            product = linear(inner, self._down[expert])
            out.index_add_(0, token, product * weights[token, slot, None])
        return out


def best_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of the fastest call, in turns for about `SECONDS`."""
    calls[0]()
    best = float("inf")
    end = time.perf_counter() + SECONDS
    for call in itertools.cycle(calls):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
        if time.perf_counter() > end:
            return best * 1e6
    raise AssertionError


def cpu_rows(shape: Shape, tokens: Sequence[int], read_gb_s: float) -> list[Row]:
    plain = random_weights(shape, "cpu")
    loop = ExpertLoop(plain)
    packed = pack_experts(plain)
    del plain
    rows = []
    for count in tokens:
        choices = random_choices(shape, count, "cpu")
        x = torch.randn(count, shape.hidden)
        ops = [partial(moe_experts, x, *choice, packed) for choice in choices]
        loops = [partial(loop, x, *choice) for choice in choices]
        row = one_row(shape, count, choices, best_us(ops), read_gb_s)
        rows.append(row | {"loop_us": best_us(loops)} | routing_row(shape, count))
    return rows


def routing_row(shape: Shape, tokens: int) -> Row:
    logits = torch.randn(tokens, shape.experts)
    rule = RoutingRule(top_k=shape.top_k, renormalise=True)
    return {"route_us": best_us([lambda: route(logits, rule)])}


def cuda_rows(shape: Shape, tokens: Sequence[int], read_gb_s: float) -> list[Row]:
    weights = random_weights(shape, "cuda")
    rule = RoutingRule(top_k=shape.top_k, renormalise=True)
    rows = []
    for count in tokens:
        choices = random_choices(shape, count, "cuda")
        x = torch.randn(count, shape.hidden, device="cuda").bfloat16()
        logits = torch.randn(count, shape.experts, device="cuda")
        us = graph_us([partial(moe_experts, x, *c, weights) for c in choices])
        row = one_row(shape, count, choices, us, read_gb_s)
        row["dense_us"] = dense_us(shape, x, weights)
        row["route_us"] = graph_us([partial(route, logits, rule)] * CHOICES)
        rows.append(row)
    return rows


def dense_us(shape: Shape, x: Tensor, weights: ExpertWeights) -> float:
    """Measure cuBLAS on as many rows, all with one expert's weights: the floor of the
    multiplications.
    """
    rows = x.repeat(shape.top_k, 1)
    inner = rows.new_empty(len(rows), shape.inner)
    return graph_us(
        [
            lambda e=e: (rows @ weights.gate_up[e].t(), inner @ weights.down[e].t())
            for e in range(min(CHOICES, shape.experts))
        ]
    )


def one_row(
    shape: Shape, tokens: int, choices: Sequence[Choice], us: float, read_gb_s: float
) -> Row:
    experts = touched(choices)
    floor = experts * shape.expert_bytes / read_gb_s / 1e3
    gflop = 6e-9 * tokens * shape.top_k * shape.hidden * shape.inner
    return {
        "tokens": tokens,
        "experts": experts,
        "us": us,
        "floor_us": floor,
        "of_floor": floor / us,
        "gflop_s": gflop / us * 1e6,
    }


def print_table(rows: Sequence[Row]) -> None:
    print("  ".join(f"{name:>10}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:10.4g}" for value in row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default=None)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    shape = SHAPES[args.shape]
    is_cuda = torch.cuda.is_available()
    usual = "1,4,16,64,256,1024,4096" if is_cuda else "1,4,16,64,256"
    tokens = [int(count) for count in (args.tokens or usual).split(",")]
    report: dict[str, Any] = {"shape": args.shape, **asdict(shape)}
    if is_cuda:
        read = bandwidths()["read"]
        report |= {"device": torch.cuda.get_device_name(), "read_gb_s": read}
        rows = cuda_rows(shape, tokens, read)
    else:
        read = measure_bandwidth(shape.expert_bytes).read_gb_s
        report |= {"device": platform.processor() or platform.machine()}
        report |= {"threads": torch.get_num_threads(), "read_gb_s": read}
        rows = cpu_rows(shape, tokens, read)
    print(f"{args.shape} on {report['device']}, reading {read:.1f} GB/s")
    print_table(rows)
    print(json.dumps(report | {"rows": rows}))


if __name__ == "__main__":
    main()
