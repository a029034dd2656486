"""Rows of a forward and their new tokens in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kv_canary.records import lineage_terms, pack_word0_tensor, pack_word3_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.state import CanaryState
    from kv_canary.view import ForwardView, KVReadView


class NewTokens(NamedTuple):
    """The live new tokens, row after row; all int64 [n].

    Fields:
        place: index into the forward's tokens. row: row of the batch. number: number in
            the row.
        word0, lineage, word3: words of the records that the forward writes.
    """

    place: Tensor
    row: Tensor
    number: Tensor
    word0: Tensor
    lineage: Tensor
    word3: Tensor


def load_seeds(rows: ForwardView) -> Tensor:
    """Return the lineages before position 0, int64 [R]."""
    if rows.seed_table is not None:
        return rows.seed_table[rows.req_rows]
    return torch.zeros_like(rows.salts) if rows.seeds is None else rows.seeds


def shift_columns(rows: ForwardView, row: Tensor, positions: Tensor) -> Tensor:
    """Return the columns of `req_to_token` that hold positions of batch rows."""
    if rows.shift_from is None or rows.column_shift is None:
        return positions
    if not len(row):
        return positions
    place = positions - rows.shift_from[row]
    number = row * rows.num_shifts + place.clamp(min=0, max=rows.num_shifts - 1)
    return positions + torch.where(place >= 0, rows.column_shift[number], 0)


def load_columns(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return int64 entries of a matrix, -1 where a column is outside."""
    if matrix.shape[1] == 0:
        return torch.full_like(columns, -1)
    inside = (columns >= 0) & (columns < matrix.shape[1])
    return torch.where(inside, matrix[rows, columns * inside].to(torch.int64), -1)


def load_starts(rows: ForwardView) -> tuple[Tensor, Tensor]:
    """Return each row's first new token and number of new tokens, cut at the end of
    [T]."""
    if rows.qo_indptr is None:
        starts = torch.arange(rows.num_rows, device=rows.req_rows.device)
    else:
        starts = rows.qo_indptr[:-1]
    live = rows.req_rows != 0
    counts = torch.minimum(rows.extend_lens, rows.num_tokens - starts)
    return starts, counts.clamp(min=0) * live


def load_slots(table: KVReadView, row: Tensor, element: Tensor) -> Tensor:
    """Return the slots [n] of elements of batch rows as `KVReadView` defines them, or
    -1 if the table has none."""
    if table.page_table is not None:
        at = row if table.row_index is None else table.row_index[row]
        inside = (at >= 0) & (at < table.page_table.shape[0])
        entry = load_columns(table.page_table, at * inside, element // table.page_size)
        slot = entry + element % table.page_size
        return torch.where(inside & (entry >= 0), slot, -1)
    assert table.indptr is not None
    size = table.entry_size
    at = table.indptr.to(torch.int64)[row] + element // size
    entry = load_columns(table.entries[None], row * 0, at)
    return torch.where(entry >= 0, entry * size + element % size, -1)


def load_base_lineages(state: CanaryState, rows: ForwardView) -> Tensor:
    """Return the lineages before the new tokens of each row, int64 [R]."""
    lineage_rows = rows.req_rows if rows.lineage_rows is None else rows.lineage_rows
    known = state.expected_lineage[lineage_rows]
    return torch.where(rows.prefix_lens > 0, known, load_seeds(rows))


def load_tokens(state: CanaryState, rows: ForwardView, kind: int) -> NewTokens:
    """Return the new tokens of all rows; `kind` is their writer."""
    starts, counts = load_starts(rows)
    row = torch.repeat_interleave(counts)
    ends = counts.cumsum(0)
    number = torch.arange(len(row), device=row.device) - (ends - counts)[row]
    index = starts[row] + number
    tokens, positions = rows.input_ids[index], rows.positions[index]
    terms = lineage_terms(tokens, positions, rows.salts[row])
    base = load_base_lineages(state, rows)[row]
    if rows.parent_index is None:
        sums = terms.cumsum(0)
        lineage = base + sums - (sums - terms)[(ends - counts)[row]]
    else:
        lineage = base + _sum_ancestors(rows, starts[row], counts[row], index, terms)
    word3 = pack_word3_tensor(state.clock, kind, rows.serials[row])
    return NewTokens(
        index, row, number, pack_word0_tensor(tokens, positions), lineage, word3
    )


def _sum_ancestors(
    rows: ForwardView, starts: Tensor, counts: Tensor, index: Tensor, terms: Tensor
) -> Tensor:
    """Return sums over tokens of trees and their ancestors of lineage terms."""
    assert rows.parent_index is not None
    of_token = terms.new_zeros(rows.num_tokens)
    of_token[index] = terms
    total, node = terms.clone(), rows.parent_index[index]
    active = torch.ones_like(node, dtype=torch.bool)
    for _ in range(rows.max_depth):
        active &= (node >= starts) & (node < starts + counts)
        total += torch.where(active, of_token[node * active], 0)
        node = rows.parent_index[node * active]
    return total


def count_ancestors(rows: ForwardView, new: NewTokens) -> tuple[Tensor, Tensor]:
    """Return how many ancestors new tokens of trees have within their rows, and whether
    each precedes its child and the walk ends at -1."""
    assert rows.parent_index is not None
    starts, _ = load_starts(rows)
    first = starts[new.row]
    child, node = new.place, rows.parent_index[new.place]
    depth = torch.zeros_like(node)
    for _ in range(rows.max_depth):
        active = (node >= first) & (node < child)
        depth += active
        child = torch.where(active, node, child)
        node = torch.where(active, rows.parent_index[node * active], node)
    return depth, node == -1
