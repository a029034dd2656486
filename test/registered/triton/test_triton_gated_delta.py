"""Triton's gated delta rule against the recurrence."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sglang.srt.layers.ops.state.gated_delta import op
from sglang.srt.layers.ops.state.gated_delta import triton as kernels
from sglang.srt.layers.ops.state.gated_delta.inputs import DeltaInputs, DeltaNodes
from sglang.srt.layers.ops.state.shared.tracks import StateTracks
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count
from sglang.test.state_problem import Draws

register_cpu_ci(est_time=40, suite="cpu")
register_cuda_ci(est_time=120, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = range(count(ci=6, full=40) if DEVICE == "cpu" else 60)
# Of half inputs a prefill multiplies in tf32 on a GPU; the interpreter cuts bfloat16
# off where the GPU rounds.
TOLERANCE = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
SLOTS = 6
SIZES = (8, 16, 40) if DEVICE == "cpu" else (8, 16, 40, 64, 100, 128)
LENS = (0, 1, 15, 64, 70) if DEVICE == "cpu" else (0, 1, 15, 64, 70, 200, 1000)


def assert_close(actual: Tensor, expected: Tensor, *, dtype: torch.dtype) -> None:
    if not expected.numel():
        return
    actual, expected = actual.float(), expected.float()
    size = max(1.0, float(expected.abs().amax()))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * size)


class Problem:
    """Heads, slots and one layer's states of a pool of two."""

    def __init__(self, seed: int) -> None:
        self.draws = draws = Draws(seed, device=DEVICE)
        self.dtype = DTYPES[seed % len(DTYPES)]
        self.state_dtype = DTYPES[seed // len(DTYPES) % len(DTYPES)]
        self.rows = draws.integer(1, 3)
        self.key_heads = draws.integer(1, 2)
        self.heads = self.key_heads * draws.integer(1, 2)
        self.d_k, self.d_v = draws.choice(*SIZES), draws.choice(*SIZES)
        self.normalise = draws.integer(0, 3) > 0
        shape = (SLOTS, 2, self.heads, self.d_k, self.d_v)
        self.state = draws.normal(*shape, dtype=self.state_dtype)[:, 1]
        self.slots = draws.slots(self.rows, SLOTS)
        self.table = draws.counts(SLOTS)

    @property
    def worst(self) -> torch.dtype:
        """The dtype that rounds most."""
        return max(self.dtype, self.state_dtype, key=lambda d: TOLERANCE[d])

    def inputs(self, tokens: int) -> DeltaInputs:
        drawn = self.draws.delta(
            tokens,
            key_heads=self.key_heads,
            heads=self.heads,
            d_k=self.d_k,
            d_v=self.d_v,
            normalise=self.normalise,
            dtype=self.dtype,
        )
        if self.draws.flag():
            return drawn
        return dataclasses.replace(drawn, beta=drawn.beta.to(self.dtype))

    def nodes(self, count: int) -> DeltaNodes:
        return DeltaNodes.allocate(count, self.state, key_heads=self.key_heads)


@pytest.mark.parametrize("seed", SEEDS)
def test_prefill_and_decode_equal_the_recurrence(seed: int) -> None:
    problem = Problem(seed)
    draws, expected = problem.draws, problem.state.clone()
    counts = problem.table.clone()
    lens = [draws.choice(*LENS) for _ in range(problem.rows)]
    inputs = problem.inputs(sum(lens) + draws.integer(0, 70))
    has_state = draws.bools(problem.rows)
    tracks = None
    if seed % 2 == 0:
        tracks = Draws(seed, device=DEVICE).tracks(
            lens, taken=problem.slots, count=SLOTS
        )
    outs = [
        run(
            inputs,
            state,
            slots=problem.slots,
            qo_indptr=draws.indptr(lens),
            has_state=has_state,
            tracks=tracks,
            folded=table[:, 1],
        )
        for run, state, table in (
            (kernels.gated_delta_prefill, problem.state, problem.table),
            (op.gated_delta_prefill.reference, expected, counts),
        )
    ]
    assert_close(*outs, dtype=problem.worst)
    assert_close(problem.state[1:], expected[1:], dtype=problem.worst)
    written = set(problem.slots.tolist())
    if tracks is not None:
        written |= set(tracks.slots.flatten().tolist())
    others = [s for s in range(SLOTS) if s not in written]
    assert torch.equal(problem.state[others], expected[others])
    assert torch.equal(problem.table[1:], counts[1:])

    inputs = problem.inputs(problem.rows)
    expected = problem.state.clone()
    outs = [
        run(inputs, state, slots=problem.slots, folded=table[:, 1])
        for run, state, table in (
            (kernels.gated_delta_decode, problem.state, problem.table),
            (op.gated_delta_decode.reference, expected, counts),
        )
    ]
    assert_close(*outs, dtype=problem.dtype)
    assert_close(problem.state, expected, dtype=problem.state_dtype)
    assert torch.equal(problem.table[1:], counts[1:])


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
def test_tracks_at_every_chunk_and_at_the_end(state_dtype: torch.dtype) -> None:
    draws = Draws(3, device=DEVICE)
    inputs = draws.delta(203, key_heads=1, heads=2, d_k=16, d_v=16)
    pool = draws.normal(10, 2, 2, 16, 16, dtype=state_dtype)
    states = [pool[:, 1].clone() for _ in range(2)] + [pool[:, 1]]
    tracks = StateTracks(
        lens=draws.longs([[128, 139, 64], [0, 64, 64], [0, 0, 0]]),
        slots=draws.longs([[4, 5, 6], [5, 7, 0], [8, 8, 8]]),
    )
    tables = [draws.counts(10)] * 2
    tables[1] = tables[0].clone()
    outs = [
        run(
            inputs,
            state,
            slots=draws.longs([1, 2, 3]),
            qo_indptr=draws.longs([0, 139, 203, 203]),
            has_state=torch.tensor([True, False, True], device=DEVICE),
            tracks=given,
            folded=folded,
        )
        for run, state, given, folded in (
            (op.gated_delta_prefill.reference, states[0], tracks, tables[0][:, 2]),
            (kernels.gated_delta_prefill, states[1], None, None),
            (kernels.gated_delta_prefill, states[2], tracks, tables[1][:, 2]),
        )
    ]
    expected, plain, tracked = states
    assert_close(outs[2], outs[0], dtype=torch.float32)
    assert_close(tracked[1:], expected[1:], dtype=state_dtype)
    assert torch.equal(outs[2], outs[1]), "tracks or counts changed an output"
    assert torch.equal(tables[1][1:], tables[0][1:])
    assert torch.equal(tracked[[1, 2, 3, 8, 9]], plain[[1, 2, 3, 8, 9]])
    assert torch.equal(tracked[5], tracked[1]), "a row's end is its own state"
    assert torch.equal(tracked[7], tracked[2])


@pytest.mark.parametrize("seed", SEEDS)
def test_trees_and_commits_equal_the_recurrence(seed: int) -> None:
    problem = Problem(seed)
    draws = problem.draws
    width = draws.choice(1, 2, 9, 16, 20, *([50, 64] if DEVICE == "cuda" else []))
    trees = draws.trees(problem.rows, width, chains=seed % 3 == 0)
    inputs = problem.inputs(problem.rows * width)
    before = problem.state.clone()
    nodes, expected = (problem.nodes(len(inputs.v)) for _ in range(2))
    outs = [
        run(
            inputs,
            problem.state,
            slots=problem.slots,
            mask=trees.mask,
            nodes=written,
        )
        for run, written in (
            (kernels.gated_delta_tree, nodes),
            (op.gated_delta_tree.reference, expected),
        )
    ]
    assert torch.equal(problem.state, before), "a verification wrote a state"
    assert_close(*outs, dtype=problem.dtype)
    for name in ("k", "u", "decay"):
        written, wanted = getattr(nodes, name), getattr(expected, name)
        assert_close(written, wanted, dtype=torch.float32)
    counts = problem.table.clone()
    for run, state, table in (
        (kernels.gated_delta_commit, problem.state, problem.table),
        (op.gated_delta_commit.reference, before, counts),
    ):
        run(
            nodes,
            state,
            slots=problem.slots,
            path=trees.path,
            path_lens=trees.path_lens,
            folded=table[:, 1],
        )
    assert_close(problem.state, before, dtype=problem.state_dtype)
    assert torch.equal(problem.table, counts)


@pytest.mark.parametrize(
    ("nodes", "d_k", "d_v", "chains"),
    [
        (33, 40, 24, False),
        (64, 128, 32, True),
        (64, 128, 32, False),
        (7, 100, 48, True),
    ],
)
def test_trees_of_bfloat16_keep_15_bits(
    nodes: int, d_k: int, d_v: int, chains: bool
) -> None:
    """A product of two split factors is off by 3 * 2^-16 where rounding cuts off; a
    node adds up its own and what its ancestors were off by."""
    draws = Draws(nodes, device=DEVICE)
    inputs = draws.delta(
        2 * nodes, key_heads=1, heads=2, d_k=d_k, d_v=d_v, dtype=torch.bfloat16
    )
    # As if nothing had been rounded: these hold the same numbers.
    exact = dataclasses.replace(
        inputs, q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float()
    )
    state, trees = draws.normal(3, 2, d_k, d_v), draws.trees(2, nodes, chains=chains)
    args = {"slots": draws.longs([2, 1]), "mask": trees.mask}
    found, expected = (
        DeltaNodes.allocate(2 * nodes, state, key_heads=1) for _ in range(2)
    )
    out = kernels.gated_delta_tree(inputs, state, nodes=found, **args)
    wanted = op.gated_delta_tree.reference(exact, state, nodes=expected, **args)
    most = expected.u.abs().amax()
    assert (found.u - expected.u).abs().amax() <= 2**-14 * most
    torch.testing.assert_close(found.k, expected.k, rtol=1e-6, atol=1e-7)
    # One bit less where rounding cuts off.
    rounding = 2**-7 if DEVICE == "cpu" else 2**-8
    most = wanted.abs().amax()
    difference = (out.float() - wanted).abs()
    assert (difference <= rounding * wanted.abs() + 2**-14 * most).all()


@pytest.mark.parametrize(
    "size", [(40, 8)] if DEVICE == "cpu" else [(100, 8), (128, 128)]
)
def test_several_chunks_of_float32(size: tuple[int, int]) -> None:
    """What a chunk leaves in the state is what the next one reads."""
    draws = Draws(7, device=DEVICE)
    inputs = draws.delta(200, key_heads=2, heads=4, d_k=size[0], d_v=size[1])
    state = draws.normal(2, 4, *size)
    expected = state.clone()
    outs = [
        run(
            inputs,
            held,
            slots=draws.longs([1]),
            qo_indptr=draws.longs([0, 200]),
            has_state=torch.ones(1, dtype=torch.bool, device=DEVICE),
        )
        for run, held in (
            (kernels.gated_delta_prefill, state),
            (op.gated_delta_prefill.reference, expected),
        )
    ]
    assert_close(*outs, dtype=torch.float32)
    assert_close(state, expected, dtype=torch.float32)


def test_equal_keys_do_not_cancel() -> None:
    """Powers of the triangle of a repeated key grow to 1e18, its inverse does not."""
    draws = Draws(1, device=DEVICE)
    inputs = draws.delta(64, key_heads=1, heads=1, d_k=16, d_v=16)
    inputs.k[:] = inputs.k[:1].clone()
    still = dataclasses.replace(
        inputs, g=torch.zeros_like(inputs.g), beta=torch.ones_like(inputs.beta)
    )
    state = draws.normal(2, 1, 16, 16)
    expected = state.clone()
    outs = [
        run(
            still,
            held,
            slots=draws.longs([1]),
            qo_indptr=draws.longs([0, 64]),
            has_state=torch.ones(1, dtype=torch.bool, device=DEVICE),
        )
        for run, held in (
            (kernels.gated_delta_prefill, state),
            (op.gated_delta_prefill.reference, expected),
        )
    ]
    assert_close(*outs, dtype=torch.float32)
    assert_close(state, expected, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_deep_chain_of_equal_keys_stays_exact(dtype: torch.dtype) -> None:
    """Nodes below the round's depth grow to 1e18 meanwhile, and are replaced."""
    draws = Draws(2, device=DEVICE)
    inputs = draws.delta(64, key_heads=1, heads=1, d_k=16, d_v=16, dtype=dtype)
    inputs.k[:] = inputs.k[:1].clone()
    still = dataclasses.replace(
        inputs, g=torch.zeros_like(inputs.g), beta=torch.ones_like(inputs.beta)
    )
    state, trees = draws.normal(2, 1, 16, 16), draws.trees(1, 64, chains=True)
    found, expected = (DeltaNodes.allocate(64, state, key_heads=1) for _ in range(2))
    args = {"slots": draws.longs([1]), "mask": trees.mask}
    kernels.gated_delta_tree(still, state, nodes=found, **args)
    op.gated_delta_tree.reference(still, state, nodes=expected, **args)
    tolerance = 1e-5 if dtype is torch.float32 else 2**-13
    most = float(expected.u.abs().amax())
    torch.testing.assert_close(found.u, expected.u, rtol=0, atol=tolerance * most)


def test_padded_rows_stay_in_the_scratch_slot() -> None:
    """What a graph replays with stale inputs changes slot 0 only."""
    problem = Problem(0)
    draws = problem.draws
    problem.state[0] = torch.nan
    slots, before = draws.longs([4, 0, 0]), problem.state.clone()
    folded, counts = problem.table[:, 1], problem.table.clone()
    inputs, nodes = problem.inputs(15), problem.nodes(15)
    mask = torch.ones(3, 5, 5, dtype=torch.bool, device=DEVICE)
    args = {"slots": slots, "mask": mask}
    out = kernels.gated_delta_tree(inputs, problem.state, nodes=nodes, **args)
    assert out[:5].isfinite().all()
    kernels.gated_delta_commit(
        nodes,
        problem.state,
        slots=slots,
        path=draws.longs([[0, 1], [99, -3], [1 << 40, 2]]),
        path_lens=draws.longs([0, 2, 1 << 33]),
        folded=folded,
    )
    assert torch.equal(problem.state[1:], before[1:])
    assert torch.equal(problem.table[1:], counts[1:])
    kernels.gated_delta_prefill(
        inputs,
        problem.state,
        slots=slots,
        qo_indptr=draws.longs([0, 5, 5, 5]),
        has_state=draws.bools(3),
        tracks=StateTracks(
            lens=draws.longs([[3, -64, 64], [0, -5, 1 << 33], [7, 64, 0]]),
            slots=draws.longs([[1, 2, 3], [5, 1, 2], [3, 5, 1]]),
        ),
        folded=folded,
    )
    assert torch.equal(problem.state[[1, 2, 3, 5]], before[[1, 2, 3, 5]])
    assert torch.equal(problem.table[[1, 2, 3, 5]], counts[[1, 2, 3, 5]])
    assert problem.state[4].isfinite().all()


def test_what_kernels_would_misread_is_refused() -> None:
    problem = Problem(0)
    slots = problem.slots[:1]
    inputs = problem.inputs(1)
    with pytest.raises(ValueError, match="the state of a slot is not contiguous"):
        kernels.gated_delta_decode(
            inputs,
            problem.state.transpose(2, 3).contiguous().transpose(2, 3),
            slots=slots,
        )
    with pytest.raises(ValueError, match=r"folded: torch.int32 \[5\]; expected"):
        kernels.gated_delta_decode(
            inputs, problem.state, slots=slots, folded=problem.table[1:, 0]
        )
    with pytest.raises(ValueError, match="g is torch.float64"):
        kernels.gated_delta_decode(
            dataclasses.replace(inputs, g=inputs.g.double()), problem.state, slots=slots
        )
    with pytest.raises(ValueError, match="--speculative-num-draft-tokens"):
        kernels.gated_delta_tree(
            problem.inputs(65),
            problem.state,
            slots=slots,
            mask=torch.ones(1, 65, 65, dtype=torch.bool, device=DEVICE),
            nodes=problem.nodes(65),
        )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
