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
    """Sum up the values of slots, each multiplied by the key of its place.

    Args:
        values: int8, int16 or int32 [m], the memory of all layers.
        bases: int64 [L], first value of each layer. page_stride: from page to page.
        offsets: int64 [page_size, n], places in a page of a slot's values.
        keys: int64 [n].
        slots: int64 [N]; slots and offsets must lie in `values`.
        sums: int64 [N, L], written. All tensors are contiguous.
    """
    page_size = len(offsets)
    for begin in range(0, len(slots), _SLOTS_AT_ONCE):
        some = slots[begin : begin + _SLOTS_AT_ONCE]
        at = (some // page_size * page_stride)[:, None] + offsets[some % page_size]
        for layer, base in enumerate(bases):
            found = values[at + base].long()
            sums[begin : begin + _SLOTS_AT_ONCE, layer] = (found * keys).sum(dim=1)
