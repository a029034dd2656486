"""The oracle of the mock model: computes its output from tokens only."""

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


Windows = Sequence[int | None]
NO_WINDOWS: Windows = (None,) * mock_math.NUM_LAYERS


def next_tokens(
    tokens: Sequence[int], *, vocab_size: int, windows: Windows = NO_WINDOWS
) -> list[int]:
    """Return the token that the mock model emits after each prefix of `tokens`.

    Entry p follows `tokens[: p + 1]`. `windows` are the layers' sliding windows.
    """
    ids = torch.tensor(tokens, dtype=torch.int64)
    positions = torch.arange(len(tokens))
    x = mock_math.key_layer0(ids, positions)
    folds: list[Tensor] = []
    for layer in range(mock_math.NUM_LAYERS):
        if len(tokens) > mock_math.MAX_SUM:  # of fewer signs no sum is larger
            sums = _windowed(mock_math.sig(x).cumsum(0), windows[layer])
            largest = sums.abs().max()
            assert largest <= mock_math.MAX_SUM, f"|S| reached {largest}"
        terms = mock_math.term(x, layer)
        folds.append(_windowed(terms.cumsum(0), windows[layer]))
        x = mock_math.key_layer1(folds[0], positions)
    tokens_out = mock_math.next_token(folds[0], folds[1], positions, vocab_size)
    return [int(token) for token in tokens_out]


class MockOracle:
    """Continuations of the mock model, one token at a time, in O(1) each.

    Keeps the running folds and, for layers with a sliding window, the terms inside it.
    """

    def __init__(
        self, prompt: Sequence[int], *, vocab_size: int, windows: Windows = NO_WINDOWS
    ) -> None:
        self._vocab_size = vocab_size
        self._layers = [_RunningFold(window) for window in windows]
        ids = torch.tensor(prompt, dtype=torch.int64)
        positions = torch.arange(len(prompt))
        folds0 = self._layers[0].extend(
            mock_math.term(mock_math.key_layer0(ids, positions), 0)
        )
        self._layers[1].extend(
            mock_math.term(mock_math.key_layer1(folds0, positions), 1)
        )
        self._length = len(prompt)

    def next(self) -> int:
        """Return the next token and append it to the history."""
        last = torch.tensor([self._length - 1])
        fold0, fold1 = (layer.fold for layer in self._layers)
        token = mock_math.next_token(fold0, fold1, last, self._vocab_size)
        position = last + 1
        x0 = mock_math.key_layer0(token, position)
        fold0 = self._layers[0].extend(mock_math.term(x0, 0))
        x1 = mock_math.key_layer1(fold0, position)
        self._layers[1].extend(mock_math.term(x1, 1))
        self._length += 1
        return int(token)

    def take(self, count: int) -> list[int]:
        return [self.next() for _ in range(count)]


class _RunningFold:
    """The sum of a layer's terms, or of the newest `window` terms.

    Attributes:
        fold: int64 [1].
    """

    def __init__(self, window: int | None) -> None:
        self.fold = torch.zeros(1, dtype=torch.int64)
        self._window = window
        self._inside = torch.zeros(0, dtype=torch.int64)

    def extend(self, terms: Tensor) -> Tensor:
        """Add terms [n]; return the fold after each of them, int64 [n]."""
        if self._window is None:
            folds = self.fold + terms.cumsum(0)
        else:
            known = torch.cat((self._inside, terms))
            self._inside = known[max(len(known) - self._window, 0) :]
            sums = _windowed(known.cumsum(0), self._window)
            folds = sums[len(known) - len(terms) :]
        self.fold = folds[-1:]
        return folds
