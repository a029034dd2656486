"""The short convolution: forms agree with the token by token reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang.srt.layers.ops.state.shared.tracks import StateTracks
from sglang.srt.layers.ops.state.short_conv import gathered, reference
from sglang.srt.layers.ops.state.short_conv.conv_filter import ConvFilter
from sglang.srt.layers.ops.state.short_conv.op import (
    short_conv_commit,
    short_conv_decode,
    short_conv_prefill,
    short_conv_tree,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count
from sglang.test.state_problem import Draws

register_cpu_ci(est_time=10, suite="cpu")

REFERENCE = SimpleNamespace(
    short_conv_prefill=reference.short_conv_prefill_ref,
    short_conv_decode=reference.short_conv_decode_ref,
    short_conv_tree=reference.short_conv_tree_ref,
    short_conv_commit=reference.short_conv_commit_ref,
)
SEEDS = range(count(ci=12, full=200))
SLOTS = 7


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


class Problem:
    def __init__(self, seed: int) -> None:
        self.draws = draws = Draws(seed)
        self.rows = draws.integer(1, 4)
        self.channels = draws.choice(1, 3, 8, 40, 130)
        self.conv = draws.conv(self.channels, draws.integer(2, 4))
        self.state = draws.normal(SLOTS, self.channels, self.conv.width - 1)
        self.folded = draws.counts(SLOTS)[:, 1]
        self.slots = draws.slots(self.rows, SLOTS)
        self.has_state = draws.bools(self.rows)
        self.lens = [draws.choice(0, 1, 2, 3, 5, 64, 200) for _ in range(self.rows)]
        self.x = draws.normal(sum(self.lens), self.channels)

    def prefill(
        self,
        run: Any,
        state: Tensor,
        *,
        tracks: StateTracks | None = None,
        folded: Tensor | None = None,
    ) -> Tensor:
        out: Tensor = run(
            self.x,
            self.conv,
            state,
            slots=self.slots,
            qo_indptr=self.draws.indptr(self.lens),
            has_state=self.has_state,
            tracks=tracks,
            folded=folded,
        )
        return out


@pytest.mark.parametrize("seed", SEEDS)
def test_gathered_equals_the_reference(seed: int) -> None:
    problem = Problem(seed)
    states = [problem.state.clone() for _ in range(2)]
    counts = [problem.folded.clone(), problem.folded]
    forms = list(zip((REFERENCE, gathered), states, counts, strict=True))
    tracks = Draws(seed).tracks(problem.lens, taken=problem.slots, count=SLOTS)
    outs = [
        problem.prefill(module.short_conv_prefill, state, tracks=tracks, folded=folded)
        for module, state, folded in forms
    ]
    assert_close(*outs)
    for _, state, folded in forms:
        state[0], folded[0] = 0, 0
    assert torch.equal(*states)
    assert torch.equal(*counts)
    draws = problem.draws
    x = draws.normal(problem.rows, problem.channels)
    decoded = [
        module.short_conv_decode(
            x, problem.conv, state, slots=problem.slots, folded=folded
        )
        for module, state, folded in forms
    ]
    assert_close(*decoded)
    assert torch.equal(*states)
    assert torch.equal(*counts)
    trees = draws.trees(problem.rows, draws.integer(1, 20))
    x = draws.normal(trees.parent_index.numel(), problem.channels)
    verified = [
        module.short_conv_tree(
            x,
            problem.conv,
            states[0],
            slots=problem.slots,
            parent_index=trees.parent_index,
        )
        for module in (REFERENCE, gathered)
    ]
    assert_close(*verified)
    for module, state, folded in forms:
        module.short_conv_commit(
            x,
            state,
            slots=problem.slots,
            path=trees.path,
            path_lens=trees.path_lens,
            folded=folded,
        )
    assert torch.equal(*states)
    assert torch.equal(*counts)


@pytest.mark.parametrize("seed", SEEDS)
def test_reference_is_torch_convolution(seed: int) -> None:
    """Each row is a convolution of its inputs behind its state."""
    problem = Problem(seed)
    conv, state = problem.conv, problem.state.clone()
    tracks = problem.draws.tracks(problem.lens, taken=problem.slots, count=SLOTS)
    counts = problem.folded.clone()
    out = problem.prefill(
        reference.short_conv_prefill_ref, state, tracks=tracks, folded=counts
    )
    begin = 0
    for row, length in enumerate(problem.lens):
        old = problem.state[problem.slots[row]] * problem.has_state[row]
        x = torch.cat([old, problem.x[begin : begin + length].t()], dim=1)
        weight = conv.weight[:, None]
        if length:
            sums = torch.nn.functional.conv1d(x[None], weight, groups=problem.channels)[
                0
            ].t()
            assert_close(out[begin : begin + length], conv.activate(sums))
        assert torch.equal(state[problem.slots[row]], x[:, length:])
        before = problem.folded[problem.slots[row]] * problem.has_state[row]
        assert counts[problem.slots[row]] == before + length
        for folded, slot in zip(tracks.lens[row], tracks.slots[row], strict=True):
            if folded and slot:
                inputs = x[:, folded : folded + conv.width - 1]
                assert torch.equal(state[slot], inputs)
                assert counts[slot] == before + folded
        begin += length


@pytest.mark.parametrize("seed", SEEDS)
def test_split_prefill_and_decode_equal_whole_prefill(seed: int) -> None:
    draws = Draws(seed)
    conv = draws.conv(9, draws.integer(2, 4))
    x = draws.normal(draws.integer(1, 200), 9)
    whole, parts = draws.normal(2, SLOTS, 9, conv.width - 1)
    slots = draws.longs([3])

    def prefill(x: Tensor, state: Tensor, *, known: bool) -> Tensor:
        return short_conv_prefill(
            x,
            conv,
            state,
            slots=slots,
            qo_indptr=draws.longs([0, len(x)]),
            has_state=torch.tensor([known]),
        )

    expected = prefill(x, whole, known=False)
    outs, begin = [], 0
    while begin < len(x):
        end = min(len(x), begin + draws.choice(1, 1, 2, 63, 64, 65))
        if end - begin == 1 and begin:
            outs.append(short_conv_decode(x[begin:end], conv, parts, slots=slots))
        else:
            outs.append(prefill(x[begin:end], parts, known=begin > 0))
        begin = end
    assert_close(torch.cat(outs), expected)
    assert torch.equal(parts[3], whole[3])


@pytest.mark.parametrize("seed", SEEDS)
def test_tree_equals_decode_along_every_path(seed: int) -> None:
    draws = Draws(seed)
    rows = draws.integer(1, 3)
    conv = draws.conv(5, draws.integer(2, 4))
    state, slots = draws.normal(SLOTS, 5, conv.width - 1), draws.slots(rows, SLOTS)
    trees = draws.trees(rows, draws.integer(1, 12), chains=seed % 3 == 0)
    x = draws.normal(rows * trees.width, 5)
    before = state.clone()
    out = short_conv_tree(x, conv, state, slots=slots, parent_index=trees.parent_index)
    assert torch.equal(state, before), "a verification wrote a state"
    for node in range(rows * trees.width):
        alone, slot = state.clone(), slots[node // trees.width].view(1)
        for step in trees.ancestors(node):
            last = short_conv_decode(x[step : step + 1], conv, alone, slots=slot)
        assert_close(out[node], last[0])
    committed, folded = state.clone(), draws.counts(SLOTS)[:, 1]
    counts = folded.clone()
    short_conv_commit(
        x,
        committed,
        slots=slots,
        path=trees.path,
        path_lens=trees.path_lens,
        folded=folded,
    )
    for row in range(rows):
        for step in trees.path[row, : trees.path_lens[row]].tolist():
            short_conv_decode(
                x[step : step + 1],
                conv,
                state,
                slots=slots[row].view(1),
                folded=counts,
            )
    assert torch.equal(committed, state)
    assert torch.equal(folded, counts)


def test_parents_outside_the_tree_count_as_the_prefix() -> None:
    draws = Draws(1)
    conv, state = draws.conv(4, 4), draws.normal(SLOTS, 4, 3)
    slots, x = draws.longs([1, 2]), draws.normal(6, 4)
    wild = draws.longs([[-7, 5, 2], [0, 99, 5]])
    plain = draws.longs([[-1, -1, -1], [-1, -1, -1]])
    for run in (reference.short_conv_tree_ref, gathered.short_conv_tree):
        outs = [run(x, conv, state, slots=slots, parent_index=p) for p in (wild, plain)]
        assert torch.equal(*outs)


def test_scratch_rows_leave_other_slots_alone() -> None:
    draws = Draws(2)
    conv, state = draws.conv(6, 4), draws.normal(SLOTS, 6, 3)
    state[0] = torch.nan
    slots, folded = draws.longs([4, 0, 0]), draws.counts(SLOTS)[:, 1]
    before, counts = state.clone(), folded.clone()
    alone = state.clone()
    x = draws.normal(3, 6)
    out = short_conv_decode(x, conv, state, slots=slots, folded=folded)
    expected = short_conv_decode(x[:1], conv, alone, slots=slots[:1])
    assert torch.equal(out[:1], expected)
    assert torch.equal(state[1:], alone[1:])
    short_conv_prefill(
        x,
        conv,
        state,
        slots=slots,
        qo_indptr=draws.longs([0, 3, 3, 3]),
        has_state=torch.tensor([True, True, False]),
        tracks=StateTracks(
            lens=draws.longs([[3], [0], [0]]), slots=draws.longs([[0], [5], [6]])
        ),
        folded=folded,
    )
    untouched = [1, 2, 3, 5, 6]
    assert torch.equal(state[untouched], before[untouched])
    assert torch.equal(folded[untouched], counts[untouched])
    assert folded[4] == counts[4] + 1 + 3


def test_tokens_outside_all_rows_give_zeros() -> None:
    draws = Draws(3)
    conv = draws.conv(4, 3)
    for run in (reference.short_conv_prefill_ref, gathered.short_conv_prefill):
        out = run(
            draws.normal(5, 4),
            conv,
            draws.normal(SLOTS, 4, 2),
            slots=draws.longs([1]),
            qo_indptr=draws.longs([1, 4]),
            has_state=torch.tensor([True]),
        )
        assert not out[[0, 4]].any()
        assert out[1:4].any()


def test_tracks_that_nothing_stores_are_refused() -> None:
    draws = Draws(6)
    conv, x, state = draws.conv(4, 4), draws.normal(70, 4), draws.normal(SLOTS, 4, 3)
    for run in (reference.short_conv_prefill_ref, gathered.short_conv_prefill):
        for after in (-64, 1, 69, 71, 128):
            with pytest.raises(ValueError, match=f"after {after} of 70 tokens"):
                run(
                    x,
                    conv,
                    state,
                    slots=draws.longs([1]),
                    qo_indptr=draws.longs([0, 70]),
                    has_state=torch.tensor([True]),
                    tracks=StateTracks(
                        lens=draws.longs([[64, after]]), slots=draws.longs([[2, 3]])
                    ),
                )


def test_what_does_not_fit_is_refused() -> None:
    draws = Draws(4)
    x, slots = draws.normal(1, 4), draws.longs([1])
    wide = ConvFilter(weight=draws.normal(4, 5), bias=None, silu=False)
    with pytest.raises(ValueError, match="width 5"):
        short_conv_decode(x, wide, draws.normal(2, 4, 4), slots=slots)
    conv = draws.conv(4, 4)
    with pytest.raises(ValueError, match="do not fit"):
        short_conv_decode(x, conv, draws.normal(2, 4, 2), slots=slots)
    with pytest.raises(ValueError, match=r"float32.*bfloat16"):
        short_conv_decode(x, conv, draws.normal(2, 4, 3).bfloat16(), slots=slots)
    state, counts = draws.normal(2, 4, 3), draws.counts(2)[:, 1]
    for run in (reference.short_conv_decode_ref, gathered.short_conv_decode):
        for folded in (counts.long(), counts[:1]):
            with pytest.raises(ValueError, match=r"expected torch.int32 \[2\]"):
                run(x, conv, state, slots=slots, folded=folded)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
