"""Checksums of states: every form of the operations keeps those of what it stores, and
marks slots that hold other bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kv_canary.kernels.reference import state_sums as reference_sums
from kv_canary.kernels.triton import state_sums as triton_sums
from kv_canary.state_sums import (
    CONV_CHANNELS,
    MATRIX_COLUMNS,
    StateCells,
    factors,
    state_sums,
)
from sglang.srt.layers.ops.state.gated_delta import chunked
from sglang.srt.layers.ops.state.gated_delta import reference as delta_reference
from sglang.srt.layers.ops.state.gated_delta import triton as delta_kernels
from sglang.srt.layers.ops.state.gated_delta.inputs import DeltaNodes
from sglang.srt.layers.ops.state.short_conv import gathered
from sglang.srt.layers.ops.state.short_conv import reference as conv_reference
from sglang.srt.layers.ops.state.short_conv import triton as conv_kernels
from sglang.srt.mem_cache.state_sums import StateSums
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count
from sglang.test.state_problem import Draws

register_cpu_ci(est_time=15, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOTS, ROWS, LENS = 9, 3, (70, 1, 130)
OPS: dict[str, tuple[Any, str]] = {
    "delta reference": (delta_reference, "gated_delta_{}_ref"),
    "delta chunked": (chunked, "gated_delta_{}"),
    "delta triton": (delta_kernels, "gated_delta_{}"),
    "conv reference": (conv_reference, "short_conv_{}_ref"),
    "conv gathered": (gathered, "short_conv_{}"),
    "conv triton": (conv_kernels, "short_conv_{}"),
}
FORMS = ("decode", "prefill", "tree", "commit")
Call = Callable[..., object]


class World:
    """One layer's states in a pool of two, their sums, and a call of each form."""

    def __init__(self, name: str, form: str, seed: int) -> None:
        self.draws = draws = Draws(seed, device=DEVICE)
        self.dtype = DTYPES[seed % 3]
        self.is_delta = name.startswith("delta")
        of_slot = (4, 24, 40) if self.is_delta else (300, 3)
        if seed % 2:
            of_slot = (2, 16, 16) if self.is_delta else (20, 2)
        self.pool = draws.normal(SLOTS, 2, *of_slot, dtype=self.dtype)
        self.slots = draws.slots(ROWS, SLOTS - 3)
        self.has_state = torch.tensor([True, True, False], device=DEVICE)
        self.form = form
        module, pattern = OPS[name]
        run = getattr(module, pattern.format(form))
        rows = self._delta(form) if self.is_delta else self._conv(form)
        self.run: Call = partial(run, slots=self.slots, **rows)
        self.lead: tuple[object, ...]

    @property
    def state(self) -> Tensor:
        return self.pool[:, 1]

    def sums(self) -> StateSums:
        """Sums of all states, and marks, as columns of tables of two layers."""
        kept = torch.zeros(
            SLOTS, 2, StateCells.of(self.state).number, dtype=torch.int64, device=DEVICE
        )
        kept[:, 1] = state_sums(self.state)
        marks = torch.zeros(SLOTS, 2, dtype=torch.int32, device=DEVICE)
        return StateSums(kept=kept[:, 1], marks=marks[:, 1])

    def call(self, state: Tensor, sums: StateSums | None) -> object:
        return self.run(*self.lead[:-1], state, sums=sums, **self.lead[-1])

    def _rows(self, form: str, tokens: int) -> dict[str, Any]:
        if form == "prefill":
            self.tracks = self.draws.tracks(list(LENS), taken=self.slots, count=SLOTS)
            return {
                "qo_indptr": self.draws.indptr(list(LENS)),
                "has_state": self.has_state,
                "tracks": self.tracks,
            }
        return {}

    def _delta(self, form: str) -> dict[str, Any]:
        heads, d_k, d_v = self.state.shape[1:]
        trees = self.draws.trees(ROWS, 5)
        tokens = {"decode": ROWS, "prefill": sum(LENS)}.get(form, 5 * ROWS)
        inputs = self.draws.delta(
            tokens, key_heads=2, heads=heads, d_k=d_k, d_v=d_v, dtype=self.dtype
        )
        nodes = DeltaNodes.allocate(5 * ROWS, self.state, key_heads=2)
        if form == "commit":
            nodes.k.copy_(inputs.k)
            nodes.u.copy_(inputs.v)
            self.lead = (nodes, {})
            return {"path": trees.path, "path_lens": trees.path_lens}
        self.lead = (inputs, {})
        more = {"mask": trees.mask, "nodes": nodes} if form == "tree" else {}
        return more | self._rows(form, tokens)

    def _conv(self, form: str) -> dict[str, Any]:
        channels, width = self.state.shape[1:]
        trees = self.draws.trees(ROWS, 5)
        tokens = {"decode": ROWS, "prefill": sum(LENS)}.get(form, 5 * ROWS)
        x = self.draws.normal(tokens, channels, dtype=self.dtype)
        if form == "commit":
            self.lead = (x, {})
            return {"path": trees.path, "path_lens": trees.path_lens}
        conv = self.draws.conv(channels, width + 1, dtype=self.dtype)
        self.lead = (x, conv, {})
        more = {"parent_index": trees.parent_index} if form == "tree" else {}
        return more | self._rows(form, tokens)


each_op = pytest.mark.parametrize("name", OPS)
each_form = pytest.mark.parametrize("form", FORMS)


@each_op
@each_form
def test_sums_are_of_what_is_stored_and_change_nothing(name: str, form: str) -> None:
    for seed in range(count(ci=3, full=30)):
        world = World(name, form, seed)
        plain = world.pool.clone()[:, 1]
        sums = world.sums()
        outs = [world.call(plain, None), world.call(world.state, sums)]
        if outs[0] is not None:
            assert torch.equal(*outs)
        assert torch.equal(plain, world.state)
        assert not sums.marks.any()
        assert torch.equal(sums.kept[1:], state_sums(world.state)[1:])


@pytest.mark.filterwarnings("ignore:overflow encountered")
@each_op
@each_form
def test_a_flipped_bit_marks_its_slot(name: str, form: str) -> None:
    for seed in range(count(ci=6, full=60)):
        world = World(name, form, seed)
        sums = world.sums()
        row = world.draws.integer(0, ROWS - 1)
        flip(world, int(world.slots[row]))
        # Nobody reads it.
        flip(world, int(set(range(1, SLOTS)).difference(world.slots.tolist()).pop()))
        world.call(world.state, sums)
        is_read = form != "prefill" or bool(world.has_state[row])
        if form == "commit" and world.is_delta:
            is_read = bool(world.run.keywords["path_lens"][row])
        marked = [int(world.slots[row])] if is_read else []
        assert sums.marks.nonzero().flatten().tolist() == marked


def flip(world: World, slot: int) -> None:
    """Flip a bit in a slot."""
    cells = world.state[slot].view(-1).view(torch.uint8)
    cells[world.draws.integer(0, len(cells) - 1)] ^= 1 << world.draws.integer(0, 7)


@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("form", [triton_sums, reference_sums])
def test_states_that_nobody_loads_are_compared(form: Any, is_delta: bool) -> None:
    for seed in range(3):
        world = World("delta triton" if is_delta else "conv triton", "decode", seed)
        kept = torch.stack([state_sums(world.pool[:, i]) for i in range(2)], dim=1)
        marks = torch.zeros(SLOTS, 2, dtype=torch.int32, device=DEVICE)
        slots = world.draws.longs([1, 3, 4, 7])
        form.compare_states(world.pool, kept, marks, slots)
        assert not marks.any()
        flip(world, 4)
        flip(world, 5)
        form.compare_states(world.pool, kept, marks, slots)
        assert marks.nonzero().tolist() == [[4, 1]]


@pytest.mark.parametrize(
    ("taps", "columns", "size"), [(256, 256, MATRIX_COLUMNS), (3, 16384, CONV_CHANNELS)]
)
def test_no_two_flips_cancel(taps: int, columns: int, size: int) -> None:
    """Factors differ in any cell of the largest heads and convolutions."""
    cells = factors(torch.arange(taps), torch.arange(columns))
    for cell in cells.split(size, dim=1):
        assert len(cell.unique()) == cell.numel()
    assert (cells % 2 == 1).all() and (cells > 0).all() and (cells < 1 << 32).all()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
