"""The second layer of the mock model as a recurrent state: a running sum of hashes.

What attention would add up over the context, `X_1`, is kept in the state instead, as 64
signs: half of them where a convolution keeps its inputs, half in the matrices. So the
model's tokens are the same, and a state that is stale, lost, taken from another slot or
folded once too often changes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.layers.ops.state.shared.sums import compare_sums, keep_sums
from sglang.srt.layers.state.layer import StateLayer
from sglang.srt.models import mock_math, mock_ops

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.state.forward import StateCommit, StateForward, StateTrees
    from sglang.srt.mem_cache.state_pool import LayerState

_HALF = mock_math.FOLD_BITS // 2
LAYER = 1


def check_state(config: ModelConfig) -> None:
    """Raise ValueError if the mock model cannot keep this state."""
    state = config.state
    assert state is not None
    delta, inputs = state.delta, state.conv_channels * (state.conv_width - 1)
    cells = 0 if delta is None else delta.heads * delta.d_k * delta.d_v
    if state.layers != (LAYER,) or min(inputs, cells) < _HALF:
        raise ValueError(
            f"{config.file}: the mock model keeps a state in layer {LAYER} alone, of "
            f"at least {_HALF} inputs and {_HALF} elements of matrices; got layers "
            f"{list(state.layers)}, {inputs} inputs and {cells} elements"
        )


class MockFold(StateLayer):
    """Returns X_1 of every token; its input are keys x_1, both as 64 signs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_id = LAYER
        self.width = self.out_width = mock_math.FOLD_BITS
        # Terms of the nodes of the last verification.
        self._terms = torch.empty(0, dtype=torch.int64)

    def run(self, x: Tensor, dtype: torch.dtype, forward_batch: object) -> Tensor:
        """Fold the keys x [T] int64; return X_1 [T] int64."""
        packed = mock_math.signs(x, self.width).to(dtype)
        return mock_math.from_signs(self(packed, forward_batch))

    def fold(self, packed: Tensor, state: StateForward) -> Tensor:
        terms = mock_math.term(mock_math.from_signs(packed), LAYER)
        cells = state.layer(self.layer_id)
        before, is_whole = _read(cells, state.slots, has_state=state.has_state)
        if state.trees is not None:
            folds = self._fold_trees(terms, before, is_whole, state.trees)
        elif state.qo_indptr is None:
            folds = mock_ops.keep_whole(before + terms, is_whole)
            _write(cells, state.slots, folds, cells.conv_folded[state.slots] + 1)
        else:
            folds = self._fold_rows(terms, before, is_whole, state, cells)
        return mock_math.signs(folds, self.width).to(packed.dtype)

    def _fold_trees(
        self, terms: Tensor, before: Tensor, is_whole: Tensor, trees: StateTrees
    ) -> Tensor:
        """Add up the terms on each node's path, and keep them."""
        if len(self._terms) < trees.nodes.size:
            self._terms = terms.new_zeros(trees.nodes.size)
        self._terms[: len(terms)] = terms
        of_row = terms.view(len(before), 1, -1)
        sums = (trees.mask * of_row).sum(-1)
        before = mock_ops.keep_whole(before, is_whole)
        return (before[:, None] + sums).view(-1)

    def commit(self, accepted: StateCommit) -> None:
        cells = accepted.pool.layer(self.layer_id)
        before, is_whole = _read(cells, accepted.slots)
        steps = torch.arange(accepted.path.shape[1], device=before.device)
        on_path = steps < accepted.path_lens[:, None]
        terms = self._terms[accepted.path.clamp(min=0)] * on_path
        folds = mock_ops.keep_whole(before + terms.sum(1), is_whole)
        count = cells.conv_folded[accepted.slots] + accepted.path_lens
        _write(cells, accepted.slots, folds, count)

    @staticmethod
    def _fold_rows(
        terms: Tensor,
        before: Tensor,
        is_whole: Tensor,
        state: StateForward,
        cells: LayerState,
    ) -> Tensor:
        """Fold the tokens of ragged rows, and store their checkpoints."""
        assert state.qo_indptr is not None and state.has_state is not None
        begins, ends = state.qo_indptr[:-1], state.qo_indptr[1:]
        whole = is_whole | ~state.has_state
        before = mock_ops.keep_whole(before.where(state.has_state, 0), whole)
        sums = torch.cat((torch.zeros_like(terms[:1]), terms.cumsum(0)))
        tokens = torch.arange(len(terms), device=terms.device)
        row = torch.searchsorted(ends, tokens, right=True)
        folds = sums[1:] - sums[begins][row] + before[row]
        known = cells.conv_folded[state.slots].where(state.has_state, 0)
        _write(cells, state.slots, folds[ends - 1], known + ends - begins)
        if state.tracks is not None:
            lens, slots = state.tracks.lens, state.tracks.slots
            places = (begins[:, None] + lens - 1).clamp(min=0)
            _write(
                cells,
                slots.where(lens > 0, 0).view(-1),
                folds[places.view(-1)],
                (known[:, None] + lens).view(-1),
            )
        return folds


def _read(
    cells: LayerState, slots: Tensor, *, has_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sums in these slots [R], and whether they are valid, bool [R]."""
    assert cells.matrix is not None
    compare_sums(cells.conv_sums, cells.conv, slots, has_state=has_state)
    compare_sums(cells.matrix_sums, cells.matrix, slots, has_state=has_state)
    halves = [part[slots].flatten(1)[:, :_HALF] for part in (cells.conv, cells.matrix)]
    code = torch.cat([half.float() for half in halves], dim=1)
    return mock_math.from_signs(code), (code.abs() == 1).all(-1)


def _write(cells: LayerState, slots: Tensor, folds: Tensor, count: Tensor) -> None:
    """Store sums of `count` tokens each."""
    for folded in (cells.conv_folded, cells.matrix_folded):
        folded[slots] = count.to(torch.int32)
    code = mock_math.signs(folds, 2 * _HALF)
    assert cells.matrix is not None
    for part, half in zip(
        (cells.conv, cells.matrix), code.split(_HALF, 1), strict=True
    ):
        stored = torch.zeros(len(slots), part[0].numel(), device=part.device)
        stored[:, :_HALF] = half
        part[slots] = stored.view(-1, *part.shape[1:]).to(part.dtype)
    keep_sums(cells.conv_sums, cells.conv, slots)
    keep_sums(cells.matrix_sums, cells.matrix, slots)
