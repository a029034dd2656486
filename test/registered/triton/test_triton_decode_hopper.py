"""Decode attention on Hopper whose programs add up the splits of a row themselves: what
they read at once, the order of what they write, and results beside the reference."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from attention_problem import NAN, ON_GPU, make_problem, make_sinks, on_hopper
from hopper_ahead import compiled

from sglang.srt.layers.ops.attention.decode.launch import decode_splits
from sglang.srt.layers.ops.attention.decode_hopper import launch as decode_hopper
from sglang.srt.layers.ops.attention.decode_hopper.launch import (
    ADDED_REGISTERS,
    MAX_READS,
    QUERIES,
    TILES,
    HopperTile,
    StoredHead,
    added_splits,
    choose_tile,
    decode_hopper_launch,
    places_of,
    splits_that_fit,
)
from sglang.srt.layers.ops.attention.shared.args import Compares
from sglang.srt.utils.triton_launch import MULTIPROCESSORS
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import sampled

register_cpu_ci(est_time=30, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

GROUPS = (1, 2, 3, 4, 8, 16)
SPLITS = (1, 2, 3, 4, 8, 16, 32, 64)
# Query and KV heads, channels.
HEADS = [
    ((32, 8), 128),
    ((8, 1), 64),
    ((2, 2), 128),
    ((3, 1), 64),
    ((16, 1), 128),
    ((16, 4), 256),
    ((3, 1), 256),
]
EVERY_TILE = [
    (compares, head, tile)
    for compares, by_head in TILES.items()
    for head, tiles in by_head.items()
    for tile in tiles
]
# Rows of no elements, one, a tile, one more, and of some and many splits.
LENS = [0, 1, 33, 64, 200, 1000, 2049]
# Of stored K and V; None is the type of the queries.
STORED = [None, torch.float8_e4m3fn, torch.float8_e5m2]


def decode(
    heads: tuple[int, int], head_dim: int, lens: list[int], **options: Any
) -> torch.Tensor:
    kv = options.pop("kv", None)
    problem = make_problem(
        prefix_lens=lens,
        new_lens=[1] * len(lens),
        heads=heads,
        head_dim=head_dim,
        page_size=options.pop("page_size", 1),
        dtype=options.pop("dtype", torch.bfloat16),
    )
    problem = problem if kv is None else problem.stored_as(kv)
    return problem.decode(**options)


# -- what is read at once --------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "warps"),
    sorted({(head.head_dim, tile.warps) for _, head, tile in EVERY_TILE}),
)
def test_threads_share_out_what_is_read_at_once(head_dim: int, warps: int) -> None:
    from sglang.srt.layers.ops.attention.decode_hopper.results import (
        added_heads,
        added_layout,
    )

    for group, splits in product(GROUPS, SPLITS):
        added = added_splits(group=group, head_dim=head_dim, warps=warps, splits=splits)
        if added == 0:
            continue
        heads = int(added_heads(group, QUERIES))
        layout = added_layout(heads, head_dim, warps)
        threads = [
            a * b
            for a, b in zip(layout.threads_per_warp, layout.warps_per_cta, strict=True)
        ]
        sizes = zip((added, heads, head_dim), threads, (1, 1, 4), strict=True)
        parts = [size / (count * width) for size, count, width in sizes]
        assert all(part >= 1 and part.is_integer() for part in parts), (group, splits)
        assert torch.tensor(threads).prod() == 32 * warps
        assert added * heads * head_dim <= ADDED_REGISTERS * 32 * warps
        assert splits <= MAX_READS * added


def test_one_split_and_too_many_are_not_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"group": 4, "head_dim": 128, "warps": 2}
    assert added_splits(**sizes, splits=1) == 0
    at_once = added_splits(**sizes, splits=64)
    assert at_once > 0
    monkeypatch.setattr(decode_hopper, "MAX_READS", 2)
    assert added_splits(**sizes, splits=2 * at_once) == at_once
    assert added_splits(**sizes, splits=2 * at_once + 1) == 0


def test_all_programs_of_a_launch_run_at_once() -> None:
    """Of rows by eight KV heads; where one split has more there is one. Of wide heads
    fewer run at once."""
    head = StoredHead(128, 2)
    wanted = {1: 64, 2: 32, 4: 16, 5: 8, 16: 4, 17: 2, 33: 2, 34: 1, 64: 1, 256: 1}
    for rows, expected in wanted.items():
        splits = decode_splits(rows=rows, programs_per_row=8, max_context=1 << 16)
        places = places_of(head, Compares.NEVER)
        sizes = {"programs": 8 * rows, "places": places}
        assert splits_that_fit(splits, **sizes) == expected
    for compares, by_head in TILES.items():
        for head, (first, *_) in by_head.items():
            places = places_of(head, compares)
            assert places <= first.resident * MULTIPROCESSORS
            assert splits_that_fit(64, programs=4, places=places) * 4 <= places


# -- tiles -----------------------------------------------------------------------------


def rows_of(compares: Compares, head: StoredHead, tile: HopperTile) -> int:
    """The fewest rows of eight KV heads that are computed in this tile."""
    return next(
        rows
        for rows in range(1, 1024)
        if choose_tile(head=head, compares=compares, programs=8 * rows) == tile
    )


@pytest.mark.parametrize(
    ("compares", "head_dim", "rows", "expected"),
    [
        # One wave of 528 places; 640 programs are two of these or one of 792.
        (Compares.NEVER, 128, 64, (32, 4)),
        (Compares.NEVER, 128, 80, (32, 2)),
        (Compares.NEVER, 128, 100, (16, 2)),
        (Compares.NEVER, 128, 128, (16, 2)),
        (Compares.NEVER, 128, 160, (16, 1)),
        (Compares.NEVER, 128, 256, (16, 2)),
        (Compares.NEVER, 64, 98, (64, 2)),
        (Compares.NEVER, 64, 128, (32, 2)),
        (Compares.NEVER, 64, 160, (32, 1)),
        # Of many programs the last wave is a small part.
        (Compares.NEVER, 64, 270, (64, 2)),
        (Compares.IN_TURN, 128, 256, (16, 1)),
        (Compares.ALWAYS, 128, 160, (32, 2)),
        (Compares.ALWAYS, 128, 256, (16, 1)),
    ],
)
def test_the_fullest_waves_win(
    compares: Compares, head_dim: int, rows: int, expected: tuple[int, int]
) -> None:
    head = StoredHead(head_dim, 2)
    tile = choose_tile(head=head, compares=compares, programs=8 * rows)
    assert (tile.block_n, tile.warps) == expected


def test_every_tile_serves_some_batch() -> None:
    for compares, head, tile in EVERY_TILE:
        assert rows_of(compares, head, tile) <= 256


def test_launches_in_splits_take_the_largest_tile() -> None:
    """So that the programs that add up splits have its warps."""
    for compares, by_head in TILES.items():
        for head, tiles in by_head.items():
            for programs in range(1, places_of(head, compares) + 1):
                chosen = choose_tile(head=head, compares=compares, programs=programs)
                assert chosen == tiles[0]


def test_the_next_kernel_starts_early_where_its_weights_are_many() -> None:
    sizes = {"kv_heads": 8, "itemsize": 2, "page_size": 1, "splits": 1}
    for rows, q_heads, head_dim, expected in (
        (1, 32, 64, False),
        (1, 32, 128, True),
        (2, 32, 64, True),
    ):
        launch = decode_hopper_launch(
            rows=rows, q_heads=q_heads, head_dim=head_dim, **sizes
        )
        assert launch.constants["LETS_NEXT_START"] is expected


# -- ahead of time ---------------------------------------------------------------------

# Of a multiprocessor of compute capability 9.0; the driver takes some for a program.
REGISTERS, SHARED_BYTES, DRIVER_BYTES = 65536, 233472, 1024
# Those of the variants below that come first: without and with splits.
ADDED = sampled(TILES[Compares.NEVER], key=lambda head: head.itemsize, ci=1)
ADDING = [(head, splits) for head in ADDED for splits in (1, 8)]


def compile_added() -> list[dict[str, Any]]:
    """Registers, order and products of bytes of kernels whose programs add up splits or
    do not, and compare bytes or do not."""
    import triton
    from test_triton_attention_aot import Variant, compile_kernel

    from sglang.srt.layers.ops.attention.decode_hopper.kernels import (
        decode_hopper_kernel,
    )

    found, texts = [], []
    keep = triton.compile

    def compile_and_keep(*args: Any, **kwargs: Any) -> Any:
        kernel = keep(*args, **kwargs)
        texts.append(kernel.asm["ptx"])
        return kernel

    triton.compile = compile_and_keep
    never = Compares.NEVER
    variants = [(never, head, TILES[never][head][0], s) for head, s in ADDING]
    kinds = sampled(EVERY_TILE, key=lambda kind: (kind[0], kind[1].itemsize), ci=1)
    variants += [(*kind, 1) for kind in kinds]
    for compares, head, tile, splits in variants:
        rows = rows_of(compares, head, tile)
        launch = decode_hopper_launch(
            rows=rows,
            q_heads=32,
            kv_heads=8,
            head_dim=head.head_dim,
            itemsize=head.itemsize,
            page_size=1,
            splits=splits,
            compares=compares,
        )
        assert launch.num_warps == tile.warps
        kv = "*fp8e4nv" if head.itemsize == 1 else None
        report = compile_kernel(Variant(decode_hopper_kernel, launch, 2, kv=kv))
        report |= {"added": launch.constants["ADDED"], "order": order_of(texts[-1])}
        report |= {"compares": int(compares), "resident": tile.resident}
        report["byte_products"] = texts[-1].count(".s32.s8.s8.s32")
        report["lets_start"] = texts[-1].count("griddepcontrol.launch_dependents")
        found.append(report)
    return found


def order_of(ptx: str) -> str:
    """Stores (s), barriers (b), the atomic (a) and loads past L1 (l), as they come."""
    names = {"st.global": "s", "bar.sync": "b", "atom.global": "a", "ld.global.cg": "l"}
    words = re.findall("|".join(map(re.escape, names)), ptx)
    return "".join(names[word] for word in words)


def test_all_stores_come_before_the_atomic_and_registers_do_not_rise() -> None:
    found = compiled(__file__)[: len(ADDING)]
    for alone, adding in zip(found[::2], found[1::2], strict=True):
        assert alone["added"] == 0 and adding["added"] > 0
        assert "a" not in alone["order"]
        before, after = adding["order"].split("a")
        assert re.search("s+b+$", before), before
        # The counter is zero again, then the partial results are read.
        assert re.match("b+sl+", after), after
        assert adding.get("STACK", 0) == 0
        assert adding.get("REG", 0) <= alone.get("REG", 0) + 8


def test_bytes_are_multiplied_without_spilling() -> None:
    """Where layers take turns one of two loops multiplies."""
    for each in compiled(__file__):
        assert (each["byte_products"] > 0) == (each["compares"] != Compares.NEVER)
        assert each.get("STACK", 0) == 0


def test_a_multiprocessor_holds_the_programs_that_tiles_are_chosen_by() -> None:
    for each in compiled(__file__)[len(ADDING) :]:
        threads, registers = 32 * each["warps"], -(-each.get("REG", 0) // 8) * 8
        assert each["resident"] * threads * registers <= REGISTERS, each
        shared = each["shared"] + DRIVER_BYTES
        assert each["resident"] * shared <= SHARED_BYTES, each


def test_the_next_kernel_is_let_start() -> None:
    for each in compiled(__file__):
        is_let = "'LETS_NEXT_START': True" in each["constants"]
        assert each["lets_start"] == is_let


# -- results ---------------------------------------------------------------------------


@on_hopper
@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv", STORED)
def test_heads(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, kv: torch.dtype | None
) -> None:
    sinks = make_sinks(heads[0], dtype=dtype)
    for options in (
        {"max_context": 64},
        {"max_context": 4096},
        {"max_context": 256, "sinks": sinks},
        {"max_context": 4096, "sinks": sinks, "window": 700, "page_size": 16},
        {"max_context": 1024, "logit_cap": 5.0},
    ):
        decode(heads, head_dim, LENS, dtype=dtype, kv=kv, **options)


@on_hopper
@pytest.mark.parametrize("kv", STORED[1:])
def test_queries_of_any_size_over_8_bits(kv: torch.dtype) -> None:
    """Products run in float16, which would not hold these queries. Rows of infinity,
    NaN and zeros, too."""
    problem = make_problem(
        prefix_lens=[300] * 9,
        new_lens=[1] * 9,
        heads=(8, 2),
        head_dim=128,
        dtype=torch.bfloat16,
    ).stored_as(kv)
    sizes = (1e-38, 1e-30, 1e-6, 1.0, 1e6, 0.0)
    for row, size in enumerate(sizes):
        problem.q[row] *= size
        # One channel alone is large.
        problem.q[row, :, 5] *= 1e4 if size < 1e4 else 1.0
    problem.q[6, 0, 3], problem.q[7, 0, 3] = NAN, float("inf")
    # Scores of about one, and of very many; also those next to which a weight's
    # exponent is rounded.
    inverses = [min(1 / max(size, 1e-30), 1e30) for size in sizes]
    for scale in (1.0, *inverses, *(10.0**power for power in range(2, 10))):
        replace(problem, sm_scale=scale * 128**-0.5).decode()


@on_hopper
@pytest.mark.parametrize("kv", STORED[1:])
def test_every_code_of_8_bits(kv: torch.dtype) -> None:
    """A row attends one element, so its result is V: every code, NaN and infinity."""
    problem = make_problem(
        prefix_lens=[0, 0], new_lens=[1, 1], heads=(4, 1), head_dim=128,
        dtype=torch.bfloat16,
    )  # fmt: skip
    problem = problem.stored_as(kv)
    codes = torch.arange(256, dtype=torch.uint8, device=problem.q.device).view(kv)
    for row in range(2):
        slot = problem.slot(row, 0)
        problem.k_cache[slot] = torch.zeros_like(problem.k_cache[slot])
        problem.v_cache[slot, 0] = codes.view(2, 128)[row]
    found = problem.decode().float()
    expected = codes.float().view(2, 1, 128).expand(2, 4, 128)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@on_hopper
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("head", "tile"),
    sorted({(h, tile) for compares, h, tile in EVERY_TILE if not compares}),
)
def test_tiles_of_many_rows(head: StoredHead, tile: HopperTile, page_size: int) -> None:
    rows = rows_of(Compares.NEVER, head, tile)
    kv = STORED[1] if head.itemsize == 1 else None
    lens = [LENS[i % len(LENS)] // (1 + i % 3) for i in range(rows)]
    sinks = make_sinks(32, dtype=torch.bfloat16)
    for options in ({}, {"sinks": sinks, "window": 150}):
        decode((32, 8), head.head_dim, lens, page_size=page_size, kv=kv, **options)


@on_hopper
def test_launches_of_other_rows_and_splits_share_a_workspace() -> None:
    many = make_problem(
        prefix_lens=[900, 40, 0, 2000, 300, 64, 1],
        new_lens=[1] * 7,
        heads=(32, 8),
        head_dim=128,
        dtype=torch.bfloat16,
    )
    few = make_problem(
        prefix_lens=[1500, 3],
        new_lens=[1, 1],
        heads=(32, 8),
        head_dim=128,
        dtype=torch.bfloat16,
    )
    workspace = many.decode_workspace(4096)
    for _ in range(3):
        many.decode(workspace=workspace)
        few.decode(workspace=workspace)
        few.decode(workspace=workspace, window=100)


@on_hopper
@pytest.mark.parametrize("kv", STORED)
@pytest.mark.parametrize("lens", [[1087], [1087] * 16, [30_000, 5, 800, 2000]])
def test_results_are_the_same_bits_whoever_is_last(
    lens: list[int], kv: torch.dtype | None
) -> None:
    problem = make_problem(
        prefix_lens=lens,
        new_lens=[1] * len(lens),
        heads=(32, 8),
        head_dim=128,
        dtype=torch.bfloat16,
    )
    problem = problem if kv is None else problem.stored_as(kv)
    workspace = problem.decode_workspace(32_768)
    first = problem.decode(workspace=workspace)
    for _ in range(20):
        workspace.partial.fill_(NAN)
        workspace.lse.fill_(NAN)
        assert torch.equal(problem.decode(workspace=workspace), first)


@on_hopper
def test_both_ways_of_adding_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of the other launch stays in use where splits are many."""
    added = decode((32, 8), 128, LENS)
    monkeypatch.setattr(decode_hopper, "MAX_READS", 0)
    launch = decode_hopper_launch(
        rows=len(LENS),
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        itemsize=2,
        page_size=1,
        splits=8,
    )
    assert launch.constants["ADDED"] == 0
    torch.testing.assert_close(decode((32, 8), 128, LENS), added, rtol=8e-3, atol=8e-3)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA graph")
def test_a_workspace_is_not_made_inside_a_capture() -> None:
    problem = make_problem(prefix_lens=[90], new_lens=[1])
    with (
        pytest.raises(RuntimeError, match="inside a graph capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        problem.decode_workspace(512)


if __name__ == "__main__":
    if "--compile" in sys.argv:
        print(json.dumps(compile_added()))
        raise SystemExit(0)
    raise SystemExit(pytest.main([__file__]))
