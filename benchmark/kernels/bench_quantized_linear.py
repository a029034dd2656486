"""Products with quantised weights beside bfloat16, and the floors of both.

python benchmark/kernels/bench_quantized_linear.py [--rows 1,16,64,256,8192]
    [--shape 6144x4096] [--scheme row,block,int4]

Runs on CUDA. The floor of a product is the larger of its weight's bytes over the read
bandwidth and, for many rows, its operations over what cuBLAS reaches in bfloat16 on a
large square (twice that in 8 bits). Prints a table, and as the last line one JSON
object with every measurement.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch
from cuda_timing import bandwidths, copies_for, graph_us, weights
from torch import Tensor

from sglang.srt.layers.ops.linear.op import linear
from sglang.srt.layers.ops.linear.quantized import (
    QuantizedWeight,
    in_runs,
    quantize_rows,
)

# The products of Llama-3.1-8B; gate and up are one.
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
SQUARE = 8192
BLOCK = 128


def by_row(weight: Tensor) -> QuantizedWeight:
    codes, scales = quantize_rows(weight)
    return QuantizedWeight(
        format="e4m3",
        codes=codes,
        scales=scales,
        group_rows=1,
        group_columns=weight.shape[1],
        quantizes_inputs=True,
    )


def by_block(weight: Tensor) -> QuantizedWeight:
    """In blocks of 128 x 128, with the scales of some of their rows: only speed is
    measured."""
    codes, scales = quantize_rows(weight, BLOCK)
    return QuantizedWeight(
        format="e4m3",
        codes=codes,
        scales=scales[::BLOCK].contiguous(),
        group_rows=BLOCK,
        group_columns=BLOCK,
        quantizes_inputs=True,
    )


def of_4_bits(weight: Tensor) -> QuantizedWeight:
    """Random codes with zeros, in groups of 128: only speed is measured."""
    n, k = weight.shape
    shape = (n, k // BLOCK)
    weight = QuantizedWeight(
        format="int4",
        codes=torch.randint(256, (n, k // 2), dtype=torch.uint8, device="cuda"),
        scales=torch.rand(shape, device="cuda") / 64,
        zeros=torch.randint(-8, 8, shape, dtype=torch.int8, device="cuda"),
        group_rows=1,
        group_columns=BLOCK,
    )
    return in_runs(weight)


SCHEMES = {"row": by_row, "block": by_block, "int4": of_4_bits}
BYTES = {"row": 1.0, "block": 1.0, "int4": 0.5}
OPERATIONS = {"row": 2.0, "block": 2.0, "int4": 1.0}
"""Of many rows, relative to bfloat16."""


def peak_flop_us() -> float:
    """Operations per microsecond that cuBLAS reaches in bfloat16."""
    square = torch.randn(SQUARE, SQUARE, device="cuda", dtype=torch.bfloat16)
    return 2 * SQUARE**3 / graph_us([lambda: square @ square] * 3)


def measure(
    n: int, k: int, rows: int, schemes: list[str], *, read_gb_s: float, peak: float
) -> dict[str, Any]:
    copies = copies_for(n * k)
    plain = weights(n, k, copies)
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    work = 2.0 * rows * n * k
    row: dict[str, Any] = {"n": n, "k": k, "rows": rows}
    row["bf16_us"] = graph_us([partial(linear, x, w, out=out) for w in plain])
    row["bf16_floor_us"] = max(2 * n * k / read_gb_s / 1e3, work / peak)
    for scheme in schemes:
        stored = [SCHEMES[scheme](w) for w in plain]
        us = graph_us([partial(linear, x, w, out=out) for w in stored])
        read_us = BYTES[scheme] * n * k / read_gb_s / 1e3
        floor = max(read_us, work / (OPERATIONS[scheme] * peak))
        row[f"{scheme}_us"] = us
        row[f"{scheme}_of_floor"] = floor / us
        row[f"{scheme}_speedup"] = row["bf16_us"] / us
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,4,16,32,64,128,256,1024,8192")
    parser.add_argument("--shape", action="append", help="NxK; unset: Llama-3.1-8B's")
    parser.add_argument("--scheme", default=",".join(SCHEMES))
    args = parser.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in args.shape or ()] or SHAPES
    read, peak = bandwidths()["read"], peak_flop_us()
    device = torch.cuda.get_device_name()
    print(f"{device}: reading {read:.0f} GB/s, {peak / 1e6:.0f} Tflop/s in bfloat16")
    table = []
    for n, k in shapes:
        for rows in map(int, args.rows.split(",")):
            schemes = args.scheme.split(",")
            row = measure(n, k, rows, schemes, read_gb_s=read, peak=peak)
            if not table:
                print("  ".join(f"{name:>14}" for name in row))
            print("  ".join(f"{value:14.4g}" for value in row.values()), flush=True)
            table.append(row)
    head = {"device": device, "read_gb_s": read, "peak_tflops": peak / 1e6}
    print(json.dumps(head | {"rows": table}))


if __name__ == "__main__":
    main()
