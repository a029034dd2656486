"""Faults that can be planted in a pool and its records. They are memory-safe and in
place.

The engine plants faults in its own state (tables, frees, batches).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from kv_canary.layout import Fingerprint, FingerprintMode, LayerGroup
from kv_canary.records import sample_place

if TYPE_CHECKING:
    from kv_canary.state import CanaryState


def flip_bytes(
    state: CanaryState,
    fingerprint: Fingerprint,
    group: LayerGroup,
    slot: int,
    rng: random.Random,
) -> None:
    """Flip a bit of K or V of `slot`: inside the sample if only that is fingerprinted,
    otherwise anywhere."""
    words = rng.choice((fingerprint.k_words, fingerprint.v_words))
    if words is None:
        source = rng.choice(group.sources())
        source.flatten(2).view(torch.uint8)[0, slot, 0] ^= 0x40
        return
    layers, _, count = words.shape
    layer, word = rng.randrange(layers), rng.randrange(count)
    if fingerprint.mode is FingerprintMode.PARTIAL:
        lineage = state.tail[slot, 1:2]
        place = sample_place(lineage, layers=layers, chunks=count // 2)
        layer = int(place[0])
        word = 2 * int(place[1]) + rng.randrange(2)
    words[layer, slot, word] ^= 1 << rng.randrange(62)


def flip_record(state: CanaryState, slot: int, rng: random.Random) -> None:
    """Flip a bit of the tail record of `slot`, outside its fingerprint."""
    word = rng.choice((0, 1, 3))
    state.tail[slot, word] ^= 1 << rng.randrange(20)
