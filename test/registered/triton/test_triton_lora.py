"""Products of adapters: the reference against loops, and the kernels against it."""

from __future__ import annotations

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
from sglang.srt.layers.ops.lora import triton as kernels
from sglang.srt.layers.ops.lora.op import AdapterStack, lora_add_ref
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count
from sglang.test.state_problem import Draws

register_cpu_ci(est_time=6, suite="cpu")
register_cuda_ci(est_time=30, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = range(count(ci=10, full=120) if DEVICE == "cpu" else 120)
# The interpreter multiplies bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


class Problem:
    """A batch of rows of some lengths with adapters of some ranks."""

    def __init__(self, seed: int) -> None:
        draws = Draws(seed, device=DEVICE)
        self.dtype = DTYPES[seed % len(DTYPES)]
        slots = draws.choice(1, 3, 8)
        self.sizes = draws.choice((16,), (130, 24), (48, 20, 33))
        k, rank = draws.choice(8, 40, 300), draws.choice(16, 48)
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
        # Unused tiles, as in a graph.
        unused = np.full((2, 1 + TILE), 0, dtype=np.int32)
        return AdapterTiles(
            words=torch.from_numpy(np.concatenate((words, unused))).to(DEVICE)
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


@pytest.mark.parametrize("seed", SEEDS)
def test_both_forms_equal_loops(seed: int) -> None:
    problem = Problem(seed)
    tiles = problem.tiles()
    if tiles is None:
        assert not problem.of_rows.any()
        return
    due = problem.by_loops()
    clean = problem.stack._replace(b=problem.stack.b.nan_to_num(0.0))
    assert_close(lora_add_ref(problem.y.clone(), problem.x, clean, tiles), due)
    y = problem.y.clone()
    # A slot without an adapter is not read: its B is not a number.
    assert kernels.lora_add(y, problem.x, problem.stack, tiles) is y
    assert_close(y, due)
    untouched = np.repeat(problem.of_rows, problem.lens) == 0
    assert torch.equal(y[untouched], problem.y[untouched]), "to the bit"


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
    assert len(words) <= most_tiles(len(of_tokens), 4)
    rows = words[:, 1:]
    assert sorted(rows[rows >= 0]) == np.flatnonzero(of_tokens).tolist()
    for tile in words:
        live = tile[1:][tile[1:] >= 0]
        assert len(live) and (of_tokens[live] == tile[0]).all()
    groups = AdapterTiles.on_cpu(words).groups
    assert groups is not None
    for slot, found in groups:
        assert found.tolist() == np.flatnonzero(of_tokens == slot).tolist()


def test_shapes_that_do_not_fit_are_refused() -> None:
    problem = Problem(4)
    tiles = problem.tiles()
    assert tiles is not None
    for stack, x in (
        (problem.stack, problem.x[:, 1:]),
        (problem.stack._replace(sizes=(*problem.sizes, 8)), problem.x),
        (problem.stack._replace(b=problem.stack.b.double()), problem.x),
    ):
        with pytest.raises(ValueError, match="lora_add: y"):
            kernels.lora_add(problem.y, x, stack, tiles)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
