"""Extend attention that takes new K and V from its inputs, against the references."""

from __future__ import annotations

import itertools
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
)

from sglang.srt.layers.ops.attention.extend.launch import extend_attention
from sglang.srt.layers.ops.attention.extend_dense import launch as dense_module
from sglang.srt.layers.ops.attention.extend_dense.launch import reads_new
from sglang.srt.layers.ops.attention.op import extend_attention_ref
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import is_full, sampled

register_cpu_ci(est_time=22, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")


def windows_of(*windows: int) -> tuple[int, ...]:
    """All of them; in CI the interpreter leaves out the last."""
    return windows if ON_GPU or is_full() else windows[:-1]


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any length take new K and V from the inputs."""
    monkeypatch.setattr(dense_module, "MIN_TOKENS_PER_ROW", 0)


HALF_DTYPES = [dtype for dtype in DTYPES if dtype.itemsize == 2]


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(
    ("page_size", "window"),
    sampled(
        itertools.product([1, 16], [-1, 1, 50, 100]),
        key=lambda case: case[0],
        ci=4 if ON_GPU else 2,
    ),
)
def test_extend_reads_new_kv_from_the_inputs(
    dtype: torch.dtype, page_size: int, window: int
) -> None:
    make_problem(
        prefix_lens=[0, 130, 64, 5, 17, 0],
        new_lens=[37, 3, 150, 0, 1, 70],
        page_size=page_size,
        dtype=dtype,
    ).with_new_kv().extend(window=window)


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize(("prefix", "new"), [(5, 0), (0, 1), (130, 64), (70, 90)])
def test_extend_of_new_kv_of_one_row(prefix: int, new: int) -> None:
    """The launch of a captured prefill, padding after its tokens."""
    problem = make_problem(
        prefix_lens=[prefix], new_lens=[new], heads=(8, 2), dtype=torch.float16
    )
    padding = torch.full_like(problem.q[:1].repeat(9, 1, 1), NAN)
    q = torch.cat((problem.q[:new], padding))
    problem = replace(problem, q=q).with_new_kv()
    for window in windows_of(-1, 50):
        problem.extend(window=window)


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize(("heads", "head_dim"), head_cases(16, 64, 80, 96, 128))
def test_extend_heads_of_new_kv(heads: tuple[int, int], head_dim: int) -> None:
    for dtype in HALF_DTYPES:
        make_problem(
            prefix_lens=[67, 0],
            new_lens=[5, 19],
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            page_size=4,
            has_row_index=False,
        ).with_new_kv().extend()


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("tile", [(64, 32, 64, 4, 2), (128, 64, 32, 8, 3)])
def test_extend_of_new_kv_in_other_tiles(
    tile: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_module, "TILES", {64: dense_module.TileChoice(*tile)})
    for window in (-1, 90):
        problem = make_problem(
            prefix_lens=[20, 70],
            new_lens=[173, 1],
            heads=(2, 1),
            dtype=torch.float16,
        ).with_new_kv()
        problem.extend(window=window)
        # Scores that grow along the row: the sums are scaled anew many times.
        growth = torch.linspace(0, 20, 174, device=DEVICE)[:, None, None]
        replace(problem, k_new=problem.k_new[:174] * growth.half()).extend(
            window=window
        )


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("window", [-1, 50])
def test_sinks_and_caps_over_new_kv(window: int) -> None:
    """Of gathered tiles, the rest of a prefix, full and diagonal tiles."""
    problem = make_problem(
        prefix_lens=[0, 130, 70],
        new_lens=[37, 90, 1],
        heads=(4, 2),
        dtype=torch.float16,
    ).with_new_kv()
    problem.extend(window=window, logit_cap=2.0, sinks=make_sinks(4))


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("name", ["k_new", "v_new"])
def test_nan_in_new_kv_shows_where_it_is_attended_and_nowhere_else(name: str) -> None:
    problem = make_problem(
        prefix_lens=[20, 90, 3],
        new_lens=[9, 80, 40],
        heads=(4, 2),
        head_dim=80,
        dtype=torch.float16,
    ).with_new_kv()
    new = getattr(problem, name)
    new[9 + 30, 1, 5] = NAN
    for window in windows_of(6, 100, -1):
        problem.extend(window=window)
    new[9 + 79, 0, 0] = NAN
    problem.extend()


@pytest.mark.usefixtures("short_rows")
def test_extend_of_new_kv_finds_the_row_of_a_tile_among_many() -> None:
    make_problem(
        prefix_lens=[row % 7 for row in range(37)],
        new_lens=[(5 * row) % 4 for row in range(37)],
        heads=(1, 1),
        dtype=torch.float16,
    ).with_new_kv().extend()


def test_extend_of_long_new_kv() -> None:
    if not ON_GPU:
        pytest.skip("too long for the interpreter")
    for dtype in HALF_DTYPES:
        for head_dim in (64, 96, 128):
            for window in (-1, 700):
                make_problem(
                    prefix_lens=[300, 0, 1025],
                    new_lens=[2100, 2050, 333],
                    heads=(8, 2),
                    head_dim=head_dim,
                    dtype=dtype,
                ).with_new_kv().extend(window=window)


def test_short_rows_trees_wide_heads_and_float32_read_the_pool() -> None:
    half = torch.float16
    shape = {
        "tokens": 8192,
        "rows": 8,
        "head_dim": 128,
        "dtype": half,
        "has_tree": False,
    }
    assert reads_new(**shape)
    for change in (
        {"tokens": 64},
        {"head_dim": 256},
        {"dtype": torch.float32},
        {"has_tree": True},
    ):
        assert not reads_new(**{**shape, **change})
    problem = make_problem(prefix_lens=[40], new_lens=[9], dtype=half)
    bad = torch.full_like(problem.k_cache[:9], NAN)
    expected, out = torch.empty_like(problem.q), torch.empty_like(problem.q)
    common = {
        "page_table": problem.page_table,
        "row_index": problem.row_index,
        "qo_indptr": problem.qo_indptr,
        "prefix_lens": problem.prefix_lens,
        "page_size": 1,
        "sm_scale": 1.0,
    }
    caches = (problem.k_cache, problem.v_cache)
    extend_attention_ref(problem.q, *caches, **common, out=expected)
    extend_attention(problem.q, *caches, **common, k_new=bad, v_new=bad, out=out)
    assert_same(out, expected)


@pytest.mark.usefixtures("short_rows")
def test_new_kv_that_cannot_be_read_is_refused() -> None:
    problem = make_problem(
        prefix_lens=[4], new_lens=[2], head_dim=72, dtype=torch.float16
    ).with_new_kv()
    assert problem.k_new is not None and problem.v_new is not None
    with pytest.raises(ValueError, match="k_new is"):
        replace(problem, k_new=problem.k_new[:1]).extend()
    odd = problem.v_new.new_zeros(*problem.v_new.shape[:2], 76)[:, :, 1:73]
    with pytest.raises(ValueError, match="v_new has strides"):
        replace(problem, v_new=odd).extend()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
