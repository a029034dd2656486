"""Ops that move rows between slots and units. Know tensors, but no pool and no layout.

The rows of a tensor in units are a view [units, layers, slots of a unit, width], where
those of one unit are contiguous.
"""

from __future__ import annotations

from torch import Tensor

from sglang.srt.kv_tiers.ops.slot_sums.op import add_slot_sums
from sglang.srt.utils.dispatch import Op


def gather_rows_ref(
    rows: Tensor, sums: Tensor, words: Tensor, slots: Tensor, *, first_layer: int
) -> None:
    """Copy slots to units, and add their sums, as `add_slot_sums` defines them.

    Args:
        rows: integers [units, layers, slots of a unit, width].
        sums: int64 [units * slots of a unit].
        words: like `rows`, [layers, slots, width].
        slots: int64 [units * slots of a unit].
        first_layer: number of the first layer, among all tensors of a sum.
    """
    units, layers, per_unit, width = rows.shape
    picked = words.index_select(1, slots).view(layers, units, per_unit, width)
    rows.copy_(picked.transpose(0, 1))
    add_slot_sums(sums, words, slots, first_layer=first_layer)


def scatter_rows_ref(
    words: Tensor, slots: Tensor, rows: Tensor, numbers: Tensor
) -> None:
    """Copy rows of units to slots.

    Args:
        words: integers [layers, slots, width].
        slots: int64 [k], distinct.
        rows: like `words`, [units, layers, slots of a unit, width].
        numbers: int64 [k], out of units * slots of a unit.
    """
    layers, _, width = words.shape
    every = rows.transpose(0, 1).reshape(layers, -1, width)
    words.index_copy_(1, slots, every.index_select(1, numbers))


gather_rows = Op(
    reference=gather_rows_ref,
    triton="sglang.srt.kv_tiers.ops.unit_rows.triton:gather_rows",
)
scatter_rows = Op(
    reference=scatter_rows_ref,
    triton="sglang.srt.kv_tiers.ops.unit_rows.triton:scatter_rows",
)
