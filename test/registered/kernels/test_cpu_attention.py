"""Paged attention on the CPU: native kernels against the torch reference."""

from __future__ import annotations

import pytest
import torch
from cpu_attention_problem import (
    TOLERANCE,
    assert_close,
    make_problem,
    random_tree,
)

from kv_canary.op import native_available
from sglang.srt.layers.ops import attention
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=12, suite="cpu")

pytestmark = pytest.mark.skipif(
    not native_available(), reason="the native CPU kernels are not installed"
)


SHAPES = [
    # heads, dim, page size
    ((1, 1), 8, 1),
    ((2, 1), 64, 4),
    ((4, 1), 96, 16),
    ((8, 1), 128, 1),
    ((6, 2), 24, 4),
    ((3, 3), 40, 16),
    ((16, 2), 256, 1),
    ((5, 1), 80, 4),
]
LENGTHS = [
    ([0], [1]),
    ([0, 5, 300], [3, 1, 17]),
    ([255, 256, 257, 0], [1, 2, 3, 70]),
    ([1000, 17], [1, 1]),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_extend_and_decode_match_reference(
    level: str, dtype: torch.dtype, shape: tuple[tuple[int, int], int, int]
) -> None:
    heads, dim, page_size = shape
    for seed, (prefix, new) in enumerate(LENGTHS):
        problem = make_problem(
            prefix=prefix,
            new=new,
            heads=heads,
            dim=dim,
            page_size=page_size,
            dtype=dtype,
            seed=seed,
        )
        for window in (-1, 1, 16, 300):
            result = problem.extend(window=window)
            assert_close(result, problem.extend(window=window, ref=True))
            assert torch.equal(result, problem.token_by_token(window=window))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tree_mask_matches_reference(
    level: str, dtype: torch.dtype, shape: tuple[tuple[int, int], int, int]
) -> None:
    heads, dim, page_size = shape
    for nodes in (1, 8, 33):
        prefix = [0, 3, 250, 256, 511]
        problem = make_problem(
            prefix=prefix,
            new=[nodes] * len(prefix),
            heads=heads,
            dim=dim,
            page_size=page_size,
            dtype=dtype,
            seed=nodes,
        )
        mask = random_tree(len(prefix), nodes, seed=nodes)
        assert_close(
            problem.extend(tree_mask=mask),
            problem.extend(tree_mask=mask, ref=True),
        )


def test_random_problems_match_reference() -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    for seed in range(count(ci=30, full=600)):
        rows = draw(1, 5)
        hkv = draw(1, 3)
        problem = make_problem(
            prefix=[draw(0, 1) * draw(0, 700) for _ in range(rows)],
            new=[draw(0, 1) * draw(0, 90) for _ in range(rows)],
            heads=(hkv * draw(1, 8), hkv),
            dim=8 * draw(1, 32),
            page_size=[1, 2, 4, 16, 64][draw(0, 4)],
            dtype=list(TOLERANCE)[draw(0, 2)],
            seed=seed,
        )
        window = [-1, draw(1, 20), draw(1, 600)][draw(0, 2)]
        result = problem.extend(window=window)
        assert_close(result, problem.extend(window=window, ref=True))
        if len(problem.q):
            assert torch.equal(result, problem.token_by_token(window=window))


def test_chain_mask_equals_causal() -> None:
    problem = make_problem(prefix=[100, 255], new=[6, 6])
    chain = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 6, 6).contiguous()
    torch.testing.assert_close(problem.extend(tree_mask=chain), problem.extend())


def test_empty_mask_rows_attend_the_prefix_only() -> None:
    problem = make_problem(prefix=[0, 4], new=[2, 2])
    mask = torch.zeros(2, 2, 2, dtype=torch.bool)
    out = problem.extend(tree_mask=mask)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert_close(out, problem.extend(tree_mask=mask, ref=True))


def test_large_scores_do_not_overflow() -> None:
    problem = make_problem(prefix=[500], new=[1])
    problem.q.mul_(1e3)
    assert_close(problem.extend(), problem.extend(ref=True))


def test_window_with_tree_mask_is_refused() -> None:
    problem = make_problem(prefix=[4], new=[2])
    with pytest.raises(ValueError, match="window=3 with a tree mask"):
        problem.extend(window=3, tree_mask=torch.ones(1, 2, 2, dtype=torch.bool))


def test_bad_arguments_raise() -> None:
    problem = make_problem(prefix=[9, 20], new=[1, 1])
    lens = problem.prefix_lens + 1
    rows = problem.row_index

    def decode(**changes: object) -> None:
        arguments: dict[str, object] = {
            "page_table": problem.page_table,
            "row_index": rows,
            "read_lens": lens,
            "page_size": 1,
            "sm_scale": 1.0,
            "out": torch.empty_like(problem.q),
        }
        arguments.update(changes)
        caches = (problem.k_cache, problem.v_cache)
        attention.decode_attention(problem.q, *caches, **arguments)  # type: ignore[arg-type]

    decode()
    with pytest.raises(RuntimeError, match="page_table is"):
        decode(page_table=problem.page_table.long())
    with pytest.raises(RuntimeError, match="read_lens is"):
        decode(read_lens=lens.int())
    with pytest.raises(RuntimeError, match="read_lens is"):
        decode(read_lens=lens[:1])
    with pytest.raises(RuntimeError, match=r"read_lens\[1\] is -1"):
        decode(read_lens=torch.tensor([3, -1]))
    with pytest.raises(
        RuntimeError, match="row 1 has 99 KV elements, expected 0 .. 23"
    ):
        decode(read_lens=torch.tensor([3, 99]))
    with pytest.raises(RuntimeError, match="row 0 names row 4 of the page table"):
        decode(row_index=torch.tensor([4, 0]))
    with pytest.raises(RuntimeError, match="page_size is 0"):
        decode(page_size=0)
    with pytest.raises(RuntimeError, match="out is"):
        decode(out=torch.empty(2, 4, 32))
    for slot in (-1, problem.k_cache.shape[0]):
        table = problem.page_table.clone()
        table[rows[1], 4] = slot
        with pytest.raises(RuntimeError, match=f"KV element 4 in slot {slot}"):
            decode(page_table=table)
    mask = torch.ones(2, 3, 3, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="row 0 has 1 new tokens, expected 3"):
        problem.extend(tree_mask=mask)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
