"""The oracle of the mock model: computes its output from tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang.srt.models import mock_math


def _windowed(sums: Tensor, window: int | None) -> Tensor:
    """Return sums over the newest `window` elements, from running sums [n, ...]."""
    if window is None or window >= len(sums):
        return sums
    out = sums.clone()
    out[window:] -= sums[:-window]
    return out


def next_tokens(
    tokens: Sequence[int], *, vocab_size: int, window: int | None = None
) -> list[int]:
    """Return the token that the mock model emits after each prefix of `tokens`.

    Entry p follows `tokens[: p + 1]`.
    """
    ids = torch.tensor(tokens, dtype=torch.int64)
    positions = torch.arange(len(tokens))
    x = mock_math.key_layer0(ids, positions)
    folds: list[Tensor] = []
    for layer in range(mock_math.NUM_LAYERS):
        signs = mock_math.sig(x)
        largest = _windowed(signs.cumsum(0), window).abs().max()
        assert largest <= mock_math.MAX_SUM, f"|S| reached {largest}"
        terms = mock_math.term(x, layer)
        folds.append(_windowed(terms.cumsum(0), window))
        x = mock_math.key_layer1(folds[0], positions)
    tokens_out = mock_math.next_token(folds[0], folds[1], positions, vocab_size)
    return [int(token) for token in tokens_out]


class MockOracle:
    """Continuations of the mock model, one token at a time, in O(1) each.

    Keeps the running folds. Knows no sliding window.
    """

    def __init__(self, prompt: Sequence[int], *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        ids = torch.tensor(prompt, dtype=torch.int64)
        positions = torch.arange(len(prompt))
        terms0 = mock_math.term(mock_math.key_layer0(ids, positions), 0).cumsum(0)
        terms1 = mock_math.term(mock_math.key_layer1(terms0, positions), 1)
        self._fold0, self._fold1 = terms0[-1:], terms1.sum(0, keepdim=True)
        self._length = len(prompt)

    def next(self) -> int:
        """Return the next token and append it to the history."""
        last = torch.tensor([self._length - 1])
        token = mock_math.next_token(self._fold0, self._fold1, last, self._vocab_size)
        position = last + 1
        x0 = mock_math.key_layer0(token, position)
        self._fold0 = self._fold0 + mock_math.term(x0, 0)
        x1 = mock_math.key_layer1(self._fold0, position)
        self._fold1 = self._fold1 + mock_math.term(x1, 1)
        self._length += 1
        return int(token)

    def take(self, count: int) -> list[int]:
        return [self.next() for _ in range(count)]
