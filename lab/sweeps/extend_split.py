"""Searches tiles and splits of short extends for the table `extend_table.py`.

python -m lab.sweeps.extend_split --budget 110 --out sweep_extend.json
Compiles the variants in parallel processes, checks and times each in CUDA graphs.
Prints the best per shape, the table's lines, and as the last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.kernels.cuda_timing import graph_us
from sglang.srt.layers.ops.attention.extend import table as extend_table
from sglang.srt.layers.ops.attention.extend.inputs import ExtendInputs
from sglang.srt.layers.ops.attention.extend.launch import extend_attention
from sglang.srt.layers.ops.attention.extend.table import ExtendChoice, ExtendTile
from sglang.srt.layers.ops.attention.extend_split.launch import (
    ExtendWorkspace,
    extend_split,
    extend_workspace,
)
from sglang.srt.layers.ops.attention.op import extend_attention_ref

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64  # Llama-3.1-8B
GROUP = Q_HEADS // KV_HEADS
ROWS, PREFIXES = (1, 4, 16, 48), (1088, 8192)
# KV bytes that consecutive launches cycle through, so that none has its own in L2.
COLD_BYTES = 160 << 20
TARGETS = (132, 264, 396, 528, 1056, 2112)
MAX_ERROR = 2e-2
# Tiles of the unsplit kernels, the baseline: for few queries of a row, for many.
UNSPLIT = {16: (64, 128, 4, 2, True, 32), 256: (64, 64, 4, 3, False, 32)}
LONG_TILES = [
    (block_m, block_n, warps, stages, is_late, masked_n)
    for block_m, block_n, warps, stages, is_late in (
        (64, 64, 4, 2, False),
        (64, 64, 4, 3, False),
        (64, 64, 4, 2, True),
        (64, 64, 4, 3, True),
        (64, 64, 8, 2, False),
        (64, 128, 4, 2, False),
        (64, 32, 4, 3, True),
        (64, 32, 4, 4, False),
        (128, 64, 8, 2, False),
        (128, 64, 8, 3, False),
        (128, 64, 8, 2, True),
        (128, 128, 8, 2, False),
        (128, 32, 8, 3, True),
        (128, 32, 8, 3, False),
        (256, 32, 16, 2, False),
        (256, 64, 16, 2, False),
    )
    for masked_n in (32, 64)
    if masked_n <= block_n
]
SHORT_TILES = [
    (64, 4, 2, True, 32),
    (64, 4, 2, False, 32),
    (64, 4, 2, False, 16),
    (64, 4, 2, False, 64),
    (64, 4, 3, True, 32),
    (64, 4, 3, False, 32),
    (64, 2, 2, False, 32),
    (32, 4, 3, False, 32),
    (32, 2, 3, False, 32),
    (32, 2, 3, False, 16),
    (32, 2, 4, True, 32),
    (128, 4, 2, False, 32),
    (128, 8, 2, False, 32),
]


class Case(NamedTuple):
    """One shape: rows, new tokens and prefix of a row, and the mask."""

    rows: int
    new: int
    prefix: int
    is_tree: bool

    @property
    def total(self) -> int:
        return self.prefix + self.new

    def name(self) -> str:
        mask = "tree" if self.is_tree else "causal"
        return f"rows={self.rows} new={self.new} {mask} prefix={self.prefix}"


class Variant(NamedTuple):
    """A tile with splits; without splits, the kernel of long rows.

    No tile: new K and V come from the inputs.
    """

    tile: ExtendTile | None
    splits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Tensors of one case: several page tables into one pool, used in turns."""

    case: Case
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_new: Tensor
    v_new: Tensor
    tables: list[Tensor]
    tree_mask: Tensor | None
    out: Tensor
    workspace: ExtendWorkspace

    def inputs(self, table: Tensor) -> dict[str, Any]:
        rows, new = self.case.rows, self.case.new
        return {
            "page_table": table,
            "row_index": torch.arange(rows, device="cuda"),
            "qo_indptr": torch.arange(rows + 1, device="cuda") * new,
            "prefix_lens": torch.full((rows,), self.case.prefix, device="cuda"),
            "page_size": PAGE,
            "sm_scale": HEAD_DIM**-0.5,
            "window": -1,
            "tree_mask": self.tree_mask,
        }


def random_trees(rows: int, nodes: int) -> Tensor:
    """Make bool [rows, nodes, nodes]: every node attends itself and a random chain."""
    mask = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate((torch.rand(nodes) * torch.arange(nodes)).tolist()):
        if node:
            mask[node] |= mask[int(parent)]
    return mask.repeat(rows, 1, 1).cuda()


def make_world(case: Case, pool: tuple[Tensor, Tensor], copies: int) -> World:
    columns = -(-case.total // PAGE)
    pages = pool[0].shape[0] // PAGE
    tables = []
    order = torch.randperm(pages, device="cuda", dtype=torch.int32)
    needed = case.rows * columns
    for copy in range(copies):
        used = copy * needed % max(pages - needed, 1)
        own = order[used : used + needed]
        # Every page_size-th column of request rows, as the backend reads them.
        rows = torch.zeros(
            (case.rows, columns * PAGE), dtype=torch.int32, device="cuda"
        )
        rows[:, ::PAGE] = own.view(case.rows, columns) * PAGE
        tables.append(rows[:, ::PAGE])
    tokens = case.rows * case.new
    packed = torch.randn(
        (tokens, Q_HEADS + 2 * KV_HEADS, HEAD_DIM), device="cuda", dtype=torch.bfloat16
    )
    q, k_new, v_new = packed.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
    return World(
        case=case,
        q=q,
        k_cache=pool[0],
        v_cache=pool[1],
        k_new=k_new,
        v_new=v_new,
        tables=tables,
        tree_mask=random_trees(case.rows, case.new) if case.is_tree else None,
        out=torch.empty(
            (tokens, Q_HEADS, HEAD_DIM), device="cuda", dtype=torch.bfloat16
        ),
        workspace=extend_workspace(
            head_dim=HEAD_DIM, max_context=1 << 17, device="cuda"
        ),
    )


def launches(world: World, variant: Variant) -> list[Callable[[], None]]:
    """Return one launch per page table."""
    pool = (world.k_cache, world.v_cache)
    found: list[Callable[[], None]] = []
    for table in world.tables:
        inputs = {**world.inputs(table), "out": world.out}
        if variant.tile is None:
            new = {"k_new": world.k_new, "v_new": world.v_new}
            found.append(partial(extend_attention, world.q, *pool, **new, **inputs))
        elif variant.splits == 0:
            found.append(partial(unsplit, world.q, *pool, tile=variant.tile, **inputs))
        else:
            found.append(
                partial(
                    extend_split,
                    ExtendInputs(world.q, *pool, **inputs),
                    tile=variant.tile,
                    splits=variant.splits,
                    workspace=world.workspace,
                )
            )
    return found


def unsplit(*tensors: Tensor, tile: ExtendTile, **inputs: Any) -> None:
    """Run the kernel of long rows with this tile."""
    table = extend_table.HALF_TILES
    choice = ExtendChoice(math.inf, math.inf, tile)
    extend_table.HALF_TILES = {HEAD_DIM: (choice,)}
    try:
        extend_attention(*tensors, **inputs)
    finally:
        extend_table.HALF_TILES = table


def baselines(case: Case) -> list[Variant]:
    few = min(UNSPLIT) if case.new * GROUP <= 64 else max(UNSPLIT)
    found = [Variant(ExtendTile(*UNSPLIT[few]), 0)]
    if case.new >= 64 and not case.is_tree:
        found.append(Variant(None, 0))
    return found


def candidate_tiles(case: Case) -> list[ExtendTile]:
    queries = case.new * GROUP
    if queries > 64:
        # Trees decide; causal extends of this length mostly take the inputs.
        tiles = [tile for tile in LONG_TILES if case.is_tree or tile[5] == 64]
        return [ExtendTile(*tile) for tile in tiles]
    block_m = max(16, 1 << (queries - 1).bit_length())
    few = SHORT_TILES[:: 3 if case.is_tree else 1]
    found = [ExtendTile(block_m, *tile) for tile in few]
    return [*found, ExtendTile(64, 64, 4, 2, True, 32)]


def base_programs(case: Case, tile: ExtendTile) -> int:
    """Count the programs of a launch without splits, as `extend_splits` does."""
    return case.rows * -(-case.new // (tile.block_m // GROUP)) * KV_HEADS


def candidate_splits(case: Case, tile: ExtendTile, capacity: int) -> list[int]:
    base = base_programs(case, tile)
    most = min(
        -(-case.total // tile.block_n), capacity // (case.rows * case.new * Q_HEADS), 64
    )
    counts = (min(target // base, most) for target in TARGETS)
    return sorted({1, *(count for count in counts if count > 1)})


def warm(task: tuple[Case, Variant]) -> str:
    """Compile one variant in a separate process; the disk cache keeps it."""
    case, variant = task
    shape = (4096, KV_HEADS, HEAD_DIM)
    small = case._replace(rows=min(case.rows, 17), prefix=100)
    try:
        pool = (
            torch.zeros(shape, device="cuda", dtype=torch.bfloat16),
            torch.zeros(shape, device="cuda", dtype=torch.bfloat16),
        )
        launches(make_world(small, pool, 1), variant)[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{case.name()} {variant}: {error!r}"[:300]
    return ""


def compile_all(
    tasks: Iterable[tuple[Case, Variant]], processes: int, limit_s: float
) -> None:
    """Compile every distinct variant, for at most `limit_s` seconds."""
    begin = time.time()
    unique: dict[Any, tuple[Case, Variant]] = {}
    for case, variant in tasks:
        combine = variant.splits.bit_length() if variant.splits > 1 else 0
        key = (variant.tile, variant.splits == 0, case.is_tree, case.rows <= 16)
        unique.setdefault(key, (case, variant))
        unique.setdefault(("combine", combine), (case, variant))
    failed = 0
    with multiprocessing.get_context("spawn").Pool(processes) as workers:
        results = [workers.apply_async(warm, (task,)) for task in unique.values()]
        for result in results:
            try:
                problem = result.get(max(limit_s - (time.time() - begin), 0.01))
            except multiprocessing.TimeoutError:
                failed += 1
                continue
            if problem:
                print(problem, flush=True)
    print(
        f"compiled {len(unique) - failed} of {len(unique)} variants in "
        f"{time.time() - begin:.0f} s",
        flush=True,
    )


def measure(world: World, variant: Variant, expected: Tensor) -> float:
    """Return the microseconds of a launch; infinite if it fails or is wrong."""
    try:
        calls = launches(world, variant)
        world.out.fill_(float("nan"))
        calls[0]()
        difference = (world.out.float() - expected).norm() / expected.norm()
        # New K and V in the inputs differ from the pool's, so only their time counts.
        if variant.tile is not None and not float(difference) < MAX_ERROR:
            print(f"WRONG {world.case.name()} {variant}: {float(difference):.3g}")
            return math.inf
        return graph_us(calls, replays=7)
    except Exception as problem:
        print(f"FAILED {world.case.name()} {variant}: {problem!r}"[:300], flush=True)
        return math.inf


def sweep_case(world: World) -> dict[Variant, float]:
    """Time all tiles at one number of splits, then the best tiles at all of them."""
    case = world.case
    expected = torch.empty_like(world.out)
    extend_attention_ref(
        world.q,
        world.k_cache,
        world.v_cache,
        **world.inputs(world.tables[0]),
        out=expected,
    )
    expected = expected.float()
    found: dict[Variant, float] = {}

    def run(variants: Iterable[Variant]) -> None:
        for variant in variants:
            if variant not in found:
                found[variant] = measure(world, variant, expected)

    capacity = world.workspace.lse.numel()
    options = {
        tile: candidate_splits(case, tile, capacity) for tile in candidate_tiles(case)
    }
    run(baselines(case))
    for tile, splits in options.items():
        wanted = (132 if tile.block_m > 64 else 264) / base_programs(case, tile)
        run([Variant(tile, min(splits, key=lambda n: abs(math.log(n / wanted))))])
    best = sorted(options, key=lambda tile: best_time(found, tile))[:5]
    for tile in best:
        run(Variant(tile, splits) for splits in options[tile])
    return found


def best_time(found: dict[Variant, float], tile: ExtendTile) -> float:
    return min(
        us
        for variant, us in found.items()
        if variant.tile == tile and variant.splits > 0
    )


def num_copies(case: Case) -> int:
    kv_bytes = case.rows * case.total * KV_HEADS * HEAD_DIM * 4
    return max(4, min(24, -(-COLD_BYTES // kv_bytes)))


def show(case: Case, found: dict[Variant, float]) -> None:
    old = "  ".join(
        f"{'inputs' if variant.tile is None else 'unsplit'} {us:.1f}"
        for variant, us in found.items()
        if variant.splits == 0
    )
    print(f"{case.name()}: before {old} us")
    ours = sorted(
        (us, variant) for variant, us in found.items() if variant.splits and us < 1e9
    )
    for us, variant in ours[:4]:
        assert variant.tile is not None
        print(f"   {us:7.2f} us  splits {variant.splits:2d}  {tuple(variant.tile[:6])}")


def suggest(everything: dict[Case, dict[Variant, float]]) -> list[dict[str, Any]]:
    """Choose the variant per new tokens and rows.

    Its times over the masks and prefixes are closest to the best ones.
    """
    lines = []
    groups = {(case.new, case.rows) for case in everything}
    for new, rows in sorted(groups):
        cases = [case for case in everything if (case.new, case.rows) == (new, rows)]
        variants = {v for case in cases for v in everything[case] if v.tile}
        lowest = {case: min(everything[case].values()) for case in cases}

        def regret(
            variant: Variant,
            cases: Sequence[Case] = cases,
            lowest: dict[Case, float] = lowest,
        ) -> float:
            # A variant dropped after the first round counts as half as slow again.
            times = (everything[c].get(variant, 1.5 * lowest[c]) for c in cases)
            return sum(us / lowest[c] for us, c in zip(times, cases, strict=True))

        best = min(variants, key=regret)
        tile = best.tile
        assert tile is not None
        programs = best.splits * base_programs(cases[0], tile)
        mean = regret(best) / len(cases)
        text = (
            f"ExtendChoice({new * GROUP}, {rows * KV_HEADS}, "
            f"ExtendTile({', '.join(map(str, tile[:6]))}, programs={programs})),"
        )
        print(f"{text}  # {best.splits} splits, {mean:.2f} of the best")
        lines.append({"new": new, "rows": rows, "line": text, "regret": mean})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=110, help="seconds in all")
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--out", default="", help="file for every measurement")
    arguments = parser.parse_args()
    begin = time.time()
    torch.manual_seed(0)
    rows = [int(count) for count in arguments.rows.split(",")]
    kinds = ((64, True), (4, False), (6, False), (64, False), (4, True), (6, True))
    cases = [
        Case(count, new, prefix, is_tree)
        for prefix in PREFIXES
        for new, is_tree in kinds
        for count in rows
    ]
    capacity = extend_workspace(head_dim=HEAD_DIM, max_context=1, device="cpu")
    tasks = [
        (case, variant)
        for case in cases
        for variant in (
            *baselines(case),
            *(
                Variant(tile, splits)
                for tile in candidate_tiles(case)
                for splits in candidate_splits(case, tile, capacity.lse.numel())
            ),
        )
    ]
    compile_all(tasks, arguments.processes, 0.6 * arguments.budget)
    most = max(case.rows * -(-case.total // PAGE) * PAGE for case in cases)
    shape = (most, KV_HEADS, HEAD_DIM)
    pool = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        torch.randn(shape, device="cuda", dtype=torch.bfloat16),
    )
    everything: dict[Case, dict[Variant, float]] = {}
    for case in cases:
        if time.time() - begin > arguments.budget:
            print("budget spent before", case.name())
            break
        found = sweep_case(make_world(case, pool, num_copies(case)))
        everything[case] = found
        show(case, found)
    lines = suggest(everything)
    measurements = [
        {**case._asdict(), "tile": variant.tile, "splits": variant.splits, "us": us}
        for case, found in everything.items()
        for variant, us in found.items()
        if us < math.inf
    ]
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(measurements, file)
    best = {
        case.name(): {
            "us": min(found.values()),
            "before_us": min(us for v, us in found.items() if v.splits == 0),
        }
        for case, found in everything.items()
    }
    seconds = round(time.time() - begin)
    report = {"gpu": torch.cuda.get_device_name(), "seconds": seconds, "best": best}
    print(json.dumps({**report, "table": lines}))


if __name__ == "__main__":
    main()
