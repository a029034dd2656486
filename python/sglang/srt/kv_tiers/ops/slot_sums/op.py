"""The op that sums all bytes of slots. Knows a tensor, but no pool."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_canary.hashing import mix64
from sglang.srt.utils.dispatch import Op

# Slots whose words are widened at once.
_SLOTS_AT_ONCE = 1024


def add_slot_sums_ref(
    sums: Tensor, words: Tensor, slots: Tensor, *, first_layer: int
) -> None:
    """Add the sum of each slot's words to `sums`:

        sum over layer l and word i of mix64(word ^ mix64((first_layer + l) << 32 | i))

    with words sign-extended to 64 bits, so that words that change or swap places change
    the sum.

    Args:
        sums: int64 [n].
        words: integers [layers, slots, width].
        slots: int64 [n].
        first_layer: number of the first layer, among all tensors of a sum.
    """
    layers, _, width = words.shape
    numbers = torch.arange(first_layer, first_layer + layers, device=words.device)
    places = torch.arange(width, device=words.device)
    keys = mix64((numbers[:, None, None] << 32) | places)
    for begin in range(0, len(slots), _SLOTS_AT_ONCE):
        some = slice(begin, begin + _SLOTS_AT_ONCE)
        rows = words.index_select(1, slots[some]).to(torch.int64)
        sums[some] += mix64(rows ^ keys).sum(dim=(0, 2))


add_slot_sums = Op(
    reference=add_slot_sums_ref,
    triton="sglang.srt.kv_tiers.ops.slot_sums.triton:add_slot_sums",
    native="sglang.srt.kv_tiers.ops.slot_sums.native:add_slot_sums",
)
