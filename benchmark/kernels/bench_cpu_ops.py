"""Speed of the native CPU ops against torch, on the shapes of small models.

python benchmark/kernels/bench_cpu_ops.py [--threads N] [--only linear,attention,...]
Prints tables, and as the last line one JSON object with every measurement.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from kv_canary.op import force_reference, native_available
from sglang.bench_utils.floor import measure_bandwidth
from sglang.srt.layers.ops.activation import op as activation
from sglang.srt.layers.ops.attention import op as attention
from sglang.srt.layers.ops.head_linear import op as head_linear
from sglang.srt.layers.ops.linear import op as linear
from sglang.srt.layers.ops.norm import op as norm
from sglang.srt.layers.ops.rope import op as rope

Row = dict[str, Any]


def best_us(function: Callable[[], object], *, budget_s: float = 0.15) -> float:
    """Return the best time of one call in microseconds, over several timed bursts."""
    function()
    begin = time.perf_counter()
    function()
    once = max(time.perf_counter() - begin, 1e-7)
    burst = max(1, int(0.002 / once))
    best = float("inf")
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(burst):
            function()
        best = min(best, (time.perf_counter() - begin) / burst)
    return best * 1e6


def bench_linear() -> list[Row]:
    return [
        linear_row(m, n, k)
        for n, k in ((960, 320), (2048, 320), (320, 1024), (1536, 512), (4096, 512))
        for m in (1, 2, 4, 8, 16, 64, 512)
    ]


def linear_row(m: int, n: int, k: int) -> Row:
    weight = torch.randn(n, k)
    narrow = weight.bfloat16().float()
    transposed = weight.t().contiguous()
    x = torch.randn(m, k)
    out = torch.empty(m, n)
    row: Row = {"op": "linear", "m": m, "n": n, "k": k}
    packed = {"bf16": linear.pack_weight(narrow), "fp32": linear.pack_weight(weight)}
    for name, w in packed.items():
        us = best_us(partial(linear.linear, x, w, out=out))
        row[f"{name}_us"] = us
        row[f"{name}_gb_s"] = w.data.numel() * w.data.element_size() / us / 1e3
        row[f"{name}_gflop_s"] = 2 * m * n * k / us / 1e3
    row["f_linear_us"] = best_us(partial(functional.linear, x, weight))
    row["mm_us"] = best_us(partial(torch.mm, x, transposed, out=out))
    return row


def bench_attention() -> list[Row]:
    return [
        attention_row(hq, hkv, dim, batch, prefix, new)
        for hq, hkv, dim in ((8, 2, 64), (8, 8, 64), (5, 1, 64), (16, 4, 128))
        for batch, prefix, new in (
            (1, 100, 1),
            (1, 1000, 1),
            (1, 8000, 1),
            (16, 500, 1),
            (16, 500, 8),
            (1, 0, 512),
            (1, 1500, 512),
        )
    ]


def attention_row(
    hq: int, hkv: int, dim: int, batch: int, prefix: int, new: int
) -> Row:
    total = prefix + new
    slots = batch * total
    k_cache, v_cache = torch.randn(2, slots, hkv, dim)
    q = torch.randn(batch * new, hq, dim)
    arguments: dict[str, Any] = {
        "page_table": torch.randperm(slots, dtype=torch.int32).view(batch, total),
        "row_index": None,
        "qo_indptr": torch.arange(batch + 1) * new,
        "prefix_lens": torch.full((batch,), prefix),
        "page_size": 1,
        "sm_scale": dim**-0.5,
        "out": torch.empty_like(q),
    }
    us = best_us(partial(attention.extend_attention, q, k_cache, v_cache, **arguments))
    ref_us = best_us(
        partial(attention.extend_attention_ref, q, k_cache, v_cache, **arguments)
    )
    pairs = batch * (new * prefix + new * (new + 1) / 2)
    return {
        "op": "attention",
        "heads": f"{hq}/{hkv}x{dim}",
        "batch": batch,
        "prefix": prefix,
        "new": new,
        "us": us,
        "kv_gb_s": 8 * slots * hkv * dim / us / 1e3,
        "gflop_s": 4 * pairs * hq * dim / us / 1e3,
        "ref_us": ref_us,
    }


def bench_latent() -> list[Row]:
    """Measure decode over latents with DeepSeek's channels, next to the time of their
    bytes.
    """
    read_gb_s = measure_bandwidth(1 << 20).read_gb_s
    return [
        latent_row(heads, batch, prefix, dtype, read_gb_s)
        for dtype in (torch.float32, torch.bfloat16)
        for heads in (16, 128)
        for batch, prefix in ((1, 4096), (8, 4096))
    ]


def latent_row(
    heads: int, batch: int, prefix: int, dtype: torch.dtype, read_gb_s: float
) -> Row:
    rank, rope, value = 512, 64, 128
    slots = batch * prefix
    cache = torch.randn(slots, 1, rank + rope).to(dtype)
    q = torch.randn(batch, heads, rank + rope).to(dtype)
    out = q.new_empty(batch, heads, rank)
    arguments: dict[str, Any] = {
        "page_table": torch.randperm(slots, dtype=torch.int32).view(batch, prefix),
        "row_index": None,
        "read_lens": torch.full((batch,), prefix),
        "page_size": 1,
        "sm_scale": (2 * rope + rope) ** -0.5,
        "out": out,
    }
    caches = (cache, cache[..., :rank])
    us = best_us(partial(attention.decode_attention, q, *caches, **arguments))
    weight = head_linear.pack_heads(torch.randn(heads, value, rank).to(dtype))
    values_us = best_us(partial(head_linear.head_linear, out, weight))
    return {
        "op": "latent decode",
        "dtype": str(dtype).removeprefix("torch."),
        "heads": heads,
        "batch": batch,
        "prefix": prefix,
        "us": us,
        "floor_us": cache.nbytes / read_gb_s / 1e3,
        "kv_gb_s": cache.nbytes / us / 1e3,
        "gflop_s": 2 * slots * heads * (2 * rank + rope) / us / 1e3,
        "values_us": values_us,
    }


def bench_pointwise() -> list[Row]:
    return [row for tokens in (1, 16, 512) for row in pointwise_rows(tokens)]


def pointwise_rows(tokens: int) -> list[Row]:
    hidden, inter, hq, hkv, dim, slots = 512, 1376, 8, 2, 64, 4096
    x, residual = torch.randn(2, tokens, hidden)
    weight = torch.ones(hidden)
    # A rotation keeps the size of q, which every call rotates further.
    angle = torch.rand(slots, dim // 2)
    cases: dict[str, Callable[[], object]] = {
        "rmsnorm": partial(norm.rmsnorm, x, weight, 1e-6, out=torch.empty_like(x)),
        "fused_add_rmsnorm": partial(norm.fused_add_rmsnorm, x, residual, weight, 1e-6),
        "silu_and_mul": partial(
            activation.silu_and_mul,
            torch.randn(tokens, 2 * inter),
            out=torch.empty(tokens, inter),
        ),
        "rope_store_kv": partial(
            rope.rope_store_kv,
            *(
                part.unflatten(1, (-1, dim))
                for part in torch.randn(tokens, (hq + 2 * hkv) * dim).split(
                    (hq * dim, hkv * dim, hkv * dim), dim=1
                )
            ),
            positions=torch.arange(tokens),
            cos_sin_cache=torch.cat((angle.cos(), angle.sin()), dim=1),
            k_cache=torch.zeros(slots, hkv, dim),
            v_cache=torch.zeros(slots, hkv, dim),
            out_cache_loc=torch.randperm(slots)[:tokens],
        ),
    }
    rows: list[Row] = []
    for name, case in cases.items():
        row: Row = {"op": name, "tokens": tokens, "us": best_us(case)}
        residual.normal_()
        with force_reference():
            row["ref_us"] = best_us(case)
        residual.normal_()
        rows.append(row)
    return rows


def bench_overhead() -> list[Row]:
    """Time a call on a tiny row through the op layer: cost of Python and checks."""
    x = torch.randn(1, 32)
    weight = torch.ones(32)
    out = torch.empty(1, 32)
    packed = linear.pack_weight(torch.randn(32, 32))
    heads = torch.randn(1, 1, 32)
    cache = torch.randn(4, 1, 32)
    index = torch.zeros(1, dtype=torch.int64)
    length = index + 1
    table = torch.zeros(1, 4, dtype=torch.int32)
    rotary = torch.randn(4, 32)
    cases: dict[str, Callable[[], object]] = {
        "rmsnorm": lambda: norm.rmsnorm(x, weight, 1e-6, out=out),
        "rmsnorm, allocating": lambda: norm.rmsnorm(x, weight, 1e-6),
        "fused_add_rmsnorm": lambda: norm.fused_add_rmsnorm(out, x, weight, 1e-6),
        "linear": lambda: linear.linear(x, packed, out=out),
        "linear, allocating": lambda: linear.linear(x, packed),
        "rope_store_kv": lambda: rope.rope_store_kv(
            heads,
            heads,
            heads,
            positions=index,
            cos_sin_cache=rotary,
            k_cache=cache,
            v_cache=cache,
            out_cache_loc=index,
        ),
        "decode_attention": lambda: attention.decode_attention(
            heads,
            cache,
            cache,
            page_table=table,
            row_index=index,
            read_lens=length,
            page_size=1,
            sm_scale=1.0,
            out=heads,
        ),
    }
    with torch.inference_mode():
        return [
            {"op": "overhead", "call": name, "us": best_us(case)}
            for name, case in cases.items()
        ]


def print_table(rows: list[Row]) -> None:
    columns = list(rows[0])
    cells = [
        [f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))
    print()


BENCHES = {
    "overhead": bench_overhead,
    "linear": bench_linear,
    "attention": bench_attention,
    "latent": bench_latent,
    "pointwise": bench_pointwise,
}


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default=",".join(BENCHES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    unknown = set(args.only.split(",")) - set(BENCHES)
    if unknown:
        raise ValueError(f"--only: unknown {sorted(unknown)}; known: {list(BENCHES)}")
    level = "torch reference"
    if native_available():
        level = importlib.import_module("sglang_kernels.ops").simd_level()
    print(f"{args.threads} threads, {level}\n")
    result: list[Row] = []
    for name in args.only.split(","):
        rows = BENCHES[name]()
        print_table(rows)
        result += rows
    summary = {
        "machine": platform.processor() or platform.machine(),
        "threads": args.threads,
        "level": level,
        "torch": torch.__version__,
        "rows": result,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
