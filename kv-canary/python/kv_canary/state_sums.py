"""The definition, in torch, of checksums over recurrent states.

An operation loads every word of a state and stores every word of the next one. It adds
up both, compares the one with what the slot's last writer kept, and keeps the other: so
all bytes are compared in every step, and none is read for it. A slot that nobody wrote
holds zeros, whose sums are 0.

A layer's states are matrices, elements [taps, columns] of some heads; of a convolution,
[width - 1, channels] of one. A cell is all taps of some columns that lie beside each
other, which one program of a kernel has, and its sum, modulo 2^64,

```
sum over taps t and columns c of bits(t, c) * (tap_factor(t) ^ column_factor(c))
```

The bits of an element are an unsigned number of at most 32 bits, and so is its factor.
Factors are odd, so the change of one element always changes the sum. They differ within
a cell, so flips of two bits do, too: of different bits their parts of the sum have
different powers of two, and of the same bit they cancel if the factors are equal, or
add up to 2^33 or more. Exchanging two elements adds the product of two differences,
which is not 0 and below 2^64. Other changes are missed once in 2^32 or less.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kv_canary.head_sums import mix32

MATRIX_COLUMNS = 32
"""Columns of a cell of matrices."""
CONV_CHANNELS = 128
"""Channels of a cell of a convolution."""
FIRST_COLUMN = 1 << 16
"""Place of the first column; taps begin at 0."""
_BITS = {2: torch.int16, 4: torch.int32}
_CONV_DIM = 3


class StateCells(NamedTuple):
    """How a layer's states, each slot contiguous, are divided into cells.

    Fields:
        heads, taps, columns: of a slot. tap_stride, column_stride: elements between
            them. size: columns of a cell.
    """

    heads: int
    taps: int
    columns: int
    tap_stride: int
    column_stride: int
    size: int

    @classmethod
    def of(cls, state: Tensor) -> StateCells:
        """Return those of convolutions [slots, C, W - 1] or matrices [slots, H, d_k,
        d_v]."""
        if state.dim() == _CONV_DIM:
            _, channels, taps = state.shape
            return cls(1, taps, channels, 1, taps, CONV_CHANNELS)
        _, heads, taps, columns = state.shape
        return cls(heads, taps, columns, columns, 1, MATRIX_COLUMNS)

    @property
    def number(self) -> int:
        """Cells of a slot: those of a head beside each other."""
        return self.heads * -(-self.columns // self.size)


def state_sums(state: Tensor) -> Tensor:
    """Return the sums int64 [R, cells] of states as in `StateCells.of`."""
    cells = StateCells.of(state)
    bits = state.contiguous().view(_BITS[state.itemsize]).to(torch.int64)
    bits &= (1 << 8 * state.itemsize) - 1
    strides = cells.taps * cells.columns, cells.tap_stride, cells.column_stride
    size = len(state), cells.heads, cells.taps, cells.columns
    bits = bits.as_strided(size, (cells.heads * strides[0], *strides))
    tap = torch.arange(cells.taps, device=state.device)
    column = torch.arange(cells.columns, device=state.device)
    of_columns = (bits * factors(tap, column)).sum(dim=2)
    padded = functional.pad(of_columns, (0, -cells.columns % cells.size))
    sums: Tensor = padded.unflatten(-1, (-1, cells.size)).sum(dim=-1)
    return sums.flatten(1)


def factors(taps: Tensor, columns: Tensor) -> Tensor:
    """Return the factors int64 [taps, columns], odd and below 2^32."""
    of_columns = mix32(columns + FIRST_COLUMN) | 1
    return (mix32(taps) & ~1)[:, None] ^ of_columns
