"""Paged attention on the CPU: a query's result depends neither on the other rows of the
batch, nor on chunks, nor on the number of threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_attention_problem import (
    make_problem,
)

from kv_canary.op import native_available
from sglang.srt.layers.ops.attention import op as attention
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

pytestmark = pytest.mark.skipif(
    not native_available(), reason="the native CPU kernels are not installed"
)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_result_depends_on_nothing_but_the_query_and_its_elements(threads: int) -> None:
    """Bitwise the same alone, in any batch, with any number of threads."""
    problem = make_problem(
        prefix=[3000, 0, 700, 40, 255], new=[1, 200, 64, 1, 2], heads=(8, 2), dim=64
    )
    expected = problem.extend()
    bounds = problem.qo_indptr.tolist()
    torch.set_num_threads(threads)
    assert torch.equal(problem.extend(), expected)
    for row in range(len(problem.prefix_lens)):
        begin, end = bounds[row], bounds[row + 1]
        out = torch.empty_like(problem.q[begin:end])
        attention.extend_attention(
            problem.q[begin:end],
            problem.k_cache,
            problem.v_cache,
            page_table=problem.page_table,
            row_index=problem.row_index[row : row + 1],
            qo_indptr=torch.tensor([0, end - begin]),
            prefix_lens=problem.prefix_lens[row : row + 1],
            page_size=1,
            sm_scale=problem.sm_scale,
            out=out,
        )
        assert torch.equal(out, expected[begin:end])
    assert torch.equal(problem.token_by_token(), expected)


def test_tokens_after_the_last_row_are_left_alone() -> None:
    """A captured prefill is padded with such tokens."""
    problem = make_problem(prefix=[0, 40], new=[3, 70], heads=(4, 2), dim=64)
    expected = problem.extend()
    q = torch.cat((problem.q, torch.full_like(problem.q[:5], torch.nan)))
    out = replace(problem, q=q).extend()
    assert torch.equal(out[:-5], expected)
    assert bool((out[-5:] == 7.0).all())


def test_chunked_prefill_equals_whole_prefill_bitwise() -> None:
    problem = make_problem(prefix=[0], new=[600], heads=(4, 2), dim=64, page_size=4)
    whole = problem.extend()
    for cut in (1, 255, 256, 300, 599):
        for begin, end in ((0, cut), (cut, 600)):
            out = torch.empty_like(whole[begin:end])
            attention.extend_attention(
                problem.q[begin:end],
                problem.k_cache,
                problem.v_cache,
                page_table=problem.page_table,
                row_index=problem.row_index,
                qo_indptr=torch.tensor([0, end - begin]),
                prefix_lens=torch.tensor([begin]),
                page_size=4,
                sm_scale=problem.sm_scale,
                out=out,
            )
            assert torch.equal(out, whole[begin:end])


def test_no_row_index_means_row_r() -> None:
    problem = make_problem(prefix=[9, 20, 0], new=[1, 1, 1])
    table = problem.page_table[problem.row_index]
    lens = problem.prefix_lens + 1
    expected = problem.decode(lens, problem.row_index, problem.q)
    out = torch.empty_like(problem.q)
    attention.decode_attention(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        page_table=table,
        row_index=None,
        read_lens=lens,
        page_size=1,
        sm_scale=problem.sm_scale,
        out=out,
    )
    assert torch.equal(out, expected)


def test_no_rows_and_empty_rows() -> None:
    problem = make_problem(prefix=[5], new=[0])
    assert problem.extend().shape == (0, 4, 64)
    none = torch.empty(0, dtype=torch.int64)
    assert problem.decode(none, none, problem.q).shape == (0, 4, 64)
    problem = make_problem(prefix=[5, 7], new=[1, 1])
    for ref in (False, True):
        out = problem.decode(
            torch.tensor([0, 8]), problem.row_index, problem.q, ref=ref
        )
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert bool(out[1].abs().sum() > 0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
