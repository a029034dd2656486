"""Fingerprints of slots in torch, and the sentinel that shows a missing store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kv_canary.hashing import mix64
from kv_canary.head_sums import head_sums, whole_sums
from kv_canary.layout import FingerprintMode
from kv_canary.records import SENTINEL, TOKEN_MASK, fingerprint_keys, sample_place

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.layout import Fingerprint


def fingerprint(source: Fingerprint, slots: Tensor, lineages: Tensor) -> Tensor:
    """Return the fingerprints [n] of slots [n] whose records have these lineages."""
    if source.mode is FingerprintMode.NONE:
        return torch.zeros_like(slots)
    if source.sums is not None:
        return whole_sums(_sum_heads(source, slots))
    k_words, v_words = source.strided_words()
    assert k_words is not None and v_words is not None
    low = _sum_words(source.mode, k_words, slots, lineages)
    high = _sum_words(source.mode, v_words, slots, lineages)
    return (low & TOKEN_MASK) | (high << 32)


def keep_bytes(source: Fingerprint, slots: Tensor, lineages: Tensor) -> Tensor:
    """Return fingerprints for the records of slots, or keep sums and return 0."""
    if source.sums is None:
        return fingerprint(source, slots, lineages)
    source.sums[slots] = _sum_heads(source, slots)
    return torch.zeros_like(slots)


def fill_sentinel(source: Fingerprint, slots: Tensor) -> None:
    """Fill slots whose bytes are all covered, so that a missing store shows."""
    if source.mode is not FingerprintMode.ALL:
        return
    for words in source.strided_words():
        assert words is not None
        words[:, slots] = SENTINEL


def has_sentinel(source: Fingerprint, slots: Tensor) -> Tensor:
    """Return whether the first or last word of a slot, in K or V of some layer, is
    still the sentinel."""
    found = torch.zeros_like(slots, dtype=torch.bool)
    if source.mode is FingerprintMode.ALL:
        for words in source.strided_words():
            assert words is not None
            ends = words[:, slots][..., [0, -1]]
            found |= (ends == SENTINEL).any(dim=2).any(dim=0)
    return found


def _sum_heads(source: Fingerprint, slots: Tensor) -> Tensor:
    """Return the `head_sums` of slots [n], int32 [n, layers, heads]."""
    assert source.sums is not None
    heads = source.sums.shape[2]
    k, v = (
        words[:, slots].unflatten(2, (heads, -1)).transpose(0, 1)
        for words in source.strided_words()
        if words is not None
    )
    return head_sums(k, v)


def _sum_words(
    mode: FingerprintMode, words: Tensor, slots: Tensor, lineages: Tensor
) -> Tensor:
    n_layers, _, n_words = words.shape
    if mode is FingerprintMode.PARTIAL:
        layer, chunk = sample_place(lineages, layers=n_layers, chunks=n_words // 2)
        layer = layer[:, None]
        index = 2 * chunk[:, None] + torch.arange(2, device=slots.device)
        return mix64(
            words[layer, slots[:, None], index] ^ fingerprint_keys(layer, index)
        ).sum(dim=1)
    layers = torch.arange(n_layers, device=slots.device)[:, None]
    keys = fingerprint_keys(layers, torch.arange(n_words, device=slots.device))
    return mix64(words[:, slots] ^ keys[:, None]).sum(dim=(0, 2))
