"""Extend attention on Hopper: its plan against a simple model, its kernel against the
reference, and ahead of time."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from attention_problem import (
    DEVICE,
    NAN,
    ON_GPU,
    Problem,
    assert_same,
    make_problem,
    make_sinks,
    on_hopper,
)
from hopper_ahead import assert_all_fit, compile_for_hopper
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.layers.ops.attention.extend.launch import extend_attention
from sglang.srt.layers.ops.attention.extend_hopper.launch import (
    STAGES,
    gather,
    serves,
)
from sglang.srt.layers.ops.attention.extend_hopper.plan import (
    BLOCK,
    ExtendPlan,
    plan_extend,
    plan_size,
)
from sglang.srt.layers.ops.attention.op import extend_attention_ref
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=12, suite="cpu")
register_cuda_ci(est_time=40, suite="cuda")

KV = [torch.float8_e4m3fn, torch.float8_e5m2]
LENS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=6
)


def plan_of(problem: Problem) -> ExtendPlan:
    return plan_extend(
        problem.page_table,
        row_index=problem.row_index,
        page_size=problem.page_size,
        qo_indptr=problem.qo_indptr,
        prefix_lens=problem.prefix_lens,
        new_slots=problem.new_slots if problem.k_cache.itemsize == 1 else None,
        size=plan_size(problem.prefix_lens.tolist(), problem.new_lens.tolist()),
    )


# -- the plan --------------------------------------------------------------------------


@settings(deadline=None)
@given(lens=LENS, page_size=st.sampled_from([1, 16]))
def test_a_plan_has_every_token_once_and_every_element_where_it_says(
    lens: list[tuple[int, int]], page_size: int
) -> None:
    prefix_lens, new_lens = map(list, zip(*lens, strict=True))
    problem = make_problem(
        prefix_lens=prefix_lens, new_lens=new_lens, heads=(1, 1), page_size=page_size
    )
    plan = plan_of(problem)
    slots = [] if plan.prefix_slots is None else plan.prefix_slots.tolist()
    starts = problem.qo_indptr.tolist()
    seen: list[tuple[int, int]] = []
    work = []
    for first, tokens, partial, full, before, at, *_ in plan.tiles.tolist():
        row = max(r for r, new in enumerate(new_lens) if starts[r] <= first and new)
        own = first - starts[row]
        assert own == before * BLOCK
        assert tokens == new_lens[row] - own
        seen += [(row, own + i) for i in range(min(tokens, BLOCK))]
        prefix = prefix_lens[row]
        assert full * BLOCK + partial == prefix
        expected = [problem.slot(row, element) for element in range(prefix)]
        expected += expected[-1:] * (-prefix % BLOCK)
        assert slots[at : at + len(expected)] == expected
        work.append(full + before)
    assert sorted(seen) == [
        (r, t) for r, new in enumerate(new_lens) for t in range(new)
    ]
    assert work == sorted(work, reverse=True)


# -- the kernel ------------------------------------------------------------------------


def inputs_of(problem: Problem, **options: Any) -> dict[str, Any]:
    return {
        "page_table": problem.page_table,
        "row_index": problem.row_index,
        "qo_indptr": problem.qo_indptr,
        "prefix_lens": problem.prefix_lens,
        "page_size": problem.page_size,
        "sm_scale": problem.sm_scale,
        "k_new": problem.k_new,
        "v_new": problem.v_new,
        **options,
    }


def attend(problem: Problem, **options: Any) -> torch.Tensor:
    """The result of one launch with a plan."""
    out = torch.full_like(problem.q, 7)
    caches = (problem.k_cache, problem.v_cache)
    inputs = inputs_of(problem, **options)
    extend_attention(problem.q, *caches, **inputs, out=out, plan=plan_of(problem))
    return out


def compare(
    prefix_lens: list[int],
    new_lens: list[int],
    *,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    kv: torch.dtype | None = None,
    **options: Any,
) -> None:
    """One launch and the reference; NaN in every slot and row that is not attended.
    `kv`: a type of 8 bits that K and V are stored in."""
    options = {"heads": (8, 2), "head_dim": 128, "dtype": torch.bfloat16} | options
    problem = make_problem(prefix_lens=prefix_lens, new_lens=new_lens, **options)
    problem.k_cache.mul_(k_scale)
    problem = problem.with_new_kv() if kv is None else problem.stored_as(kv)
    expected = torch.full_like(problem.q, 7)
    caches = (problem.k_cache, problem.v_cache)
    inputs = inputs_of(problem, sinks=sinks)
    extend_attention_ref(problem.q, *caches, **inputs, out=expected)
    assert_same(attend(problem, sinks=sinks), expected)


@on_hopper
@pytest.mark.parametrize("head_dim", sorted(STAGES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(
    ("prefix_lens", "new_lens"),
    [
        ([0], [1]),
        ([0], [128]),
        ([0], [1000]),
        ([128], [128]),
        ([1], [129]),
        ([1000], [500]),
        ([0, 130, 64, 5, 17, 0, 256], [37, 3, 150, 0, 1, 70, 257]),
        ([0] * 40, [33] * 40),
    ],
)
def test_kernel(
    prefix_lens: list[int],
    new_lens: list[int],
    page_size: int,
    dtype: torch.dtype,
    head_dim: int,
) -> None:
    compare(prefix_lens, new_lens, page_size=page_size, dtype=dtype, head_dim=head_dim)


@on_hopper
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (6, 2), (20, 1), (64, 8)])
def test_heads_of_the_kernel(heads: tuple[int, int]) -> None:
    """Programs have one tile, and many."""
    compare([0, 70], [700, 2000], heads=heads, has_row_index=False)


@on_hopper
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_in_8_bits(dtype: torch.dtype, kv: torch.dtype) -> None:
    """New tokens attend what the pool holds of them."""
    compare([0, 130, 64, 5, 0], [37, 3, 150, 1, 257], kv=kv, dtype=dtype, page_size=16)
    compare([0], [300], kv=kv, dtype=dtype)


@pytest.mark.parametrize("kv", KV)
def test_gathered_codes_are_exact(kv: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(kv)
    cache = codes.view(8, 2, 16)
    slots = torch.tensor([7, 0, 3, 3], device=DEVICE)
    found = gather(cache, slots, torch.bfloat16)
    expected = cache.float()[slots].flatten(1)
    torch.testing.assert_close(
        found.float(), expected, rtol=0.0, atol=0.0, equal_nan=True
    )


@on_hopper
def test_sinks_of_the_kernel() -> None:
    compare([0, 300], [200, 130], sinks=make_sinks(8))


@on_hopper
def test_scores_far_apart() -> None:
    compare([300], [400], k_scale=40.0)


@on_hopper
@pytest.mark.parametrize("name", ["k_new", "v_new"])
def test_nan_of_a_request_stays_with_it(name: str) -> None:
    problem = make_problem(
        prefix_lens=[20, 90, 3],
        new_lens=[9, 80, 140],
        heads=(4, 2),
        head_dim=128,
        dtype=torch.bfloat16,
    ).with_new_kv()
    getattr(problem, name)[9 + 30, 1, 5] = NAN
    out = attend(problem)
    bad = out.isnan().flatten(1).any(1)
    assert bad[9 + 30 : 9 + 80].all()
    assert not bad[:9].any()
    assert not bad[9 + 80 :].any()


def test_who_is_served() -> None:
    cpu = torch.device("cpu")
    assert not serves(head_dim=128, dtype=torch.bfloat16, device=cpu)
    device = torch.device(DEVICE)
    assert not serves(head_dim=96, dtype=torch.bfloat16, device=device)
    assert not serves(head_dim=128, dtype=torch.float32, device=device)


def test_a_plan_serves_no_window() -> None:
    problem = make_problem(prefix_lens=[3], new_lens=[5]).with_new_kv()
    with pytest.raises(ValueError, match="window=4, .* leave out the plan"):
        attend(problem, window=4)


# -- ahead of time ---------------------------------------------------------------------


@pytest.mark.skipif(ON_GPU, reason="the kernel itself runs there")
def test_it_compiles_without_spilling() -> None:
    assert_all_fit(__file__, STAGES)


def compile_all() -> list[dict[str, Any]]:
    """Compile the kernel for each head size."""
    from sglang.srt.layers.ops.attention.extend_hopper.kernels import (
        extend_hopper_kernel,
    )

    halves = dict.fromkeys(("q_tiles", "out_tiles"), BLOCK // 2)
    blocks = dict.fromkeys(("k_new", "v_new", "k_prefix", "v_prefix"), BLOCK)
    types = {"out": "*bf16", "out_stride": "i32", "plan": "*i32"}
    types |= {"items": "i32", "factor": "fp32"}
    constants = {"HEADS": 32, "GROUP": 4, "BLOCK": BLOCK, "sinks": None}
    return [
        compile_for_hopper(
            extend_hopper_kernel,
            constants=constants | {"D": head_dim, "STAGES": stages},
            tiles=halves | blocks,
            types=types,
        )
        for head_dim, stages in STAGES.items()
    ]


if __name__ == "__main__" and "--compile" in sys.argv:
    print(json.dumps(compile_all()))
