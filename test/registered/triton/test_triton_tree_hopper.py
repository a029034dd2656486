"""Extend attention under tree masks on Hopper: against the reference, and ahead of
time."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import pytest
import torch
from attention_problem import (
    NAN,
    ON_GPU,
    Problem,
    assert_same,
    make_problem,
    make_sinks,
    on_hopper,
    random_trees,
)
from hopper_ahead import assert_all_fit, compile_for_hopper

from sglang.srt.layers.ops.attention.extend_tree_hopper.launch import (
    BLOCK,
    STAGES,
    extend_tree_hopper,
    serves_tree,
)
from sglang.srt.layers.ops.attention.op import extend_attention_ref
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import is_full

register_cpu_ci(est_time=6, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")


def tree_problem(prefix_lens: list[int], nodes: int, **options: Any) -> Problem:
    options = {
        "heads": (8, 2),
        "head_dim": 128,
        "dtype": torch.bfloat16,
        "page_size": 64,
    } | options
    new_lens = [nodes] * len(prefix_lens)
    return make_problem(prefix_lens=prefix_lens, new_lens=new_lens, **options)


def attend(problem: Problem, **options: Any) -> torch.Tensor:
    """The result of one launch."""
    out = torch.full_like(problem.q, 7)
    extend_tree_hopper(problem.extend_inputs(out, **options))
    return out


def compare(
    prefix_lens: list[int],
    nodes: int,
    *,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    **options: Any,
) -> None:
    """One launch and the reference; every slot that no request owns holds NaN."""
    problem = tree_problem(prefix_lens, nodes, **options)
    problem.k_cache.mul_(k_scale)
    tree_mask = random_trees(len(prefix_lens), nodes, seed=nodes)
    expected = torch.full_like(problem.q, 7)
    extend_attention_ref(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        page_table=problem.page_table,
        row_index=problem.row_index,
        qo_indptr=problem.qo_indptr,
        prefix_lens=problem.prefix_lens,
        page_size=problem.page_size,
        sm_scale=problem.sm_scale,
        sinks=sinks,
        tree_mask=tree_mask,
        out=expected,
    )
    assert_same(attend(problem, tree_mask=tree_mask, sinks=sinks), expected)


@on_hopper
@pytest.mark.parametrize("head_dim", sorted(STAGES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [64, 256])
@pytest.mark.parametrize("nodes", [33, 48, 63, 64])
@pytest.mark.parametrize(
    "prefix_lens", [[0], [1], [64], [500, 0, 63, 65, 127, 128], [30] * 40, [3000, 17]]
)
def test_kernel(
    prefix_lens: list[int],
    nodes: int,
    page_size: int,
    dtype: torch.dtype,
    head_dim: int,
) -> None:
    compare(prefix_lens, nodes, page_size=page_size, dtype=dtype, head_dim=head_dim)


@on_hopper
@pytest.mark.parametrize("heads", [(2, 1), (6, 1), (20, 1), (64, 8)])
def test_heads_of_the_kernel(heads: tuple[int, int]) -> None:
    """Programs have one request and two heads, and many."""
    compare([0, 70, 700] * 7, 64, heads=heads, has_row_index=False)


@on_hopper
def test_sinks_of_the_kernel() -> None:
    compare([0, 300], 64, sinks=make_sinks(8))


@on_hopper
def test_scores_far_apart() -> None:
    compare([300, 90], 40, k_scale=40.0)


@on_hopper
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_nan_of_a_request_stays_with_it(name: str) -> None:
    problem = tree_problem([20, 90, 3], 64)
    getattr(problem, name)[problem.slot(1, 30), 1, 5] = NAN
    out = attend(problem, tree_mask=random_trees(3, 64, seed=1))
    bad = out.isnan().flatten(1).any(1)
    assert bad[64:128].all()
    assert not bad[:64].any()
    assert not bad[128:].any()


@on_hopper
def test_a_cuda_graph_serves_other_lengths() -> None:
    problem = tree_problem([700, 64, 1], 64)
    tree_mask = random_trees(3, 64, seed=2)
    out = torch.empty_like(problem.q)
    inputs = problem.extend_inputs(out, tree_mask=tree_mask)
    extend_tree_hopper(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        extend_tree_hopper(inputs)
    for prefix_lens in ([3, 0, 1], [640, 40, 1], [700, 64, 0]):
        problem.prefix_lens.copy_(torch.tensor(prefix_lens))
        graph.replay()
        assert_same(out, attend(problem, tree_mask=tree_mask))


@on_hopper
@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        (64, {"page_size": 32}),
        (32, {}),
        (65, {}),
        (64, {"heads": (6, 2)}),
        (64, {"head_dim": 256}),
        (64, {"dtype": torch.float32}),
    ],
)
def test_who_is_not_served(nodes: int, options: dict[str, Any]) -> None:
    problem = tree_problem([9] * 40, nodes, **options)
    mask = random_trees(40, nodes, seed=0)
    assert not serves_tree(problem.extend_inputs(problem.q, tree_mask=mask))


@on_hopper
def test_who_is_served() -> None:
    def served(rows: int, **options: Any) -> bool:
        problem = tree_problem([9] * rows, 64)
        mask = random_trees(rows, 64, seed=0)
        return serves_tree(problem.extend_inputs(problem.q, tree_mask=mask, **options))

    assert served(40)
    assert not served(1)
    assert not served(40, window=20)
    assert not served(40, logit_cap=30.0)


# -- ahead of time ---------------------------------------------------------------------


@pytest.mark.skipif(ON_GPU, reason="the kernel itself runs there")
def test_it_compiles_without_spilling() -> None:
    assert_all_fit(__file__, STAGES)


def compile_all() -> list[dict[str, Any]]:
    """Compile the kernel for each head size, with full and short tiles; in CI by turns
    with one of both."""
    from sglang.srt.layers.ops.attention.extend_hopper.kernels import Softmax
    from sglang.srt.layers.ops.attention.extend_tree_hopper.kernels import (
        extend_tree_hopper_kernel,
    )
    from sglang.srt.layers.ops.attention.shared.args import PageArgs

    types = {
        "out": "*bf16",
        "out_stride": "i32",
        "pages": PageArgs("*i32", "i32", "i32", "*i64"),
        "prefix_lens": "*i64",
        "tree_mask": "*u8",
        "softmax": Softmax("*bf16", "fp32"),
        "items": "i32",
    }
    counts = (BLOCK, BLOCK - 16)
    every = itertools.product(STAGES.items(), counts)
    variants = every if is_full() else zip(STAGES.items(), counts, strict=True)
    return [
        compile_for_hopper(
            extend_tree_hopper_kernel,
            constants={
                "HEADS": 32,
                "GROUP": 4,
                "D": head_dim,
                "NEW": nodes,
                "PAGE": 64,
                "QUERIES": BLOCK,
                "BLOCK": BLOCK,
                "STAGES": stages,
            },
            tiles=dict.fromkeys(("q_tiles", "out_tiles", "k_tiles", "v_tiles"), BLOCK),
            types=types,
        )
        for (head_dim, stages), nodes in variants
    ]


if __name__ == "__main__" and "--compile" in sys.argv:
    print(json.dumps(compile_all()))
