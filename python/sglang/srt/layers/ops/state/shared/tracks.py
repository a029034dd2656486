"""Places inside a prefill whose state is stored in other slots on the way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

CHUNK = 64
"""Tokens after which every operation can store a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTracks:
    """Up to K checkpoints of each of R rows.

    Fields:
        lens: [R, K] int64, contiguous; how many of the row's tokens in this forward are
            folded into the checkpoint: a multiple of `CHUNK`, or all of them. 0 where
            there is none.
        slots: [R, K] int64, contiguous; the slot that gets it. Distinct from each other
            and from the rows' own slots, except where `lens` is 0.
    """

    lens: Tensor
    slots: Tensor
