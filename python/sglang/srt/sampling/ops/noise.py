"""Counter-based noise: a uniform number is a pure function of (seed, position).

There is no generator state, so a token does not depend on which other requests ran
beside it. Knows nothing of requests or logits.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.sampling.ops import row_ops

# int64 arrays of either library; their operators wrap around alike.
Words = TypeVar("Words", torch.Tensor, npt.NDArray[np.int64])

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


def _signed(word: int) -> int:
    """Return the int64 with the same 64 bits as `word`."""
    return word - (1 << 64) if word >> 63 else word


_GOLDEN_SIGNED = _signed(_GOLDEN)
_MUL_1_SIGNED = _signed(_MUL_1)
_MUL_2_SIGNED = _signed(_MUL_2)
_UNIT = 2.0**-53


def mix_seed(seed: int) -> int:
    """Return splitmix64 of a request's seed as a signed int64, the key of its noise
    stream.

    Seeds 0, 1, 2, ... give unrelated streams; without this step stream 1 would be
    stream 0 shifted by a few positions for some pairs of seeds.
    """
    z = (seed + _GOLDEN) & _WORD
    z = ((z ^ (z >> 30)) * _MUL_1) & _WORD
    z = ((z ^ (z >> 27)) * _MUL_2) & _WORD
    return _signed(z ^ (z >> 31))


def _logical_shift_right(x: Words, bits: int) -> Words:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Words) -> Words:
    """Apply the finalizer of splitmix64 to int64 words, with wrap-around
    multiplication."""
    x = (x ^ _logical_shift_right(x, 30)) * _MUL_1_SIGNED
    x = (x ^ _logical_shift_right(x, 27)) * _MUL_2_SIGNED
    return x ^ _logical_shift_right(x, 31)


def uniform(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return uniform float64 in [0, 1) with 53 random bits for each (key, position).

    `keys` [R] int64 from `mix_seed`; `positions` [R] int64. Returns [R] float64.
    """
    if row_ops.on_host(keys):
        # numpy gives the same words, and costs a third of torch on few numbers.
        return torch.from_numpy(_words(keys.numpy(), positions.numpy()) * _UNIT)
    return _words(keys, positions).to(torch.float64) * _UNIT


def _words(keys: Words, positions: Words) -> Words:
    """Return 53 random bits per (key, position), as int64."""
    word = mix64(keys + (positions + 1) * _GOLDEN_SIGNED)
    return _logical_shift_right(word, 11)
