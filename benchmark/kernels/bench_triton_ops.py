"""Speed of the Triton pointwise, sampling, memory and few-row product kernels.

python benchmark/kernels/bench_triton_ops.py [--only pointwise,move,sampling,gemm,step]
Everything runs inside CUDA graphs on inputs that L2 does not hold. Prints tables, and
as the last line one JSON object with every measurement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from cuda_timing import bandwidths, copies_for, graph_us, weights
from torch import Tensor
from torch.nn import functional

from sglang.srt.layers.ops.activation import op as activation_ops
from sglang.srt.layers.ops.activation import triton as activation
from sglang.srt.layers.ops.linear import op as linear_ops
from sglang.srt.layers.ops.linear import triton as gemm
from sglang.srt.layers.ops.norm import op as norm_ops
from sglang.srt.layers.ops.norm import triton as norm
from sglang.srt.layers.ops.rope import op as rope_ops
from sglang.srt.layers.ops.rope import triton as rope
from sglang.srt.mem_cache.ops.move_kv import triton as move_kv
from sglang.srt.sampling.ops import noise, row_ops
from sglang.srt.sampling.ops.choose_tokens.triton import choose_tokens
from sglang.srt.utils import triton_launch

Row = dict[str, Any]
Call = Callable[[], object]
Product = Callable[[Tensor, Tensor, bool], Tensor]

# N and K of the products of Llama-3.1-8B, whether they end in SiLU * mul.
LLAMA = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "lm_head": (128256, 4096, False),
}
OTHERS = {
    "qkv tp2": (3072, 4096, False),
    "o tp2": (4096, 2048, False),
    "gate_up tp2": (14336, 4096, True),
    "down tp2": (4096, 7168, False),
    "0.6B qkv": (4096, 1024, False),
    "0.6B o": (1024, 2048, False),
    "0.6B gate_up": (6144, 1024, True),
    "0.6B down": (1024, 3072, False),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128)
HIDDEN, INNER, VOCAB, QKV = 4096, 14336, 128256, [4096, 1024, 1024]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Table:
    """Prints and collects rows; `limit` is the GB/s that counts as 100 %."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.rows: list[Row] = []

    def add(self, op: str, rows: int, us: float, nbytes: int, **others: float) -> None:
        gbs = nbytes / us / 1e3
        beside = "  ".join(f"{name} {value:.2f} us" for name, value in others.items())
        print(
            f"{op:>24} {rows:>5} {us:>9.2f} us {gbs:>6.0f} GB/s "
            f"{gbs / self.limit:>6.1%}   {beside}"
        )
        self.rows.append({"op": op, "rows": rows, "us": us, "gbs": gbs, **others})


def turns(make: Callable[[], Call], nbytes: int) -> float:
    """Return us per call; `make` binds a call to fresh inputs of `nbytes` each."""
    return graph_us([make() for _ in range(copies_for(nbytes, most=40))])


def bench_pointwise(table: Table) -> None:
    for rows in (1, 16, 64, 256, 8192):
        pointwise_rows(table, rows)


def pointwise_rows(table: Table, rows: int) -> None:
    weight = random(HIDDEN)
    small = 2 * rows * HIDDEN
    wide = 4 * rows * INNER

    def normed(function: Callable[..., Tensor]) -> Call:
        return partial(function, random(rows, HIDDEN), weight, 1e-5, out=None)

    def added(function: Callable[..., None]) -> Call:
        return partial(
            function, random(rows, HIDDEN), random(rows, HIDDEN), weight, 1e-5
        )

    def gated(function: Callable[..., Tensor]) -> Call:
        return partial(function, random(rows, 2 * INNER), out=None)

    us = turns(lambda: normed(norm.rmsnorm), small)
    torch_us = turns(lambda: normed(norm_ops.rmsnorm_ref), small)
    table.add("rmsnorm", rows, us, 2 * small, torch=torch_us)
    us = turns(lambda: added(norm.fused_add_rmsnorm), 2 * small)
    torch_us = turns(lambda: added(norm_ops.fused_add_rmsnorm_ref), 2 * small)
    table.add("fused_add_rmsnorm", rows, us, 4 * small, torch=torch_us)
    us = turns(lambda: gated(activation.silu_and_mul), wide)
    torch_us = turns(lambda: gated(activation_ops.silu_and_mul_ref), wide)
    table.add("silu_and_mul", rows, us, wide * 3 // 2, torch=torch_us)
    rope_rows(table, rows)


def rope_rows(table: Table, rows: int) -> None:
    cache = torch.randn(8192, 128, device="cuda")
    slots = torch.arange(rows, device="cuda")

    def rotated(function: Callable[..., None], scale: Tensor | None) -> Call:
        heads = [p.unflatten(1, (-1, 128)) for p in random(rows, 6144).split(QKV, 1)]
        pools = [random(rows + 1, 8, 128) for _ in range(2)]
        return partial(
            function,
            *heads,
            positions=slots,
            cos_sin_cache=cache,
            k_cache=pools[0],
            v_cache=pools[1],
            out_cache_loc=slots,
            q_norm_weight=scale,
            k_norm_weight=scale,
            eps=1e-6,
        )

    nbytes = 4 * rows * 6144
    for name, scale in (("rope_store_kv", None), ("qk norm + rope", random(128))):
        us = turns(partial(rotated, rope.rope_store_kv, scale), nbytes)
        torch_us = turns(partial(rotated, rope_ops.rope_store_kv_ref, scale), nbytes)
        table.add(name, rows, us, nbytes, torch=torch_us)


def bench_move(table: Table) -> None:
    buffers = [random(32, 50_000, 8, 128) for _ in range(2)]

    def in_torch(dst: Tensor, src: Tensor) -> None:
        for buffer in buffers:
            buffer.index_copy_(1, dst, buffer.index_select(1, src))

    for moves in (1, 16, 64, 512, 1024, 2048):
        pairs = [
            torch.randperm(50_000, device="cuda")[: 2 * moves].view(2, -1)
            for _ in range(8)
        ]
        us = graph_us(
            [partial(move_kv.move_kv_cache, *buffers, dst=d, src=s) for d, s in pairs]
        )
        torch_us = graph_us([partial(in_torch, d, s) for d, s in pairs])
        table.add("move_kv_cache", moves, us, 2 * 2 * 32 * moves * 2048, torch=torch_us)


def bench_sampling(table: Table) -> None:
    for rows in (1, 16, 64, 256):
        for dtype in (torch.bfloat16, torch.float32):
            sampling_rows(table, rows, dtype)


def sampling_rows(table: Table, rows: int, dtype: torch.dtype) -> None:
    nbytes = rows * VOCAB * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    keys = torch.arange(rows, device="cuda") * 7919
    positions = torch.arange(rows, device="cuda")
    heat = torch.full((rows,), 0.8, device="cuda")
    greedy = torch.zeros(rows, dtype=torch.bool, device="cuda")

    def draw_in_torch(logits: Tensor) -> Tensor:
        probs = torch.softmax(logits.float() / heat[:, None], dim=-1)
        return row_ops.inverse_cdf(probs, noise.uniform(keys, positions))

    def of_logits(function: Callable[[Tensor], Tensor]) -> Callable[[], Call]:
        return lambda: partial(function, random(rows, VOCAB).to(dtype))

    draw = partial(
        choose_tokens,
        temperatures=heat,
        seeds=keys,
        positions=positions,
        greedy_rows=greedy,
    )
    us = turns(of_logits(choose_tokens), nbytes)
    torch_us = turns(of_logits(lambda x: torch.argmax(x.float(), -1)), nbytes)
    table.add(f"greedy {name}", rows, us, nbytes, torch=torch_us)
    us = turns(of_logits(draw), nbytes)
    torch_us = turns(of_logits(draw_in_torch), nbytes)
    table.add(f"draw {name}", rows, us, nbytes, torch=torch_us)


def ours(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    """Multiply as the engine does: the table's kernel, or cuBLAS."""
    if gated:
        return linear_ops.linear_gated(x, weight, "silu")
    return linear_ops.linear(x, weight)


def cublas(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    result = functional.linear(x, weight)
    return activation.silu_and_mul(result, out=None) if gated else result


def bench_gemm(table: Table) -> None:
    for name, (n, k, gated) in {**LLAMA, **OTHERS}.items():
        nbytes = 2 * n * k
        pool = weights(n, k, copies_for(nbytes))
        pool = [pool[i % len(pool)] for i in range(max(8, len(pool)))]
        for rows in ROWS if name in LLAMA else (1, 16, 32, 64):
            x = random(rows, k)
            us = graph_us([partial(ours, x, weight, gated) for weight in pool])
            other = graph_us([partial(cublas, x, weight, gated) for weight in pool])
            is_ours = gemm.choose(x, pool[0], gated=gated) is not None
            label = name if is_ours else f"{name} (is cuBLAS)"
            table.add(label, rows, us, nbytes, cublas=other)


def bench_step(table: Table) -> None:
    """Time norms and products of a Llama-3.1-8B decode step, without attention."""
    layers = [
        {name: weights(n, k, 1)[0] for name, (n, k, _) in LLAMA.items() if n < VOCAB}
        for _ in range(32)
    ]
    head = weights(VOCAB, HIDDEN, 1)[0]
    scale = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    nbytes = head.nbytes + sum(w.nbytes for layer in layers for w in layer.values())

    def step(stream: Tensor, multiply: Product) -> None:
        residual = stream.clone()
        x = norm.rmsnorm(residual, scale, 1e-5, out=None)
        for layer in layers:
            qkv = multiply(x, layer["qkv"], False)
            x = multiply(qkv[:, :HIDDEN], layer["o"], False)
            norm.fused_add_rmsnorm(x, residual, scale, 1e-5)
            x = multiply(x, layer["gate_up"], True)
            x = multiply(x, layer["down"], False)
            norm.fused_add_rmsnorm(x, residual, scale, 1e-5)
        multiply(x, head, False)

    for rows in ROWS:
        stream = random(rows, HIDDEN)
        us = graph_us([partial(step, stream, ours)])
        with triton_launch.without_dependent_launch():
            ordered = graph_us([partial(step, stream, ours)])
            other = graph_us([partial(step, stream, cublas)])
        mixed = graph_us([partial(step, stream, cublas)])
        table.add(
            "step without attention",
            rows,
            us,
            nbytes,
            not_dependent=ordered,
            cublas=other,
            cublas_dependent_pointwise=mixed,
        )


BENCHES = {
    "pointwise": bench_pointwise,
    "move": bench_move,
    "sampling": bench_sampling,
    "gemm": bench_gemm,
    "step": bench_step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(BENCHES))
    chosen = parser.parse_args().only.split(",")
    speeds = bandwidths()
    print(f"copy {speeds['copy']:.0f} GB/s (the 100 %), read {speeds['read']:.0f} GB/s")
    table = Table(speeds["copy"])
    for name in chosen:
        BENCHES[name](table)
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "bandwidths": speeds,
    }
    print(json.dumps({**facts, "rows": table.rows}))


if __name__ == "__main__":
    main()
