"""Sums of slots' values in torch: the oracle of the native and Triton versions."""

from __future__ import annotations

from torch import Tensor

_SLOTS_AT_ONCE = 4096


def sum_slots(
    values: Tensor,
    bases: Tensor,
    offsets: Tensor,
    keys: Tensor,
    slots: Tensor,
    page_stride: int,
    sums: Tensor,
) -> None:
    """See `launches.sum_slots`."""
    page_size = len(offsets)
    for begin in range(0, len(slots), _SLOTS_AT_ONCE):
        some = slots[begin : begin + _SLOTS_AT_ONCE]
        at = (some // page_size * page_stride)[:, None] + offsets[some % page_size]
        for layer, base in enumerate(bases):
            found = values[at + base].long()
            sums[begin : begin + _SLOTS_AT_ONCE, layer] = (found * keys).sum(dim=1)
