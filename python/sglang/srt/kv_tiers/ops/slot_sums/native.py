"""Native form of `op.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.kv_tiers.ops.slot_sums.op import add_slot_sums_ref
from sglang_kernels import ops


def add_slot_sums(
    sums: Tensor, words: Tensor, slots: Tensor, *, first_layer: int
) -> None:
    """`add_slot_sums` of `op.py`. Narrower words, of which few slots consist, are
    summed in torch."""
    if words.dtype is torch.int64:
        ops.slot_sums(sums, words, slots, first_layer)
    else:
        add_slot_sums_ref(sums, words, slots, first_layer=first_layer)
