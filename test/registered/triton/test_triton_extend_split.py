"""Extend attention of short rows, programs sharing a row's elements, against the torch
reference: interpreted, or compiled on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_problem import (
    DEVICE,
    DTYPES,
    NAN,
    ON_GPU,
    assert_same,
    head_cases,
    make_problem,
    make_sinks,
    random_trees,
)

from sglang.srt.layers.ops.attention.extend import table as extend_table
from sglang.srt.layers.ops.attention.extend.launch import extend_attention
from sglang.srt.layers.ops.attention.extend.table import (
    FLOAT_TILES,
    HALF_TILES,
    ExtendChoice,
    ExtendTile,
    LaunchShape,
    choose_tile,
    heads_per_tile,
)
from sglang.srt.layers.ops.attention.extend_split.launch import (
    ExtendWorkspace,
    extend_split,
    extend_splits,
    extend_workspace,
)
from sglang.srt.layers.ops.attention.op import extend_attention_ref
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import is_full, sampled

register_cpu_ci(est_time=66, suite="cpu")
register_cuda_ci(est_time=120, suite="cuda")

SMALL = ExtendTile(16, 32, 4, 2, False, 16)
WIDE = ExtendTile(64, 64, 4, 2, True, 64)
# The interpreter is slow.
SPLITS = (1, 2, 7) if ON_GPU or is_full() else (1, 7)
TREES = (1, 7, 40) if ON_GPU or is_full() else (1, 40)


@pytest.mark.parametrize("tile", [SMALL, WIDE])
@pytest.mark.parametrize("window", [-1, 1, 50])
def test_causal(tile: ExtendTile, window: int) -> None:
    """One split, splits of several tiles, and more splits than tiles."""
    for dtype in DTYPES if ON_GPU else [torch.float16]:
        problem = make_problem(
            prefix_lens=[0, 130, 63, 5, 0],
            new_lens=[9, 3, 18, 0, 1],
            heads=(2, 1),
            page_size=16 if tile is WIDE else 1,
            dtype=dtype,
        )
        for splits in SPLITS:
            problem.split(tile, splits, window=window)


@pytest.mark.parametrize("tile", [SMALL, WIDE])
@pytest.mark.parametrize("nodes", TREES)
def test_trees(tile: ExtendTile, nodes: int) -> None:
    for dtype in DTYPES if ON_GPU else [torch.float32]:
        problem = make_problem(
            prefix_lens=[0, 64, 91],
            new_lens=[nodes] * 3,
            heads=(2, 1),
            page_size=4,
            dtype=dtype,
        )
        tree_mask = random_trees(3, nodes, seed=nodes)
        for splits in (1, 5):
            problem.split(tile, splits, tree_mask=tree_mask)


@pytest.mark.parametrize(("tile", "window"), [(SMALL, 2), (SMALL, 80), (WIDE, 20)])
def test_windowed_trees(tile: ExtendTile, window: int) -> None:
    problem = make_problem(
        prefix_lens=[0, 91], new_lens=[24] * 2, heads=(2, 1), page_size=4
    )
    tree_mask = random_trees(2, 24, seed=5)
    for splits in (1, 5):
        problem.split(tile, splits, tree_mask=tree_mask, window=window)


def test_sinks_and_caps() -> None:
    """Sinks are weighed once, whatever the number of splits."""
    problem = make_problem(
        prefix_lens=[0, 130, 63],
        new_lens=[9, 3, 4],
        heads=(4, 2),
        dtype=torch.float16,
    )
    for tile, splits in ((SMALL, 7), (WIDE, 1)):
        problem.split(tile, splits, logit_cap=2.0, sinks=make_sinks(4))


@pytest.mark.parametrize(("heads", "head_dim"), head_cases(16, 64, 80, 128, 192, 256))
def test_heads(heads: tuple[int, int], head_dim: int) -> None:
    """Through the table, which has a tile for every group and head size."""
    for dtype in DTYPES:
        problem = make_problem(
            prefix_lens=[167, 0],
            new_lens=[5, 5],
            heads=heads,
            head_dim=head_dim,
            page_size=4,
            dtype=dtype,
            has_row_index=False,
        )
        problem.extend(max_context=192)
        problem.extend(max_context=192, tree_mask=random_trees(2, 5, seed=1))


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_nan_shows_where_it_is_attended_and_nowhere_else(cache: str) -> None:
    """Among the prefix, among the new tokens, and where they share a tile."""
    nodes = 9
    tree_mask = random_trees(2, nodes, seed=3)
    places = [(0, 98), (1, 93), (0, 104), (0, 3)]
    for row, element in sampled(places, key=len, ci=4 if ON_GPU else 2):
        problem = make_problem(
            prefix_lens=[100, 90],
            new_lens=[nodes, nodes],
            heads=(2, 2),
            dtype=torch.float16,
        )
        bad = {"k_cache": problem.k_cache, "v_cache": problem.v_cache}[cache]
        bad[problem.slot(row, element), 1, 5] = NAN
        problem.split(SMALL, 4, tree_mask=tree_mask)
        problem.split(SMALL, 4, tree_mask=tree_mask, window=8)
        problem.split(SMALL, 3, window=6)
        problem.split(WIDE, 1)


def test_a_token_that_attends_nothing_yields_zeros() -> None:
    tree_mask = torch.zeros(1, 40, 40, dtype=torch.bool, device=DEVICE)
    tree_mask[0, 1, 0] = True
    tree_mask[0, 2, 39] = True
    problem = make_problem(prefix_lens=[0], new_lens=[40])
    for splits in (1, 3):
        problem.split(SMALL, splits, tree_mask=tree_mask)


def test_the_row_of_a_tile_is_found_among_many() -> None:
    problem = make_problem(
        prefix_lens=[row % 41 for row in range(37)],
        new_lens=[(5 * row) % 7 for row in range(37)],
        heads=(1, 1),
    )
    problem.split(SMALL, 2)


def test_tokens_after_the_last_row_are_left_alone() -> None:
    """Their cells hold NaN, which the combine kernel must not average."""
    problem = make_problem(prefix_lens=[70, 9, 3], new_lens=[3, 0, 0])
    assert len(problem.q) == 3
    padded = replace(problem, q=problem.q.repeat(2, 1, 1))
    out = torch.full_like(padded.q, 7.0)
    extend_split(
        padded.extend_inputs(out),
        tile=SMALL,
        splits=3,
        workspace=problem.workspace(4096),
    )
    assert torch.isfinite(out).all()
    assert bool((out[3:] == 7.0).all()) and not bool((out[:3] == 7.0).all())


def test_splits_depend_on_shapes_alone_and_fit_the_workspace() -> None:
    tile = ExtendTile(64, 64, 4, 2, True, 64, programs=256)
    shape = LaunchShape(tokens=64, rows=1, q_heads=32, kv_heads=8, head_dim=128)
    workspace = extend_workspace(head_dim=128, max_context=8192, device=DEVICE)
    counts = {
        rows: extend_splits(
            tile, shape._replace(tokens=64 * rows, rows=rows), workspace
        )
        for rows in (1, 2, 4, 16, 500)
    }
    # 32 programs of 64 queries a row.
    assert counts == {1: 8, 2: 4, 4: 2, 16: 1, 500: 1}
    eager = tile._replace(programs=1 << 20)
    for rows in (1, 3, 16):
        tokens = 64 * rows
        several = shape._replace(tokens=tokens, rows=rows)
        splits = extend_splits(eager, several, workspace)
        assert 1 < splits <= 64
        assert tokens * 32 * splits <= workspace.lse.numel()
    short = ExtendWorkspace(
        partial=workspace.partial, lse=workspace.lse, max_context=150
    )
    assert extend_splits(eager, shape._replace(tokens=4), short) == 2


def test_the_table_has_a_tile_for_every_shape() -> None:
    for table in (HALF_TILES, FLOAT_TILES):
        for choices in table.values():
            for choice in choices:
                tile = choice.tile
                assert tile.block_n % min(tile.masked_n, tile.block_n) == 0
            assert (choices[-1].queries, choices[-1].streams) == (math.inf, math.inf)
    for group in (1, 4, 20, 64, 128):
        for head_dim in (8, 64, 96, 128, 256):
            for tokens, rows in ((1, 1), (1, 9), (64, 1), (3072, 48), (1 << 16, 1)):
                shape = LaunchShape(tokens, rows, 2 * group, 2, head_dim)
                tile = choose_tile(shape, itemsize=2)
                assert tile.block_m >= heads_per_tile(group)
    assert choose_tile(LaunchShape(64, 1, 32, 8, 128), itemsize=2).programs > 1
    assert choose_tile(LaunchShape(8192, 1, 32, 8, 128), itemsize=2).programs == 0


def test_extend_takes_the_choice_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A choice without splits takes the kernel of long rows, workspace or not."""
    problem = make_problem(prefix_lens=[70], new_lens=[4], dtype=torch.float16)
    for tile in (SMALL, SMALL._replace(programs=1), SMALL._replace(programs=64)):
        choice = ExtendChoice(math.inf, math.inf, tile)
        monkeypatch.setattr(extend_table, "HALF_TILES", {64: (choice,)})
        problem.extend()
        problem.extend(max_context=256)


def test_a_workspace_that_is_too_small_is_refused() -> None:
    problem = make_problem(prefix_lens=[90], new_lens=[2], head_dim=64)
    small = ExtendWorkspace(
        partial=torch.empty(64 * 8, device=DEVICE),
        lse=torch.empty(8, device=DEVICE),
        max_context=4096,
    )
    with pytest.raises(ValueError, match="holds 8 cells, 2 tokens x 4 heads x 3"):
        extend_split(
            problem.extend_inputs(torch.empty_like(problem.q)),
            tile=SMALL,
            splits=3,
            workspace=small,
        )


@pytest.mark.skipif(not ON_GPU, reason="too long for the interpreter")
@pytest.mark.parametrize("rows", [1, 4, 16, 48])
@pytest.mark.parametrize("new", [4, 6, 64])
@pytest.mark.parametrize("prefix", [1088, 8190])
def test_served_shapes(rows: int, new: int, prefix: int) -> None:
    problem = make_problem(
        prefix_lens=[max(prefix - 37 * row, 0) for row in range(rows)],
        new_lens=[new] * rows,
        heads=(32, 8),
        head_dim=128,
        page_size=64,
        dtype=torch.bfloat16,
    )
    problem.extend(max_context=1 << 17)
    problem.extend(max_context=1 << 17, tree_mask=random_trees(rows, new, seed=new))


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA graph")
@pytest.mark.parametrize("is_tree", [False, True])
def test_a_cuda_graph_serves_other_lengths(is_tree: bool) -> None:
    problem = make_problem(
        prefix_lens=[700, 900, 0],
        new_lens=[5, 5, 5],
        heads=(8, 2),
        dtype=torch.float16,
    )
    workspace = problem.workspace(2048)
    prefix_lens = torch.tensor([1, 1, 1], device=DEVICE)
    tree_mask = random_trees(3, 5, seed=0) if is_tree else None
    out, expected = torch.empty_like(problem.q), torch.empty_like(problem.q)
    common = {
        "page_table": problem.page_table,
        "row_index": problem.row_index,
        "qo_indptr": problem.qo_indptr,
        "prefix_lens": prefix_lens,
        "page_size": 1,
        "sm_scale": problem.sm_scale,
        "tree_mask": tree_mask,
    }
    caches = (problem.k_cache, problem.v_cache)

    def launch() -> None:
        extend_attention(problem.q, *caches, **common, out=out, workspace=workspace)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for lens in ([700, 900, 0], [0, 3, 0], [64, 511, 0]):
        prefix_lens.copy_(torch.tensor(lens))
        out.fill_(NAN)
        graph.replay()
        extend_attention_ref(problem.q, *caches, **common, out=expected)
        assert_same(out, expected)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
