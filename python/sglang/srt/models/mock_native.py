"""Native implementations of the mock model's ops: allocate results, order arguments.

Each has the parameters of its torch reference and is imported at its first call,
because the kernels may not be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.models import mock_math
from sglang_kernels import mock

if TYPE_CHECKING:
    from sglang.srt.models.mock_draft_math import DraftSettings

_QKV = (mock_math.NUM_HEADS + 2 * mock_math.NUM_KV_HEADS) * mock_math.HEAD_DIM


def embedded_keys(embedded: Tensor, positions: Tensor) -> Tensor:
    out = torch.empty_like(positions)
    mock.embedded_keys(embedded, positions, out)
    return out


def next_keys(fold0: Tensor, positions: Tensor) -> Tensor:
    out = torch.empty_like(fold0)
    mock.next_keys(fold0, positions, out)
    return out


def qkv(x: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape[0], _QKV, dtype=dtype)
    mock.qkv(x, layer, out)
    return out


def fold(mean: Tensor, count: Tensor, layer: int) -> Tensor:
    out = torch.empty_like(count)
    mock.fold(mean, count, layer, out)
    return out


def fold_onto(
    before: Tensor, x: Tensor, mean: Tensor, count: Tensor, layer: int
) -> Tensor:
    out = torch.empty_like(count)
    mock.fold_onto(before, x, mean, count, layer, out)
    return out


def keep_whole(fold: Tensor, is_whole: Tensor) -> Tensor:
    out = torch.empty_like(fold)
    mock.keep_whole(fold, is_whole, out)
    return out


def hidden_state(
    fold0: Tensor, fold1: Tensor, positions: Tensor, vocab: int, dtype: torch.dtype
) -> Tensor:
    out = torch.empty(fold0.shape[0], mock_math.HIDDEN_SIZE, dtype=dtype)
    mock.hidden(fold0, fold1, positions, vocab, out)
    return out


def aux_states(hidden: Tensor) -> list[Tensor]:
    out = hidden.new_empty(mock_math.NUM_LAYERS + 1, *hidden.shape)
    mock.aux_states(hidden, out)
    return list(out.unbind())


def read_folds(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = states.shape[0]
    folds = torch.empty(mock_math.NUM_LAYERS, rows, dtype=torch.int64)
    is_whole = torch.empty(rows, dtype=torch.bool)
    mock.read_folds(states, folds, is_whole)
    fold0, fold1 = folds.unbind()
    return fold0, fold1, is_whole


def proposed_state(
    fold0: Tensor,
    fold1: Tensor,
    positions: Tensor,
    settings: DraftSettings,
    dtype: torch.dtype,
) -> Tensor:
    out = torch.empty(fold0.shape[0], mock_math.HIDDEN_SIZE, dtype=dtype)
    numbers = [settings.vocab_size, *settings.draw_limits()]
    mock.proposal(fold0, fold1, positions, numbers, out)
    return out
