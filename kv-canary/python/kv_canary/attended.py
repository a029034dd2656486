"""The bytes of a slot group that attention compares itself while it loads them.

Verify then compares only the records of a forward's reads (`PoolChecks`), and the tail
keeps checksums of what was written (`Fingerprint.sums`).
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
"""Bytes of one KV head's checksum per slot and layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendedBytes:
    """A group of slots whose bytes attention compares.

    Fields:
        state: state of the group, which receives the findings.
        sums: int32 [slots, layers, KV heads], as in `Fingerprint`.
        in_turn: whether a forward compares only one layer (its number modulo the
            layers) instead of every layer.
    """

    state: CanaryState
    sums: Tensor
    in_turn: bool


def attended_bytes(state: CanaryState, source: Fingerprint) -> AttendedBytes | None:
    """Return the bytes to compare, or None if no sums are kept."""
    if source.sums is None:
        return None
    in_turn = source.mode is FingerprintMode.ROTATE
    return AttendedBytes(state=state, sums=source.sums, in_turn=in_turn)


def with_sums(source: Fingerprint, *, heads: int) -> Fingerprint:
    """Return the same bytes with checksums for attention of `heads` KV heads.

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
