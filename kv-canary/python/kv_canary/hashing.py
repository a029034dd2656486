"""splitmix64's finalizer for int64 tensors, numpy arrays and Python integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

MASK64 = (1 << 64) - 1


def mix64(x: Tensor) -> Tensor:
    """splitmix64's finalizer on int64, wrap-around arithmetic, logical shifts."""
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31)


def mix64_int(x: int) -> int:
    """Return `mix64` of one host integer; the result is signed."""
    x &= MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return to_signed64(x ^ (x >> 31))


def mix64_array(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return `mix64` of unsigned words on the host."""
    mixed: npt.NDArray[np.uint64] = x >> np.uint64(30)
    mixed ^= x
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    part = mixed >> np.uint64(27)
    mixed ^= part
    mixed *= np.uint64(0x94D049BB133111EB)
    np.right_shift(mixed, np.uint64(31), out=part)
    mixed ^= part
    return mixed


def to_signed64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift logically: torch's `>>` on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
