"""Searches the tile of attention over expanded latents, and where expansion pays off.

python -m lab.sweeps.latent_expanded --budget 90 --heads 16
Times the call of one layer with DeepSeek's channels with each tile, including its GEMM,
next to the absorbed form, whose surrounding products are timed separately. Prints the
TFLOP/s of query-element pairs, and as the last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.kernels.cuda_timing import graph_us
from sglang.srt.configs.latent_form import PREFIX_BLOCK
from sglang.srt.layers.ops.attention.extend_split.launch import extend_workspace
from sglang.srt.layers.ops.attention.latent.launch import latent_extend_attention
from sglang.srt.layers.ops.attention.latent_expanded import (
    table as latent_expanded_table,
)
from sglang.srt.layers.ops.attention.latent_expanded.launch import (
    Expansion,
    expanded_extend_attention,
    prefix_blocks,
)
from sglang.srt.layers.ops.attention.latent_expanded.table import TileChoice
from sglang.srt.layers.ops.head_linear.op import head_linear

RANK, NOPE, ROPE, VALUE, PAGE = 512, 128, 64, 128, 64
CHANNELS = 320  # the line of the table
MAX_ERROR = 2e-2
TILES = [
    TileChoice(*tile)
    for tile in (
        (128, 64, 8, 3, False),
        (128, 64, 8, 3, True),
        (128, 64, 8, 2, False),
        (128, 64, 8, 2, True),
        (128, 64, 8, 4, False),
        (128, 128, 8, 2, False),
        (128, 32, 8, 4, False),
        (128, 32, 8, 4, True),
        (64, 64, 4, 2, False),
        (64, 64, 4, 2, True),
        (64, 32, 4, 3, False),
        (64, 32, 4, 3, True),
    )
]


class Case(NamedTuple):
    """Rows, and the cached and new tokens of each."""

    rows: int
    prefix: int
    new: int

    def tflop(self, heads: int) -> float:
        """TFLOP of the pairs in the expanded form."""
        pairs = self.new * self.prefix + self.new * (self.new + 1) // 2
        return 2e-12 * self.rows * heads * pairs * (NOPE + ROPE + VALUE)


CASES = [
    Case(1, 0, 8192),
    Case(4, 0, 2048),
    Case(1, 0, 1024),
    Case(1, 8192, 8192),
    Case(1, 32768, 2048),
    Case(8, 4096, 256),
]


class World(NamedTuple):
    """Tensors of one case: queries before and after absorption, results of both."""

    rows: dict[str, Any]
    cache: Tensor
    q: Tensor
    absorbed: Tensor
    out: Tensor
    average: Tensor
    expansion: Expansion


def make_world(case: Case, heads: int) -> World:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    length, tokens = case.prefix + case.new, case.rows * case.new
    columns = -(-length // PAGE)
    order = torch.randperm(case.rows * columns, device="cuda", dtype=torch.int32)
    table = (order * PAGE).view(case.rows, columns)
    cache = torch.randn(order.numel() * PAGE, 1, RANK + ROPE, **options)
    lens = [case.prefix] * case.rows
    rows: dict[str, Any] = {
        "page_table": table,
        "row_index": None,
        "prefix_lens": torch.tensor(lens, device="cuda"),
        "page_size": PAGE,
    }
    element = torch.arange(case.prefix, length, device="cuda")
    slots = (table[:, element // PAGE] + element % PAGE).flatten().long()
    weight = torch.randn(heads * (NOPE + VALUE), RANK, **options).mul_(RANK**-0.5)
    expansion = Expansion(
        weight=weight,
        new_slots=slots,
        prefix=prefix_blocks(**rows, lens=lens, most=PREFIX_BLOCK),
    )
    q = torch.randn(tokens, heads, NOPE + ROPE, **options)
    absorbed = torch.empty(tokens, heads, RANK + ROPE, **options)
    rows["qo_indptr"] = torch.arange(case.rows + 1, device="cuda") * case.new
    rows["sm_scale"] = (NOPE + ROPE) ** -0.5
    return World(
        rows=rows,
        cache=cache,
        q=q,
        absorbed=absorbed,
        out=q.new_empty(tokens, heads, VALUE),
        average=q.new_empty(tokens, heads, RANK),
        expansion=expansion,
    )


def expand(world: World) -> None:
    caches = (world.cache, world.cache[..., :RANK])
    expanded_extend_attention(
        world.q, *caches, **world.rows, out=world.out, expansion=world.expansion
    )


def absorb(world: World, workspace: Any) -> Tensor:
    """Compute the products with the projections and attention over latents."""
    keys, values = world.expansion.weight.view(
        world.q.shape[1], -1, RANK
    ).split_with_sizes([NOPE, VALUE], dim=1)
    nope = world.q[..., :NOPE]
    head_linear(nope, keys.transpose(1, 2), out=world.absorbed[..., :RANK])
    world.absorbed[..., RANK:].copy_(world.q[..., NOPE:])
    caches = (world.cache, world.cache[..., :RANK])
    latent_extend_attention(
        world.absorbed,
        *caches,
        **world.rows,
        out=world.average,
        workspace=workspace,
    )
    return head_linear(world.average, values)


def warm(task: tuple[TileChoice, int]) -> str:
    """Compile the launches of a tile in a separate process; the cache keeps them."""
    tile, heads = task
    latent_expanded_table.HALF_TILES[CHANNELS] = tile
    try:
        for case in (Case(1, 64, 64), Case(2, 64, 64), Case(1, 0, 64), Case(2, 0, 64)):
            expand(make_world(case, heads))
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{tile}: {problem!r}"[:300]
    return ""


def measure(call: Callable[[], object]) -> float:
    return graph_us([call] * 2, replays=7)


def sweep_case(case: Case, heads: int) -> dict[str, float]:
    """Return microseconds of a layer by tile, and of the absorbed form."""
    world = make_world(case, heads)
    workspace = extend_workspace(head_dim=RANK, max_context=1 << 17, device="cuda")
    expected = absorb(world, workspace).float()
    found = {"absorbed": measure(partial(absorb, world, workspace))}
    for tile in TILES:
        latent_expanded_table.HALF_TILES[CHANNELS] = tile
        name = str(tuple(tile))
        try:
            expand(world)
            error = (world.out.float() - expected).norm() / expected.norm()
            if not float(error) < MAX_ERROR:
                print(f"WRONG {case} {name}: {float(error):.3g}")
                continue
            found[name] = measure(partial(expand, world))
        except Exception as problem:
            print(f"FAILED {case} {name}: {problem!r}"[:300], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=90, help="seconds in all")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--processes", type=int, default=12)
    arguments = parser.parse_args()
    begin, heads = time.time(), arguments.heads
    torch.manual_seed(0)
    tasks = [(tile, heads) for tile in TILES]
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as workers:
        for problem in filter(None, workers.map(warm, tasks, chunksize=1)):
            print(problem, flush=True)
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    everything: dict[str, dict[str, float]] = {}
    for case in CASES:
        if time.time() - begin > arguments.budget:
            print("budget spent before", case)
            break
        found = everything[str(tuple(case))] = sweep_case(case, heads)
        print(case)
        for name, us in sorted(found.items(), key=lambda item: item[1]):
            rate = case.tflop(heads) / us * 1e6
            print(f"   {us:9.1f} us  {rate:6.0f} TFLOP/s  {name}", flush=True)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "us": everything}))


if __name__ == "__main__":
    main()
