"""Triton's short convolution against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sglang.srt.layers.ops.state.shared.tracks import StateTracks
from sglang.srt.layers.ops.state.short_conv import op
from sglang.srt.layers.ops.state.short_conv import triton as kernels
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count
from sglang.test.state_problem import Draws

register_cpu_ci(est_time=20, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = range(count(ci=6, full=60) if DEVICE == "cpu" else 60)
# The interpreter cuts bfloat16 off where the GPU rounds.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)
SLOTS = 6


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", SEEDS)
def test_forms_equal_the_reference(seed: int) -> None:
    draws = Draws(seed, device=DEVICE)
    dtype = DTYPES[seed % len(DTYPES)]
    rows, width = draws.integer(1, 4), draws.integer(2, 4)
    channels = draws.choice(1, 5, 24, 130, 300)
    conv = draws.conv(channels, width, dtype=dtype)
    # Slots of one layer of a pool of two.
    pool = draws.normal(SLOTS, 2, channels, width - 1, dtype=dtype)
    slots, has_state = draws.slots(rows, SLOTS), draws.bools(rows)
    lens = [draws.choice(0, 1, 2, 3, 17, 40) for _ in range(rows)]
    tracks = None
    if seed % 2 == 0:
        lens = [length + draws.choice(0, 47, 64, 130) for length in lens]
        tracks = draws.tracks(lens, taken=slots, count=SLOTS)
    padding = draws.integer(0, 20)
    packed = draws.normal(sum(lens) + padding, channels + 3, dtype=dtype)
    ours, expected = pool[:, 0], pool[:, 0].clone()
    table = draws.counts(SLOTS)
    folded, wanted = table[:, 1], table.clone()
    counts = wanted[:, 1]

    outs = [
        run(
            packed[:, 3:],
            conv,
            state,
            slots=slots,
            qo_indptr=draws.indptr(lens),
            has_state=has_state,
            tracks=tracks,
            folded=counted,
        )
        for run, state, counted in (
            (kernels.short_conv_prefill, ours, folded),
            (op.short_conv_prefill.reference, expected, counts),
        )
    ]
    assert_close(*outs)
    ours[0], folded[0] = expected[0], counts[0]
    assert torch.equal(ours, expected)
    assert torch.equal(folded, counts)

    x = draws.normal(rows, channels, dtype=dtype)
    outs = [
        run(x, conv, state, slots=slots, folded=counted)
        for run, state, counted in (
            (kernels.short_conv_decode, ours, folded),
            (op.short_conv_decode.reference, expected, counts),
        )
    ]
    assert_close(*outs)
    assert torch.equal(ours, expected)
    assert torch.equal(folded, counts)

    trees = draws.trees(rows, draws.integer(1, 9))
    x = draws.normal(rows * trees.width, channels, dtype=dtype)
    outs = [
        run(x, conv, ours, slots=slots, parent_index=trees.parent_index)
        for run in (kernels.short_conv_tree, op.short_conv_tree.reference)
    ]
    assert_close(*outs)
    assert torch.equal(ours, expected), "a verification wrote a state"
    for run, state, counted in (
        (kernels.short_conv_commit, ours, folded),
        (op.short_conv_commit.reference, expected, counts),
    ):
        run(
            x,
            state,
            slots=slots,
            path=trees.path,
            path_lens=trees.path_lens,
            folded=counted,
        )
    assert torch.equal(ours, expected)
    assert torch.equal(table, wanted), "another layer's counts were written"


def test_tracks_of_rows_shorter_than_the_filter() -> None:
    """They keep inputs of the prefix, which the row's own state is about to drop."""
    draws = Draws(4, device=DEVICE)
    conv, pool = draws.conv(300, 4), draws.normal(8, 2, 300, 3)
    states, x = [pool[:, 1].clone(), pool[:, 1]], draws.normal(6, 300)
    tables = [draws.counts(8)] * 2
    tables[1] = tables[0].clone()
    for run, state, table in zip(
        (op.short_conv_prefill.reference, kernels.short_conv_prefill),
        states,
        tables,
        strict=True,
    ):
        run(
            x,
            conv,
            state,
            slots=draws.longs([1, 2, 3]),
            qo_indptr=draws.longs([0, 1, 3, 6]),
            has_state=torch.ones(3, dtype=torch.bool, device=DEVICE),
            tracks=StateTracks(
                lens=draws.longs([[1, 1], [2, 0], [3, 0]]),
                slots=draws.longs([[4, 5], [6, 7], [7, 1]]),
            ),
            folded=table[:, 2],
        )
    assert torch.equal(*states)
    assert torch.equal(*tables)
    assert torch.equal(states[1][4], states[1][1])


def test_padded_rows_and_wild_parents() -> None:
    """What a graph replays with stale inputs stays within its own rows and slot 0."""
    draws = Draws(1, device=DEVICE)
    conv, state = draws.conv(20, 4), draws.normal(SLOTS, 20, 3)
    state[0] = torch.nan
    before = state.clone()
    slots, table = draws.longs([4, 0, 0]), draws.counts(SLOTS)
    folded, counts = table[:, 1], table.clone()
    x = draws.normal(6, 20)
    wild = draws.longs([[-5, 0], [1 << 40, 99], [4, -(1 << 40)]])
    out = kernels.short_conv_tree(x, conv, state, slots=slots, parent_index=wild)
    tame = op.short_conv_tree.reference(
        x[:2],
        conv,
        state,
        slots=slots[:1],
        parent_index=draws.longs([[-1, 0]]),
    )
    assert_close(out[:2], tame)
    kernels.short_conv_commit(
        x,
        state,
        slots=slots,
        path=draws.longs([[0, 1], [99, -3], [1 << 40, 2]]),
        path_lens=draws.longs([0, 2, 1 << 33]),
        folded=folded,
    )
    assert torch.equal(state[1:], before[1:])
    assert torch.equal(table[1:], counts[1:])
    kernels.short_conv_prefill(
        x,
        conv,
        state,
        slots=slots,
        qo_indptr=draws.longs([0, 5, 5, 5]),
        has_state=draws.bools(3),
        tracks=StateTracks(
            lens=draws.longs([[3, -64, 64], [0, -5, 1 << 33], [7, 64, 5]]),
            slots=draws.longs([[1, 2, 3], [5, 1, 2], [3, 5, 1]]),
        ),
        folded=folded,
    )
    assert torch.equal(state[[1, 2, 3, 5]], before[[1, 2, 3, 5]])
    assert torch.equal(table[[1, 2, 3, 5]], counts[[1, 2, 3, 5]])
    kernels.short_conv_decode(x[:3], conv, state, slots=slots, folded=folded)
    assert torch.equal(state[[1, 2, 3, 5]], before[[1, 2, 3, 5]])
    assert torch.equal(table[[1, 2, 3, 5]], counts[[1, 2, 3, 5]])


def test_memory_that_kernels_would_misread_is_refused() -> None:
    draws = Draws(2, device=DEVICE)
    conv, state = draws.conv(8, 4), draws.normal(SLOTS, 8, 3)
    slots = draws.longs([1])
    with pytest.raises(ValueError, match="channels of a token are not contiguous"):
        kernels.short_conv_decode(
            draws.normal(8, 2).t(), conv, state, slots=draws.longs([1, 2])
        )
    swapped = draws.normal(SLOTS, 3, 8).transpose(1, 2)
    with pytest.raises(ValueError, match="state of a slot is not contiguous"):
        kernels.short_conv_decode(draws.normal(1, 8), conv, swapped, slots=slots)
    with pytest.raises(ValueError, match="slots is torch.int32"):
        kernels.short_conv_decode(
            draws.normal(1, 8), conv, state, slots=slots.to(torch.int32)
        )
    with pytest.raises(ValueError, match=r"folded: torch.int64 .* one count per slot"):
        kernels.short_conv_decode(
            draws.normal(1, 8), conv, state, slots=slots, folded=slots
        )


def test_commits_count_no_more_than_their_path_has() -> None:
    draws = Draws(5, device=DEVICE)
    state, table = draws.normal(SLOTS, 20, 3), draws.counts(SLOTS)
    counts = table.clone()
    kernels.short_conv_commit(
        draws.normal(6, 20),
        state,
        slots=draws.longs([4, 2, 1]),
        path=draws.longs([[0, 1], [2, 3], [4, 5]]),
        path_lens=draws.longs([-3, 1, 9]),
        folded=table[:, 0],
    )
    counts[[2, 1], 0] += torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    assert torch.equal(table, counts)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
