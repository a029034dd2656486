"""The gated delta rule: the chunk form and trees agree with the recurrence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang.srt.layers.ops.state.gated_delta import chunked
from sglang.srt.layers.ops.state.gated_delta.inputs import DeltaInputs, DeltaNodes
from sglang.srt.layers.ops.state.gated_delta.op import (
    gated_delta_commit,
    gated_delta_decode,
    gated_delta_prefill,
    gated_delta_tree,
)
from sglang.srt.layers.ops.state.shared.tracks import StateTracks
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count
from sglang.test.state_problem import Draws, Trees, take

register_cpu_ci(est_time=40, suite="cpu")

SEEDS = range(count(ci=12, full=60))
SLOTS = 7
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def assert_close(
    actual: Tensor, expected: Tensor, *, dtype: torch.dtype = torch.float32
) -> None:
    """Compare within the tolerance of a dtype that something was rounded to."""
    torch.testing.assert_close(
        actual.float(),
        expected.float(),
        rtol=TOLERANCE[dtype],
        atol=TOLERANCE[dtype] * max(1.0, float(expected.float().abs().amax()))
        if expected.numel()
        else 0,
    )


class Problem:
    """Heads, a state and slots of a few rows."""

    def __init__(self, seed: int, *, state_dtype: torch.dtype = torch.float32) -> None:
        self.draws = draws = Draws(seed)
        self.rows = draws.integer(1, 4)
        self.key_heads = draws.integer(1, 4)
        self.heads = self.key_heads * draws.integer(1, 4 // self.key_heads)
        self.d_k = draws.choice(8, 16, 24, 64, 128)
        self.d_v = draws.choice(8, 16, 40, 128)
        self.normalise = draws.integer(0, 3) > 0
        shape = (SLOTS, self.heads, self.d_k, self.d_v)
        self.state = draws.normal(*shape, dtype=state_dtype)
        self.slots = draws.slots(self.rows, SLOTS)
        self.has_state = draws.bools(self.rows)
        self.folded = draws.counts(SLOTS)[:, 1]

    def inputs(self, tokens: int, *, dtype: torch.dtype = torch.float32) -> DeltaInputs:
        return self.draws.delta(
            tokens,
            key_heads=self.key_heads,
            heads=self.heads,
            d_k=self.d_k,
            d_v=self.d_v,
            normalise=self.normalise,
            dtype=dtype,
        )

    def nodes(self, count: int) -> DeltaNodes:
        return DeltaNodes.allocate(count, self.state, key_heads=self.key_heads)

    def lens(self) -> list[int]:
        return [self.draws.choice(0, 1, 5, 63, 64, 65, 200) for _ in range(self.rows)]


def prefill(
    run: Any, inputs: DeltaInputs, state: Tensor, *, slot: int, known: bool
) -> Tensor:
    """Run a prefill of one row."""
    out: Tensor = run(
        inputs,
        state,
        slots=torch.tensor([slot]),
        qo_indptr=torch.tensor([0, len(inputs.v)]),
        has_state=torch.tensor([known]),
    )
    return out


def decode_path(
    inputs: DeltaInputs,
    state: Tensor,
    *,
    slot: Tensor,
    path: list[int],
    folded: Tensor | None = None,
) -> Tensor | None:
    """Decode the tokens of a path in order; return the last output."""
    out = None
    for node in path:
        out = gated_delta_decode.reference(
            take(inputs, [node]), state, slots=slot.view(1), folded=folded
        )
    return out


@pytest.mark.parametrize("state_dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_chunk_form_equals_recurrence(seed: int, state_dtype: torch.dtype) -> None:
    problem = Problem(seed, state_dtype=state_dtype)
    lens = problem.lens()
    dtype = state_dtype if problem.draws.flag() else torch.float32
    inputs = problem.inputs(sum(lens), dtype=dtype)
    states = [problem.state.clone() for _ in range(2)]
    counts = [problem.folded.clone(), problem.folded]
    tracks = Draws(seed).tracks(lens, taken=problem.slots, count=SLOTS)
    outs = [
        run(
            inputs,
            state,
            slots=problem.slots,
            qo_indptr=problem.draws.indptr(lens),
            has_state=problem.has_state,
            tracks=tracks,
            folded=folded,
        )
        for run, state, folded in zip(
            (gated_delta_prefill.reference, chunked.gated_delta_prefill),
            states,
            counts,
            strict=True,
        )
    ]
    assert outs[1].dtype is dtype
    assert_close(outs[1], outs[0], dtype=dtype)
    assert_close(states[1][1:], states[0][1:], dtype=state_dtype)
    assert torch.equal(counts[1][1:], counts[0][1:])
    inputs = problem.inputs(problem.rows, dtype=dtype)
    decoded = [
        run(inputs, state, slots=problem.slots, folded=folded)
        for run, state, folded in zip(
            (gated_delta_decode.reference, chunked.gated_delta_decode),
            (states[0], states[0].clone()),
            counts,
            strict=True,
        )
    ]
    assert_close(decoded[1], decoded[0], dtype=dtype)
    assert torch.equal(counts[1][1:], counts[0][1:])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_track_is_the_state_after_a_shorter_prefill(seed: int) -> None:
    state_dtype = list(TOLERANCE)[seed % len(TOLERANCE)]
    problem = Problem(seed, state_dtype=state_dtype)
    lens = problem.lens()
    inputs, qo_indptr = problem.inputs(sum(lens)), problem.draws.indptr(lens)
    args = {"slots": problem.slots, "has_state": problem.has_state}
    tracks = problem.draws.tracks(lens, taken=problem.slots, count=SLOTS)
    plain, tracked = problem.state.clone(), problem.state.clone()
    outs = [
        gated_delta_prefill(inputs, state, qo_indptr=qo_indptr, tracks=given, **args)
        for state, given in ((plain, None), (tracked, tracks))
    ]
    assert torch.equal(*outs)
    for row, track in tracks.lens.nonzero().tolist():
        begin = int(qo_indptr[row])
        upto = list(range(begin, begin + int(tracks.lens[row, track])))
        slot, known = int(problem.slots[row]), bool(problem.has_state[row])
        shorter = problem.state.clone()
        part = take(inputs, upto)
        prefill(gated_delta_prefill, part, shorter, slot=slot, known=known)
        target = int(tracks.slots[row, track])
        if target:
            assert_close(tracked[target], shorter[slot], dtype=state_dtype)
            plain[target] = tracked[target]
    assert torch.equal(tracked[1:], plain[1:]), "another slot was written"


def test_counts_of_rows_and_tracks() -> None:
    """Rows with and without a state, of several chunks, one and no token."""
    problem = Problem(2)
    for run in (gated_delta_prefill.reference, chunked.gated_delta_prefill):
        folded = torch.tensor([7, 100, 200, 300, 400, 500, 600], dtype=torch.int32)
        run(
            problem.inputs(134),
            problem.state,
            slots=torch.tensor([1, 2, 3]),
            qo_indptr=torch.tensor([0, 70, 134, 134]),
            has_state=torch.tensor([True, False, True]),
            tracks=StateTracks(
                lens=torch.tensor([[64, 70], [64, 0], [0, 0]]),
                slots=torch.tensor([[4, 5], [6, 1], [2, 2]]),
            ),
            folded=folded,
        )
        assert folded.tolist() == [7, 170, 64, 300, 164, 170, 64]


def test_tracks_that_nothing_stores_are_refused() -> None:
    problem = Problem(2)
    inputs, state = problem.inputs(70), problem.state
    for run in (gated_delta_prefill.reference, chunked.gated_delta_prefill):
        for after in (-64, 1, 63, 65, 69, 71, 128):
            with pytest.raises(ValueError, match=f"after {after} of 70 tokens"):
                run(
                    inputs,
                    state,
                    slots=torch.tensor([1]),
                    qo_indptr=torch.tensor([0, 70]),
                    has_state=torch.tensor([True]),
                    tracks=StateTracks(
                        lens=torch.tensor([[64, after]]), slots=torch.tensor([[2, 3]])
                    ),
                )
    with pytest.raises(ValueError, match=r"lens \[1, 2\] .* of 2 rows"):
        gated_delta_prefill(
            inputs,
            state,
            slots=torch.tensor([1, 2]),
            qo_indptr=torch.tensor([0, 64, 70]),
            has_state=torch.tensor([True, True]),
            tracks=StateTracks(
                lens=torch.tensor([[64, 0]]), slots=torch.tensor([[3, 0]])
            ),
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_split_prefill_and_decode_equal_whole_prefill(seed: int) -> None:
    problem = Problem(seed)
    draws = problem.draws
    inputs = problem.inputs(draws.integer(1, 200))
    whole, parts = problem.state.clone(), problem.state.clone()
    expected = prefill(
        gated_delta_prefill.reference, inputs, whole, slot=3, known=False
    )
    outs, begin = [], 0
    while begin < len(inputs.v):
        end = min(len(inputs.v), begin + draws.choice(1, 1, 7, 63, 64, 65, 130))
        part = take(inputs, list(range(begin, end)))
        if end - begin == 1 and begin:
            outs.append(gated_delta_decode(part, parts, slots=torch.tensor([3])))
        else:
            outs.append(
                prefill(gated_delta_prefill, part, parts, slot=3, known=begin > 0)
            )
        begin = end
    assert_close(torch.cat(outs), expected)
    assert_close(parts, whole)


def verify(run: Any, problem: Problem, inputs: DeltaInputs, trees: Trees) -> DeltaNodes:
    """Run a tree, compare it with the recurrence on every path, return its nodes."""
    nodes = problem.nodes(len(inputs.v))
    before = problem.state.clone()
    out = run(inputs, problem.state, slots=problem.slots, mask=trees.mask, nodes=nodes)
    assert torch.equal(problem.state, before), "a verification wrote a state"
    for node in range(len(inputs.v)):
        alone, row = problem.state.clone(), node // trees.width
        expected = decode_path(
            inputs, alone, slot=problem.slots[row], path=trees.ancestors(node)
        )
        assert expected is not None
        assert_close(out[node], expected[0])
    return nodes


@pytest.mark.parametrize("form", ["reference", "chunked"])
@pytest.mark.parametrize("seed", SEEDS)
def test_tree_and_commit_equal_recurrence_along_paths(seed: int, form: str) -> None:
    problem = Problem(seed)
    width = problem.draws.integer(1, 14)
    trees = problem.draws.trees(problem.rows, width, chains=seed % 3 == 0)
    inputs = problem.inputs(problem.rows * width)
    is_reference = form == "reference"
    run = gated_delta_tree.reference if is_reference else chunked.gated_delta_tree
    nodes = verify(run, problem, inputs, trees)
    commit = gated_delta_commit.reference if is_reference else gated_delta_commit
    committed, folded = problem.state.clone(), problem.folded.clone()
    commit(
        nodes,
        committed,
        slots=problem.slots,
        path=trees.path,
        path_lens=trees.path_lens,
        folded=folded,
    )
    expected = problem.state.clone()
    for row, slot in enumerate(problem.slots):
        path = trees.path[row, : trees.path_lens[row]].tolist()
        decode_path(inputs, expected, slot=slot, path=path, folded=problem.folded)
    assert_close(committed, expected)
    assert torch.equal(folded, problem.folded)


def test_a_large_tree_equals_one_state_per_node() -> None:
    problem = Problem(5)
    trees = problem.draws.trees(problem.rows, 64)
    inputs = problem.inputs(problem.rows * 64)
    nodes, expected = (problem.nodes(len(inputs.v)) for _ in range(2))
    args = {"slots": problem.slots, "mask": trees.mask}
    out = gated_delta_tree(inputs, problem.state, nodes=nodes, **args)
    by_state = gated_delta_tree.reference(inputs, problem.state, nodes=expected, **args)
    assert_close(out, by_state)
    for name in ("k", "u", "decay"):
        assert_close(getattr(nodes, name), getattr(expected, name))


def test_a_chain_is_a_prefill_of_one_chunk() -> None:
    problem = Problem(8)
    trees = problem.draws.trees(1, 50, chains=True)
    inputs = problem.inputs(50)
    slot, state = int(problem.slots[0]), problem.state.clone()
    nodes = problem.nodes(50)
    out = gated_delta_tree(
        inputs, problem.state, slots=problem.slots[:1], mask=trees.mask, nodes=nodes
    )
    assert_close(
        out, prefill(gated_delta_prefill, inputs, state, slot=slot, known=True)
    )
    gated_delta_commit(
        nodes,
        problem.state,
        slots=problem.slots[:1],
        path=torch.arange(50)[None],
        path_lens=torch.tensor([50]),
    )
    assert_close(problem.state, state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_nodes_round_the_commit(dtype: torch.dtype) -> None:
    problem = Problem(9)
    trees = problem.draws.trees(problem.rows, 20, chains=True)
    inputs = problem.inputs(problem.rows * 20)
    args = {"slots": problem.slots, "path": trees.path, "path_lens": trees.path_lens}
    committed = []
    for nodes_dtype in (torch.float32, dtype):
        nodes = DeltaNodes.allocate(
            len(inputs.v), problem.state, key_heads=problem.key_heads, dtype=nodes_dtype
        )
        gated_delta_tree(
            inputs, problem.state, slots=problem.slots, mask=trees.mask, nodes=nodes
        )
        committed.append(problem.state.clone())
        gated_delta_commit(nodes, committed[-1], **args)
    assert_close(committed[1], committed[0], dtype=dtype)
    assert not torch.equal(*committed)


def test_later_nodes_of_a_mask_are_ignored() -> None:
    problem = Problem(6)
    trees = problem.draws.trees(problem.rows, 9)
    inputs = problem.inputs(problem.rows * 9)
    wild = trees.mask | torch.ones(9, 9, dtype=torch.bool).triu(1)
    wild &= ~torch.eye(9, dtype=torch.bool)
    for run in (gated_delta_tree.reference, chunked.gated_delta_tree):
        outs = [
            run(
                inputs,
                problem.state,
                slots=problem.slots,
                mask=mask,
                nodes=problem.nodes(len(inputs.v)),
            )
            for mask in (trees.mask, wild)
        ]
        assert torch.equal(*outs)


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_may_be_permuted(seed: int) -> None:
    problem = Problem(seed)
    lens = problem.lens()
    inputs = problem.inputs(sum(lens))
    order = torch.cat([torch.zeros(1).long(), 1 + torch.randperm(SLOTS - 1)])
    moved = torch.empty_like(problem.state)
    moved[order] = problem.state
    outs = [
        gated_delta_prefill(
            inputs,
            state,
            slots=slots,
            qo_indptr=problem.draws.indptr(lens),
            has_state=problem.has_state,
        )
        for state, slots in (
            (problem.state, problem.slots),
            (moved, order[problem.slots]),
        )
    ]
    assert torch.equal(*outs)
    assert torch.equal(moved[order], problem.state)


def test_scratch_rows_leave_other_slots_alone() -> None:
    problem = Problem(3)
    problem.state[0] = torch.nan
    slots, before = torch.tensor([4, 0, 0]), problem.state.clone()
    inputs, alone = problem.inputs(3), problem.state.clone()
    out = gated_delta_decode(inputs, problem.state, slots=slots)
    expected = gated_delta_decode(take(inputs, [0]), alone, slots=slots[:1])
    assert_close(out[:1], expected)
    assert_close(problem.state[4], alone[4])
    trees, nodes = problem.draws.trees(3, 5), problem.nodes(15)
    out = gated_delta_tree(
        problem.inputs(15), problem.state, slots=slots, mask=trees.mask, nodes=nodes
    )
    assert out[:5].isfinite().all()
    gated_delta_commit(
        nodes,
        problem.state,
        slots=slots,
        path=trees.path,
        path_lens=torch.tensor([0, 0, 0]),
    )
    gated_delta_prefill(
        inputs,
        problem.state,
        slots=slots,
        qo_indptr=torch.tensor([0, 3, 3, 3]),
        has_state=torch.tensor([True, True, False]),
        tracks=StateTracks(
            lens=torch.tensor([[3], [0], [0]]), slots=torch.tensor([[0], [5], [6]])
        ),
    )
    untouched = [1, 2, 3, 5, 6]
    assert torch.equal(problem.state[untouched], before[untouched])


@pytest.mark.parametrize(
    "run", [gated_delta_prefill.reference, chunked.gated_delta_prefill]
)
def test_tokens_outside_all_rows_give_zeros(run: Any) -> None:
    problem = Problem(4)
    out = run(
        problem.inputs(5),
        problem.state,
        slots=torch.tensor([1]),
        qo_indptr=torch.tensor([1, 4]),
        has_state=torch.tensor([True]),
    )
    assert not out[[0, 4]].any()
    assert out[1:4].any()


def test_a_row_without_state_does_not_read_its_slot() -> None:
    problem = Problem(7)
    problem.state.fill_(torch.nan)
    out = prefill(
        gated_delta_prefill, problem.inputs(70), problem.state, slot=2, known=False
    )
    assert out.isfinite().all()
    assert problem.state[2].isfinite().all()
    prefill(gated_delta_prefill, problem.inputs(0), problem.state, slot=2, known=False)
    assert not problem.state[2].any(), "the fold of no tokens"


def test_what_does_not_fit_is_refused() -> None:
    draws = Draws(1)
    inputs = draws.delta(2, key_heads=2, heads=3, d_k=8, d_v=8)
    with pytest.raises(ValueError, match="2 key heads do not divide 3"):
        gated_delta_decode(inputs, draws.normal(4, 3, 8, 8), slots=draws.longs([1, 2]))
    inputs = draws.delta(2, key_heads=2, heads=4, d_k=8, d_v=8)
    with pytest.raises(ValueError, match=r"state is \[4, 4, 8, 16\]"):
        gated_delta_decode(inputs, draws.normal(4, 4, 8, 16), slots=draws.longs([1, 2]))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
