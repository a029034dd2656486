"""What the check of hidden states adds to a cycle: each hook is one launch of `carry`,
without arithmetic in torch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from canary_world import DEVICE, findings, long, small_world
from torch.utils._python_dispatch import TorchDispatchMode

from kv_canary.carried import CarriedState
from kv_canary.checks import Reason
from kv_canary.state import CanaryState
from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.draft_trees.buffers import (
    DraftCandidates,
    DraftLevels,
    DraftTree,
    VerifyResult,
)
from sglang.srt.draft_trees.draft_input import EagleDraftInput
from sglang.srt.draft_trees.ops.tree.op import select_top_k
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.kv_canary import draft_state
from sglang.srt.kv_canary.draft_state import DraftState
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=3, suite="cpu")
register_cuda_ci(est_time=3, suite="cuda")

WIDTH, REQUESTS = 16, 2
SHAPES = [
    TreeShape(topk=k, num_steps=steps, num_draft_tokens=nodes)
    for k, steps, nodes in ((8, 5, 64), (3, 4, 9), (1, 3, 4), (4, 1, 5))
]


class Launched(TorchDispatchMode):
    """Names calls of `carry`, and the torch operations that launch something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def carry(self, state: CanaryState, carried: CarriedState) -> None:
        carried.check_layout()
        self.names.append("carry")


class Cycle:
    """A cycle of made-up numbers through the hooks of one draft worker.

    Args:
        swaps_at: level where the branches continue from other hidden states.
    """

    def __init__(self, shape: TreeShape, *, swaps_at: int | None = None) -> None:
        self.launches: list[tuple[str, list[str]]] = []
        self.state = small_world().state
        self.shape, self._swaps_at = shape, swaps_at
        self.check = DraftState(self.state, max_requests=REQUESTS + 2, shape=shape)
        self._rng = torch.Generator().manual_seed(5)
        width = shape.accept_width
        result = VerifyResult.allocate(REQUESTS, shape, device=DEVICE)
        result.accept_index.fill_(-1)
        result.accept_index[:, :1] = long([0, shape.num_draft_tokens])[:, None]
        result.accept_lens.copy_(long([1, 1]))
        self.live: Any = SimpleNamespace(
            bs=REQUESTS,
            identity=long([2, 1, 40, 50, 0, 0, 0, 0]).view(4, REQUESTS),
            seq_lens=long([7, 9]),
            levels=DraftLevels.allocate(REQUESTS, shape, device=DEVICE),
            tree=DraftTree.allocate(REQUESTS, shape, device=DEVICE),
            result=result,
            hidden_states=self._random(REQUESTS * width, WIDTH),
        )

    def _random(self, *size: int) -> torch.Tensor:
        return torch.rand(*size, generator=self._rng).to(DEVICE)

    def _candidates(self, rows: int) -> DraftCandidates:
        k = self.shape.topk
        ids = torch.arange(rows * k, device=DEVICE).view(rows, k)
        return DraftCandidates(probs=self._random(rows, k), ids=ids)

    def _call(self, hook: Callable[..., None], *args: Any) -> None:
        hook(*args)

    def run(self) -> None:
        live, shape, check = self.live, self.shape, self.check
        hidden: torch.Tensor = self._random(REQUESTS * shape.accept_width, WIDTH)
        last = hidden[:: shape.accept_width]
        head: Any = SimpleNamespace(hidden=hidden, inputs=last.clone())
        given, candidates = last, self._candidates(REQUESTS)
        self._call(check.on_extend, self._extend_batch(), head, candidates, given)
        self._call(check.on_gather, live, candidates, given)
        for level in range(shape.num_steps - 1):
            read = given.index_select(0, self._select(level, candidates))
            if level == self._swaps_at:
                read = read.flip(0)
            given = self._random(REQUESTS * shape.topk, WIDTH)
            candidates = self._candidates(len(given))
            self._call(check.on_step, live, level, read, given)
        nodes = self._random(REQUESTS * shape.num_draft_tokens, WIDTH)
        taken = live.result.accept_index.view(-1).clamp(min=0)
        live.hidden_states.copy_(nodes.index_select(0, taken))
        self._call(check.on_take, live, nodes)

    def _select(self, level: int, candidates: DraftCandidates) -> torch.Tensor:
        rows = torch.zeros(REQUESTS * self.shape.topk, dtype=torch.int64, device=DEVICE)
        select_top_k(
            level,
            shape=self.shape,
            topk_p=candidates.probs,
            topk_index=candidates.ids,
            hot_token_id=None,
            levels=self.live.levels,
            input_ids=torch.zeros_like(rows),
            hidden_rows=rows,
        )
        return rows

    def _extend_batch(self) -> Any:
        width, live = self.shape.accept_width, self.live
        ends = range(0, (REQUESTS + 1) * width, width)
        return SimpleNamespace(
            forward_mode=ForwardMode.DRAFT_EXTEND_V2,
            req_pool_indices=live.identity[0],
            req_serial=live.identity[1],
            prefix_lens=live.seq_lens,
            extend_lens=long([width] * REQUESTS),
            qo_indptr=long(list(ends)),
            spec_info=EagleDraftInput(
                hidden_states=None, accept_lens=live.result.accept_lens
            ),
        )


class Counted(Cycle):
    """Counts what each hook launches."""

    def _call(self, hook: Callable[..., None], *args: Any) -> None:
        with Launched() as launched, patch.object(draft_state, "carry", launched.carry):
            hook(*args)
        self.launches.append((hook.__name__, launched.names))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_hook_is_one_launch(shape: TreeShape) -> None:
    cycle = Counted(shape)
    cycle.run()
    steps = ["on_step"] * (shape.num_steps - 1)
    due = ["on_extend", "on_gather", *steps, "on_take"]
    assert cycle.launches == [(hook, ["carry"]) for hook in due]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sound_cycle_is_silent(shape: TreeShape) -> None:
    cycle = Cycle(shape)
    for _ in range(3):
        cycle.run()
    assert findings(cycle.state) == []


@pytest.mark.parametrize(
    ("shape", "level"),
    [(shape, level) for shape in SHAPES for level in range(shape.num_steps - 1)],
    ids=str,
)
def test_a_level_that_goes_on_from_other_states_is_named(
    shape: TreeShape, level: int
) -> None:
    """All levels are compared, whether the parents say what they follow or not."""
    cycle = Cycle(shape, swaps_at=level)
    cycle.run()
    found = findings(cycle.state)
    assert {reason for reason, *_ in found} == {Reason.CARRIED_STATE}
    assert {(row, position) for _, row, _, position in found} == {(2, 7), (1, 9)}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
