"""Tiles of one forward's causal extend attention, and the slots of its prefixes.

Made once per forward and read by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
"""Queries of a tile, and KV elements of a block."""
PLAN_COLUMNS = 8
"""Columns of `ExtendPlan.tiles`; the last two are padding."""


class ExtendPlan(NamedTuple):
    """The work of `extend_hopper`, in its order.

    Fields:
        tiles: int32 [tiles, PLAN_COLUMNS], most work first. For a tile of a request's
            new
            tokens: its first token's number in the batch, the request's tokens from
            there on, prefix elements in a last, partial block (0 if none), full blocks
            of the prefix, full blocks of new tokens before the tile, and where its
            prefix begins in `prefix_slots`.
        prefix_slots: [elements], row after row, each padded to a whole block with its
            last slot; None if no row has a prefix.
        new_slots: [tokens], slots of the new tokens if their K and V are gathered, too,
            as they are stored; None if they come from the model.
    """

    tiles: Tensor
    prefix_slots: Tensor | None
    new_slots: Tensor | None


class PlanSize(NamedTuple):
    """Tiles of a plan, and elements of its `prefix_slots`."""

    tiles: int
    elements: int


def gathered_elements(context_len: int) -> int:
    """Return the most prefix elements that a forward gathers: a whole context. This
    bounds the memory."""
    return -(-context_len // BLOCK) * BLOCK


def plan_size(prefix_lens: Sequence[int], extend_lens: Sequence[int]) -> PlanSize:
    """Return the size of the plan for rows of these lengths."""
    return PlanSize(
        sum(-(-length // BLOCK) for length in extend_lens),
        sum(-(-length // BLOCK) * BLOCK for length in prefix_lens),
    )


def plan_extend(
    page_table: Tensor,
    *,
    row_index: Tensor | None,
    page_size: int,
    qo_indptr: Tensor,
    prefix_lens: Tensor,
    new_slots: Tensor | None = None,
    size: PlanSize,
) -> ExtendPlan:
    """Plan a forward. The device's lengths are used, as elsewhere in attention; the
    host lengths only give the number of tiles.

    Args:
        page_table, row_index, page_size, qo_indptr, prefix_lens: as in
            `extend_attention`.
        new_slots: as in `ExtendPlan`.
        size: `plan_size` of these lengths.
    """
    padded = -(-prefix_lens // BLOCK) * BLOCK
    prefix_ends = padded.cumsum(0)
    prefix_rows = prefix_ends - padded
    tiles = _tiles(qo_indptr, prefix_lens, prefix_rows, count=size.tiles)
    if size.elements == 0:
        return ExtendPlan(tiles, None, new_slots)
    number = torch.arange(size.elements, device=padded.device)
    row = _owning_rows(number, prefix_ends)
    element = torch.minimum(number - prefix_rows[row], prefix_lens[row] - 1)
    element = element.clamp(min=0)
    table_row = row if row_index is None else row_index[row]
    pages = page_table[table_row, element // page_size]
    return ExtendPlan(tiles, pages + element % page_size, new_slots)


def _tiles(
    qo_indptr: Tensor, prefix_lens: Tensor, prefix_rows: Tensor, *, count: int
) -> Tensor:
    """`ExtendPlan.tiles`."""
    new = qo_indptr.diff()
    counts = -(-new // BLOCK)
    ends = counts.cumsum(0)
    number = torch.arange(count, device=ends.device)
    row = _owning_rows(number, ends)
    before = number - (ends - counts)[row]
    prefix = prefix_lens[row]
    full = prefix // BLOCK
    columns = (
        qo_indptr[row] + before * BLOCK,
        new[row] - before * BLOCK,
        prefix % BLOCK,
        full,
        before,
        prefix_rows[row],
    )
    order = (full + before).argsort(descending=True, stable=True)
    tiles = torch.zeros((count, PLAN_COLUMNS), dtype=torch.int32, device=ends.device)
    tiles[:, : len(columns)] = torch.stack(columns, dim=1)[order]
    return tiles


def _owning_rows(number: Tensor, ends: Tensor) -> Tensor:
    """Return the rows that own these numbers; row r owns numbers below ends[r]."""
    row = torch.searchsorted(ends, number, right=True)
    return row.clamp(max=len(ends) - 1)
