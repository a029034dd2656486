"""Typed functions over the mock model's native ops. As in `ops`, each checks its
arguments and none allocates a result.

The arithmetic is explained in `sglang.srt.models.mock_math`. Rows of [T, 512] are
contiguous; folds, keys, counts and positions are int64 [T].
"""

from __future__ import annotations

from torch import Tensor

from sglang_kernels.library import builtin

_embedded_keys = builtin("mock_embedded_keys")
_next_keys = builtin("mock_next_keys")
_qkv = builtin("mock_qkv")
_fold = builtin("mock_fold")
_fold_onto = builtin("mock_fold_onto")
_keep_whole = builtin("mock_keep_whole")
_hidden = builtin("mock_hidden")
_proposal = builtin("mock_proposal")
_aux_states = builtin("mock_aux_states")
_read_folds = builtin("mock_read_folds")


def embedded_keys(embedded: Tensor, positions: Tensor, out: Tensor) -> None:
    """Compute the keys of layer 0, int64 [T], of embedded tokens [T, 512]."""
    _embedded_keys(embedded, positions, out)


def next_keys(fold0: Tensor, positions: Tensor, out: Tensor) -> None:
    """Compute the keys of layer 1, int64 [T]."""
    _next_keys(fold0, positions, out)


def qkv(x: Tensor, layer: int, out: Tensor) -> None:
    """Compute query, key and value of keys x: out [T, 768]."""
    _qkv(x, layer, out)


def fold(mean: Tensor, count: Tensor, layer: int, out: Tensor) -> None:
    """Compute the folds, int64 [T], of attention means [T, 512]."""
    _fold(mean, count, layer, out)


def fold_onto(
    before: Tensor, x: Tensor, mean: Tensor, count: Tensor, layer: int, out: Tensor
) -> None:
    """Add the term of keys x to folds `before`; spoilt if a mean is not plausible."""
    _fold_onto(before, x, mean, count, layer, out)


def keep_whole(fold: Tensor, is_whole: Tensor, out: Tensor) -> None:
    """Copy folds, spoilt where `is_whole`, bool [T], is false."""
    _keep_whole(fold, is_whole, out)


def hidden(
    fold0: Tensor, fold1: Tensor, positions: Tensor, vocab: int, out: Tensor
) -> None:
    """Compute the hidden states [T, 512] of the next tokens."""
    _hidden(fold0, fold1, positions, vocab, out)


def proposal(
    fold0: Tensor,
    fold1: Tensor,
    positions: Tensor,
    acceptance: list[int],
    out: Tensor,
) -> None:
    """Compute the hidden states [T, 512] of a draft head's proposals.

    Args:
        acceptance: vocabulary, and two shares of 2^30. A draw below the first proposes
            the truth, below the second a token that has the truth among its next ranks.
    """
    _proposal(fold0, fold1, positions, acceptance, out)


def aux_states(hidden: Tensor, out: Tensor) -> None:
    """Compute the captured states of hidden states [T, 512]: out [3, T, 512]."""
    _aux_states(hidden, out)


def read_folds(states: Tensor, folds: Tensor, is_whole: Tensor) -> None:
    """Read the folds [2, T] of hidden states [T, 512], or captured ones [T, 3 * 512].

    Args:
        is_whole: bool [T], whether all bits are +1 or -1, and captured states agree.
    """
    _read_folds(states, folds, is_whole)
