"""Ops of the mock model and its draft heads: its arithmetic in few launches.

The references are built from `mock_math` and `mock_draft_math`, like the oracles, so an
oracle never shares a kernel with the model that it checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.hashing import mix64
from sglang.srt.models import mock_draft_math, mock_math
from sglang.srt.utils.dispatch import Op

if TYPE_CHECKING:
    from sglang.srt.models.mock_draft_math import DraftSettings

_NATIVE = "sglang.srt.models.mock_native:"
_SPOILT = 0x5BAD


def embedded_keys_ref(embedded: Tensor, positions: Tensor) -> Tensor:
    """Return the keys x_0, int64 [T], of embedded tokens [T, 512]."""
    return mock_math.key_layer0(mock_math.decode_token(embedded), positions)


embedded_keys = Op(reference=embedded_keys_ref, native=_NATIVE + "embedded_keys")
next_keys = Op(reference=mock_math.key_layer1, native=_NATIVE + "next_keys")
qkv = Op(reference=mock_math.qkv, native=_NATIVE + "qkv")
fold = Op(reference=mock_math.fold, native=_NATIVE + "fold")


def keep_whole_ref(fold: Tensor, is_whole: Tensor) -> Tensor:
    """Return folds [T], with a number that no oracle predicts where not `is_whole`."""
    return fold.where(is_whole, mix64(fold ^ _SPOILT))


keep_whole = Op(reference=keep_whole_ref, native=_NATIVE + "keep_whole")


def fold_onto_ref(
    before: Tensor, x: Tensor, mean: Tensor, count: Tensor, layer: int
) -> Tensor:
    """Return folds `before` [T] plus the term of keys x [T].

    If attention read NaN or a slot that was never written, judging by its means [T,
    512] over `count` elements, the result is a number that no oracle predicts.
    """
    folds = before + mock_math.term(x, layer)
    return keep_whole_ref(folds, _is_plausible(mean, count))


def _is_plausible(mean: Tensor, count: Tensor) -> Tensor:
    """Return whether attention read only written slots, judging by its mean: bool [T].

    A slot never written outweighs all others and leaves a mean of zero. Sums of
    signatures are zero in every channel of every head with a chance below 2^-40.
    """
    sums = (mean.float() * count[:, None]).round()
    return sums.isfinite().all(-1) & (sums != 0).any(-1)


fold_onto = Op(reference=fold_onto_ref, native=_NATIVE + "fold_onto")


def hidden_state_ref(
    fold0: Tensor, fold1: Tensor, positions: Tensor, vocab: int, dtype: torch.dtype
) -> Tensor:
    """Return the hidden states of the next tokens, [T, 512]."""
    tokens = mock_math.next_token(fold0, fold1, positions, vocab)
    return mock_math.hidden_state(tokens, fold0, fold1).to(dtype)


hidden_state = Op(reference=hidden_state_ref, native=_NATIVE + "hidden_state")
aux_states = Op(reference=mock_math.aux_states, native=_NATIVE + "aux_states")


def read_folds_ref(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return X_0 and X_1 [T] of hidden states, and whether they are valid, bool [T].

    Args:
        states: hidden states [T, 512], or all three captured ones, [T, 3 * 512], which
            are valid if they agree.
    """
    parts = states.split(mock_math.HIDDEN_SIZE, dim=-1)
    assert len(parts) in (1, mock_math.NUM_LAYERS + 1), states.shape
    fold0, fold1, is_whole = mock_math.read_folds(parts[0])
    for i, part in enumerate(parts[1:], start=1):
        other0, other1, is_other_whole = mock_math.read_folds(
            mock_math.aux_origin(part, i)
        )
        is_whole = is_whole & is_other_whole & (other0 == fold0) & (other1 == fold1)
    return fold0, fold1, is_whole


read_folds = Op(reference=read_folds_ref, native=_NATIVE + "read_folds")


def proposed_state_ref(
    fold0: Tensor,
    fold1: Tensor,
    positions: Tensor,
    settings: DraftSettings,
    dtype: torch.dtype,
) -> Tensor:
    """Return the hidden states of a head's proposals, [T, 512]."""
    code, weights = mock_draft_math.proposal(fold0, fold1, positions, settings)
    return mock_draft_math.hidden_state(code, weights, fold0, fold1).to(dtype)


proposed_state = Op(reference=proposed_state_ref, native=_NATIVE + "proposed_state")
