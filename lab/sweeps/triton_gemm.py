"""Searches configurations of the few-row product for the table `gemm_table.py`.

python -m lab.sweeps.triton_gemm --budget 120 --out sweep.json
Prints per weight shape and row count the best configurations and cuBLAS, in us.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import time
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmark.kernels.cuda_timing import bandwidths, copies_for, graph_us, weights
from sglang.srt.layers.ops.linear.triton import gemm, gemm_gated
from sglang.srt.layers.ops.linear.triton_table import MAX_ROWS, GemmConfig

# model -> name -> N, K, gated
MODELS: dict[str, dict[str, tuple[int, int, bool]]] = {
    "Llama-3.1-8B": {
        "qkv": (6144, 4096, False),
        "o": (4096, 4096, False),
        "gate_up": (28672, 4096, True),
        "down": (4096, 14336, False),
        "lm_head": (128256, 4096, False),
    },
    "Qwen3-4B": {
        "qkv": (6144, 2560, False),
        "o": (2560, 4096, False),
        "gate_up": (19456, 2560, True),
        "down": (2560, 9728, False),
        "lm_head": (151936, 2560, False),
    },
    "Llama-3.2-1B": {
        "qkv": (3072, 2048, False),
        "o": (2048, 2048, False),
        "gate_up": (16384, 2048, True),
        "down": (2048, 8192, False),
        "lm_head": (128256, 2048, False),
    },
}
SHAPES = dict(MODELS["Llama-3.1-8B"])
"""Shapes of the swept model."""

# Columns of a tile of the one-row kernel -> rows of it and warps.
GEMV_TILES = {
    512: ((4, 2), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8)),
    1024: ((2, 2), (4, 2), (4, 4), (8, 4), (8, 8), (16, 8)),
    2048: ((2, 2), (4, 2), (2, 4), (4, 4), (4, 8), (8, 8)),
    4096: ((2, 2), (2, 4), (4, 4), (2, 8), (4, 8), (8, 8)),
}
MAX_PADDING = 1.25
"""Ratio of the columns in whole tiles to the weight's columns."""
MATRIX_TILES = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (32, 128))
SHARED = 227 * 1024


def configurations(name: str, rows: int) -> list[GemmConfig]:
    n, k, gated = SHAPES[name]
    if rows > MAX_ROWS:
        return tall_configurations() if gated else []
    if rows == 1:
        return [
            GemmConfig(block_n=block_n, block_k=block_k, split_k=0, warps=warps)
            for block_k, tiles in GEMV_TILES.items()
            if -(-k // block_k) * block_k <= MAX_PADDING * k
            for block_n, warps in tiles
        ]
    found = []
    block_m = max(16, 1 << (rows - 1).bit_length())
    for (block_n, block_k), resident in itertools.product(MATRIX_TILES, (1, 2, 3, 4)):
        stages = (SHARED // resident - 2048) // (2 * block_k * (block_n + block_m))
        if stages < 2:
            continue
        tiles = n // block_n
        for split in (1, 2, 3, 4, 6, 8):
            if split > 1 and not 0.6 < tiles * split / (132 * resident) <= 1.0:
                continue
            if split == 1 and tiles < 120:
                continue
            found.append(
                GemmConfig(
                    block_n=block_n,
                    block_k=block_k,
                    split_k=split,
                    stages=min(stages, 10),
                    warps=8 if block_n == 128 else 4,
                )
            )
    return list(dict.fromkeys(found))


def tall_configurations() -> list[GemmConfig]:
    """Return configurations for more than `MAX_ROWS` rows: gated, up to 128."""
    found = []
    for block_n, block_k, warps in itertools.product((64, 128), (64, 128), (4, 8)):
        tile = 2 * block_k * (128 + 2 * block_n)
        if block_n == 128 and warps == 4:
            continue  # sums alone would take all registers
        for resident in (1, 2) if block_n == 64 else (1,):
            stages = min(SHARED // resident // tile, 7)
            if stages < 2:
                continue
            found += [
                GemmConfig(
                    block_n=block_n,
                    block_k=block_k,
                    split_k=1,
                    stages=stages,
                    prefetch=prefetch,
                    warps=warps,
                    is_tall=True,
                )
                for prefetch in (0, 3)
            ]
    return found


def run(config: GemmConfig, x: Any, weight: Any, gated: bool, out: Any = None) -> Any:
    if gated:
        return gemm_gated(x, weight, "silu", config=config, out=out)
    return gemm(x, weight, config=config, out=out)


def warm(task: tuple[GemmConfig, int, int, bool]) -> str:
    """Compile one variant in a separate process; the disk cache keeps it."""
    config, rows, k, gated = task
    x = torch.zeros(rows, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(256, k, device="cuda", dtype=torch.bfloat16)
    try:
        run(config, x, weight, gated)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{task}: {error!r}"[:300]
    return ""


def measure(name: str, rows: int, configs: list[GemmConfig]) -> list[dict[str, Any]]:
    n, k, gated = SHAPES[name]
    nbytes = 2 * n * k
    turns = weights(n, k, copies_for(nbytes))
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, n // 2 if gated else n, device="cuda", dtype=x.dtype)
    launches = [turns[i % len(turns)] for i in range(max(8, len(turns)))]
    product = functional.linear(x, turns[0]).float()
    if gated:
        product = functional.silu(product[:, : n // 2]) * product[:, n // 2 :]
    results = []
    cublas = graph_us([partial(functional.linear, x, w) for w in launches])
    results.append({"config": None, "us": cublas, "gbs": nbytes / cublas / 1e3})
    for config in configs:
        try:
            actual = run(config, x, turns[0], gated).float()
            error = float((actual - product).norm() / product.norm())
            us = graph_us([partial(run, config, x, w, gated, out) for w in launches])
        except Exception as problem:
            print(f"  {name} {rows} {config}: {problem!r}"[:300])
            continue
        results.append(
            {
                "config": dataclasses.asdict(config),
                "us": us,
                "gbs": nbytes / us / 1e3,
                "error": error,
            }
        )
    return results


def compile_all(tasks: list[tuple[GemmConfig, int, int, bool]], pool: Any) -> None:
    begin = time.time()
    unique = {
        (config, max(16, 1 << (rows - 1).bit_length()) if rows > 1 else 1, k, gated): (
            config,
            rows,
            k,
            gated,
        )
        for config, rows, k, gated in tasks
    }
    for problem in pool.imap_unordered(warm, unique.values()):
        if problem:
            print(problem)
    print(f"compiled {len(unique)} variants in {time.time() - begin:.0f} s")


def show(name: str, rows: int, results: list[dict[str, Any]], best: int) -> None:
    for result in sorted(results, key=lambda result: result["us"])[:best]:
        c = result["config"]
        print(
            f"   {result['us']:.2f} us {result['gbs']:.0f} GB/s "
            f"err {result['error']:.1e} n{c['block_n']} k{c['block_k']} "
            f"split{c['split_k']} st{c['stages']} w{c['warps']} pre{c['prefetch']} "
            f"dep{int(c['dependent'])}"
        )


def variants(config: GemmConfig) -> list[GemmConfig]:
    if config.split_k == 0:
        return [dataclasses.replace(config, dependent=False)]
    return [
        dataclasses.replace(config, dependent=False),
        *(
            dataclasses.replace(config, prefetch=tiles)
            for tiles in sorted({1, 2, 4, config.stages})
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,4,16,32,64")
    parser.add_argument("--budget", type=float, default=120)
    parser.add_argument("--out", default="sweep.json")
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--model", choices=sorted(MODELS), default="Llama-3.1-8B")
    arguments = parser.parse_args()
    SHAPES.clear()
    SHAPES.update(MODELS[arguments.model])
    cases = [(int(rows), name) for rows in arguments.rows.split(",") for name in SHAPES]
    begin = time.time()
    everything: dict[str, Any] = {}

    def sweep(configs: dict[tuple[int, str], list[GemmConfig]], best: int) -> None:
        compile_all(
            [
                (config, rows, *SHAPES[name][1:])
                for (rows, name), several in configs.items()
                for config in several
            ],
            pool,
        )
        for (rows, name), several in configs.items():
            if time.time() - begin > arguments.budget:
                print("budget spent before", name, rows)
                break
            cublas, *ours = measure(name, rows, several)
            print(f"{name} rows={rows} cublas {cublas['us']:.2f} us")
            show(name, rows, ours, best)
            known = everything.setdefault(f"{name} {rows}", [cublas])
            known.extend(ours)

    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        sweep({case: configurations(case[1], case[0]) for case in cases}, 2)
        second = {}
        for rows, name in cases:
            ours = everything.get(f"{name} {rows}", [None])[1:]
            top = sorted(ours, key=lambda result: result["us"])[:2]
            second[rows, name] = [
                variant
                for result in top
                for variant in variants(GemmConfig(**result["config"]))
            ]
        print("second round: prefetch and dependence of the best")
        sweep(second, 3)
    everything["bandwidths"] = bandwidths()
    with open(arguments.out, "w", encoding="utf-8") as file:
        json.dump(everything, file)


if __name__ == "__main__":
    main()
