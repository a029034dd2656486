"""The bytes of a group of slots that attention compares itself, while it loads them.

Verify then compares the records of a forward's reads alone (`PoolChecks`); the tail
keeps the sums of what was written (`Fingerprint.sums`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.layout import Fingerprint, FingerprintMode

if TYPE_CHECKING:
    from kv_canary.state import CanaryState

SUM_BYTES = torch.int32.itemsize
"""Bytes of the sum of a KV head in a slot and layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendedBytes:
    """A group of slots whose bytes attention compares.

    Fields:
        state: of the group: where findings go.
        sums: int32 [slots, layers, KV heads], as in `Fingerprint`.
        in_turn: whether a forward compares one layer, its number modulo the layers,
            and not every layer.
    """

    state: CanaryState
    sums: Tensor
    in_turn: bool


def attended_bytes(state: CanaryState, source: Fingerprint) -> AttendedBytes | None:
    """None: no sums are kept, and attention compares nothing."""
    if source.sums is None:
        return None
    in_turn = source.mode is FingerprintMode.ROTATE
    return AttendedBytes(state=state, sums=source.sums, in_turn=in_turn)


def with_sums(source: Fingerprint, *, heads: int) -> Fingerprint:
    """The same bytes, with sums for attention of so many KV heads.

    Raises:
        ValueError: the mode does not cover all bytes.
    """
    if source.mode not in (FingerprintMode.ROTATE, FingerprintMode.ALL):
        raise ValueError(f"mode {source.mode.name.lower()} compares no whole heads")
    assert source.k_words is not None
    layers, slots = source.k_words.shape[:2]
    sums = torch.zeros(
        (slots, layers, heads), dtype=torch.int32, device=source.k_words.device
    )
    return replace(source, sums=sums)
