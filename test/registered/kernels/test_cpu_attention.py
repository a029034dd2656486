"""Paged attention on the CPU: native kernels against the torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_attention_problem import (
    TOLERANCE,
    assert_close,
    make_problem,
    make_sinks,
    random_tree,
)

from kv_canary.op import native_available
from sglang.srt.layers.ops.attention import op as attention
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=15, suite="cpu")

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
    ((4, 2), 192, 16),
]
# Windows shorter than a tree, than the prefix, and longer than all.
TREE_WINDOWS = (1, 2, 5, 40, 300, 2000)
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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", TREE_WINDOWS)
def test_windowed_trees_match_reference(
    level: str, dtype: torch.dtype, window: int
) -> None:
    prefix = [0, 3, 250, 256, 511]
    for nodes, heads in ((8, (4, 2)), (33, (9, 1))):
        problem = make_problem(
            prefix=prefix,
            new=[nodes] * len(prefix),
            heads=heads,
            page_size=4,
            dtype=dtype,
        )
        mask = random_tree(len(prefix), nodes, seed=nodes)
        options = {"tree_mask": mask, "window": window}
        assert_close(problem.extend(**options), problem.extend(**options, ref=True))


def test_a_node_attends_the_window_of_its_path() -> None:
    """Each node equals, bit by bit, the last token of its path as a row without a tree;
    so a sibling's index is not a distance."""
    prefix, nodes = 90, 24
    problem = make_problem(prefix=[prefix], new=[nodes], page_size=1)
    mask = random_tree(1, nodes, seed=2)
    depths = mask.sum(-1) - 1
    assert int(depths.max()) >= 4
    for window in (1, 2, 3, 50, 91, 200):
        tree = problem.extend(tree_mask=mask, window=window)
        for ref in (False, True):
            for node in range(nodes):
                path = mask[0, node].nonzero()[:, 0] + prefix
                slots = problem.slots(0)[torch.cat((torch.arange(prefix), path))]
                chain = replace(
                    problem, page_table=slots.int()[None], row_index=torch.tensor([0])
                )
                alone = chain.decode(
                    torch.tensor([len(slots)]),
                    chain.row_index,
                    problem.q[node : node + 1],
                    window=window,
                    ref=ref,
                )
                assert_close(tree[node : node + 1], alone)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [((8, 1), 128, 1), ((6, 2), 24, 4)], ids=str)
@pytest.mark.parametrize(
    ("logit_cap", "has_sinks"), [(0.0, True), (2.0, False), (50.0, True)]
)
def test_sinks_and_caps_match_reference(
    level: str,
    dtype: torch.dtype,
    shape: tuple[tuple[int, int], int, int],
    logit_cap: float,
    has_sinks: bool,
) -> None:
    heads, dim, page_size = shape
    for prefix, new in LENGTHS:
        problem = make_problem(
            prefix=prefix,
            new=new,
            heads=heads,
            dim=dim,
            page_size=page_size,
            dtype=dtype,
        )
        for window, sink_dtype in ((-1, torch.float32), (16, dtype)):
            options = {
                "window": window,
                "logit_cap": logit_cap,
                "sinks": make_sinks(heads[0], dtype=sink_dtype) if has_sinks else None,
            }
            result = problem.extend(**options)
            assert_close(result, problem.extend(**options, ref=True))
            assert torch.equal(result, problem.token_by_token(**options))
            if len(result) > 1:  # one element alone weighs one whatever its score
                assert not torch.equal(result, problem.extend(window=window))


def test_a_sink_weighs_like_an_element_without_a_value() -> None:
    """Its weight is that of one more key with this score whose value is zero."""
    problem = make_problem(prefix=[30], new=[1], heads=(1, 1), dim=8)
    extra = int(problem.slots(0)[7])
    problem.v_cache[extra] = 0.0
    score = problem.sm_scale * (problem.q[0, 0] @ problem.k_cache[extra, 0])
    without = problem.page_table[problem.row_index].clone()
    without[0, 7] = without[0, 30]
    shorter = replace(problem, page_table=without, row_index=torch.tensor([0]))
    for ref in (False, True):
        with_sink = shorter.decode(
            torch.tensor([30]), shorter.row_index, problem.q, sinks=score[None], ref=ref
        )
        assert_close(with_sink, problem.extend(ref=ref))


def test_a_row_without_elements_yields_zeros_beside_sinks() -> None:
    problem = make_problem(prefix=[5, 7], new=[1, 1])
    for ref in (False, True):
        out = problem.decode(
            torch.tensor([0, 8]),
            problem.row_index,
            problem.q,
            sinks=torch.zeros(4),
            logit_cap=3.0,
            ref=ref,
        )
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert bool(out[1].abs().sum() > 0)


@pytest.mark.parametrize("score", [-1e4, 1e4])
def test_sinks_far_from_the_scores_do_not_overflow(level: str, score: float) -> None:
    problem = make_problem(prefix=[300], new=[2])
    sinks = torch.full((4,), score)
    out = problem.extend(sinks=sinks)
    assert_close(out, problem.extend(sinks=sinks, ref=True))
    assert_close(out, problem.extend() if score < 0 else torch.zeros_like(out))


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
        hq = problem.q.shape[1]
        options = {
            "window": [-1, draw(1, 20), draw(1, 600)][draw(0, 2)],
            "logit_cap": [0.0, 0.0, 5.0][draw(0, 2)],
            "sinks": [None, None, make_sinks(hq)][draw(0, 2)],
        }
        result = problem.extend(**options)
        assert_close(result, problem.extend(**options, ref=True))
        if len(problem.q):
            assert torch.equal(result, problem.token_by_token(**options))


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


@pytest.mark.parametrize("ref", [False, True])
def test_window_with_tree_mask_needs_positions(ref: bool) -> None:
    problem = make_problem(prefix=[4], new=[2])
    mask = torch.ones(1, 2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="window=3 with a tree mask needs the pos"):
        problem.extend(window=3, tree_mask=mask, positions=None, ref=ref)
    # Without a window nothing reads them.
    problem.extend(tree_mask=mask, positions=None, ref=ref)


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
    with pytest.raises(RuntimeError, match=r"sinks is Float \[3\], expected contig"):
        decode(sinks=torch.zeros(3))
    with pytest.raises(RuntimeError, match="sinks is Double"):
        decode(sinks=torch.zeros(4, dtype=torch.float64))
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
