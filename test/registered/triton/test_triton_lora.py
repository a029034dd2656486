"""Products of adapters: the reference against loops, and the kernels against it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sglang.srt.forward.adapter_tiles import (
    TILE,
    AdapterTiles,
    most_tiles,
    plan_tiles,
)
from sglang.srt.layers.ops.activation.op import GATED
from sglang.srt.layers.ops.lora import op, table
from sglang.srt.layers.ops.lora import triton as kernels
from sglang.srt.layers.ops.lora.op import AdapterStack
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count
from sglang.test.state_problem import Draws

register_cpu_ci(est_time=6, suite="cpu")
register_cuda_ci(est_time=30, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = range(count(ci=10 if DEVICE == "cpu" else 40, full=120))
# The interpreter multiplies bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


REFERENCE = SimpleNamespace(
    lora_shrink=op.lora_shrink_ref, lora_expand=op.lora_expand_ref
)


class Problem:
    """A batch of rows of some lengths with adapters of some ranks."""

    def __init__(self, seed: int, sizes: tuple[int, ...] | None = None) -> None:
        draws = Draws(seed, device=DEVICE)
        self.dtype = DTYPES[seed % len(DTYPES)]
        slots = draws.choice(1, 3, 8)
        self.sizes = sizes or draws.choice((16,), (130, 24), (48, 20, 33))
        k, rank = draws.choice(8, 40, 300, 1280), draws.choice(16, 48)
        rows = draws.integer(1, 9)
        self.of_rows = np.array([draws.integer(0, slots) for _ in range(rows)])
        self.lens = np.array([draws.choice(1, 1, 5, 37) for _ in range(rows)])
        tokens, n = int(self.lens.sum()), sum(self.sizes)
        self.ranks = [0] + [draws.integer(0, rank) for _ in range(slots)]
        a = draws.uniform(slots, len(self.sizes), rank, k) - 0.5
        b = draws.uniform(slots, n, rank) - 0.5
        for slot, own in enumerate(self.ranks[1:]):
            a[slot, :, own:] = 0.0
            b[slot, :, own:] = float("nan") if own == 0 else 0.0
        self.stack = AdapterStack(
            a=a.flatten(1, 2).to(self.dtype),
            b=b.to(self.dtype),
            ranks=torch.tensor(self.ranks, dtype=torch.int32, device=DEVICE),
            sizes=self.sizes,
        )
        # Rows of a wider matrix.
        self.x = (draws.uniform(tokens, k + 8) - 0.5).to(self.dtype)[:, :k]
        self.y = (draws.uniform(tokens, n) - 0.5).to(self.dtype)

    def tiles(self) -> AdapterTiles | None:
        words = plan_tiles(self.of_rows, self.lens)
        if words is None:
            return None
        # Padding, as in a graph, beyond the tokens.
        beyond = np.zeros((2, 1 + TILE), dtype=np.int32)
        beyond[:, 1:] = len(self.x) + np.arange(TILE)
        return AdapterTiles(
            words=torch.from_numpy(np.concatenate((words, beyond))).to(DEVICE)
        )

    def by_loops(self) -> Tensor:
        """Return the answer, token by token and shard by shard, in float64."""
        result = self.y.double()
        of_tokens = np.repeat(self.of_rows, self.lens)
        padded = self.stack.rank
        for token, slot in enumerate(of_tokens.tolist()):
            rank = self.ranks[slot]
            start = 0
            for shard, size in enumerate(self.sizes):
                if rank:
                    first = shard * padded
                    a = self.stack.a[slot - 1, first : first + rank].double()
                    b = self.stack.b[slot - 1, start : start + size, :rank].double()
                    inner = (a @ self.x[token].double()).to(self.dtype).double()
                    result[token, start : start + size] += b @ inner
                start += size
        return result


def assert_close(found: Tensor, due: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(
        found.double(), due.double(), rtol=tolerance, atol=3 * tolerance
    )


@pytest.fixture(params=["few tiles", "many tiles"])
def any_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of launches for few tiles and for many."""
    few, many = table.SHAPES
    shape = few if request.param == "few tiles" else many
    monkeypatch.setattr(kernels, "shape_of", lambda _: shape)


def joined(problem: Problem) -> Tensor:
    """The layer's product with the inner products of all slots behind it."""
    a = problem.stack.a.flatten(0, 1)
    inner = (problem.x.float() @ a.float().t()).to(problem.dtype)
    return torch.cat((problem.y, inner), dim=1)


@pytest.mark.usefixtures("any_tiles")
@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_both_forms_equal_loops(seed: int, is_joined: bool) -> None:
    problem = Problem(seed)
    tiles = problem.tiles()
    if tiles is None:
        assert not problem.of_rows.any()
        return
    due = problem.by_loops()
    x, stack = problem.x, problem.stack
    clean = stack._replace(b=stack.b.nan_to_num(0.0))
    both = joined(problem) if is_joined else None

    def expand(ops: Any, stack: AdapterStack) -> Tensor:
        if both is not None:
            found = ops.lora_expand(both, None, stack, tiles)
            out = problem.y.new_empty(problem.y.shape)
            assert ops.lora_expand(both, None, stack, tiles, out=out) is out
            assert torch.equal(out, found), "the same bits in every run"
            return out
        y, inner = problem.y.clone(), ops.lora_shrink(x, stack, tiles)
        assert ops.lora_expand(y, inner, stack, tiles) is y
        return y

    assert_close(expand(REFERENCE, clean), due)
    # A slot without an adapter is not read: its B is not a number.
    y = expand(kernels, stack)
    assert_close(y, due)
    untouched = np.repeat(problem.of_rows, problem.lens) == 0
    assert torch.equal(y[untouched], problem.y[untouched]), "to the bit"
    assert torch.equal(expand(kernels, stack), y), "the same bits in every run"


@pytest.mark.usefixtures("any_tiles")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("activation", GATED)
def test_the_activation_follows(seed: int, activation: str) -> None:
    """Also in rows without an adapter."""
    problem = Problem(seed, sizes=(70, 70))
    tiles = problem.tiles()
    if tiles is None:
        return
    x, stack = problem.x, problem.stack
    activated = GATED[activation].reference
    for y, inner in (
        (problem.y, kernels.lora_shrink(x, stack, tiles)),
        (joined(problem), None),
    ):
        due = activated(kernels.lora_expand(y.clone(), inner, stack, tiles)).double()
        out = kernels.lora_expand_gated(y.clone(), inner, stack, tiles, activation)
        assert_close(out, due)


@pytest.mark.parametrize("seed", SEEDS)
def test_tiles_hold_each_token_once(seed: int) -> None:
    draws = Draws(seed)
    slots = np.array([draws.integer(0, 4) for _ in range(draws.integer(0, 40))])
    lens = np.array([draws.choice(1, 2, 17, 40) for _ in slots], dtype=np.int64)
    words = plan_tiles(slots, lens)
    of_tokens = np.repeat(slots, lens)
    if words is None:
        assert not slots.any()
        return
    assert slots.any()
    assert len(words) <= most_tiles(len(of_tokens), 5)
    rows = words[:, 1:]
    assert sorted(rows[rows >= 0]) == list(range(len(of_tokens)))
    for tile in words:
        live = tile[1:][tile[1:] >= 0]
        assert len(live) and (of_tokens[live] == tile[0]).all()
    groups = AdapterTiles.on_cpu(words).groups
    assert groups is not None
    assert {slot for slot, _ in groups} == set(slots.tolist()) - {0}
    for slot, found in groups:
        assert found.tolist() == np.flatnonzero(of_tokens == slot).tolist()


def test_shapes_that_do_not_fit_are_refused() -> None:
    problem = Problem(4)
    tiles = problem.tiles()
    assert tiles is not None
    x, y, stack = problem.x, problem.y, problem.stack
    inner = kernels.lora_shrink(x, stack, tiles)
    with pytest.raises(ValueError, match="lora_shrink: x"):
        kernels.lora_shrink(x[:, 1:], stack, tiles)
    for other in (
        stack._replace(sizes=(*problem.sizes, 8)),
        stack._replace(b=stack.b.double()),
    ):
        with pytest.raises(ValueError, match="lora_expand: y"):
            kernels.lora_expand(y, inner, other, tiles)
    with pytest.raises(ValueError, match="expected gate and up"):
        kernels.lora_expand_gated(y, inner, stack, tiles, "silu")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
