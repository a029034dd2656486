"""Batch rows in the canary's Triton kernels: their fields, tokens and lineages.

`state`, `rows` and `table` are tuples from `args.py`. Functions that load for a row
take its number in the batch and `live`, which is false for a padded row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kv_canary import records
from kv_canary.kernels.triton.hash import lineage_term, mix64, pack_word0

SALT_KEY = tl.constexpr(records.SALT_KEY)
SUM_BLOCK = tl.constexpr(512)


class Program(NamedTuple):
    """The `split`-th of the `splits` programs of a batch row."""

    row: Any
    split: Any
    splits: Any


class Batch(NamedTuple):
    """Sizes of a forward; a walk in a tree visits `max_depth` ancestors."""

    num_rows: Any
    num_tokens: Any
    max_depth: Any


class Row(NamedTuple):
    """A batch row that writes.

    Fields:
        row: number in the batch. inside: whether the batch has it.
        req: row of the request table. live: false if padded.
        prefix: tokens before this forward. start, extend: its new tokens in [T].
        salt: in the form that `lineage_term` takes.
        base: lineage before the first new token.
    """

    row: Any
    inside: Any
    req: Any
    live: Any
    prefix: Any
    start: Any
    extend: Any
    serial: Any
    salt: Any
    base: Any


class Tokens(NamedTuple):
    """New tokens [N] of a row and the terms of their lineages."""

    token: Any
    position: Any
    word0: Any
    term: Any


@triton.jit
def load_start(rows, row, live):
    """Load the index in [T] of the row's first new token."""
    start = row
    if rows.qo_indptr is not None:
        start = tl.load(rows.qo_indptr + row, mask=live, other=0)
    return start


@triton.jit
def load_salt(rows, row, live):
    """Load the salt of the row's lineages, in the form that `lineage_term` takes."""
    return mix64(tl.load(rows.salts + row, mask=live, other=0) ^ SALT_KEY)


@triton.jit
def load_seed(rows, row, req, live):
    """Load the lineage before the row's position 0."""
    seed = live.to(tl.int64) * 0
    if rows.seeds is not None:
        seed = tl.load(rows.seeds + row, mask=live, other=0)
    elif rows.seed_table is not None:
        seed = tl.load(rows.seed_table + req, mask=live, other=0)
    return seed


@triton.jit
def load_lineage_row(rows, row, req, live):
    """Load the row of `expected_lineage` that a batch row continues."""
    lineage_row = req
    if rows.lineage_rows is not None:
        lineage_row = tl.load(rows.lineage_rows + row, mask=live, other=0)
    return lineage_row


@triton.jit
def load_base_lineage(state, rows, row, req, live, prefix):
    """Load the lineage before the row's first new token."""
    lineage_row = load_lineage_row(rows, row, req, live)
    lineage = tl.load(state.expected_lineage + lineage_row)
    return tl.where(prefix > 0, lineage, load_seed(rows, row, req, live))


@triton.jit
def shift_columns(rows, position, row):
    """Return the columns of `req_to_token` that hold positions of a batch row."""
    if rows.shift_from is not None:
        place = position - tl.load(rows.shift_from + row)
        shifts = rows.column_shift + row * rows.num_shifts
        number = tl.minimum(tl.maximum(place, 0), rows.num_shifts - 1)
        position = position + tl.load(shifts + number, mask=place >= 0, other=0)
    return position


@triton.jit
def load_columns(table, column, req, mask):
    """Load entries of row `req` as int64; -1 past the table and outside `mask`."""
    mask = mask & (column >= 0) & (column < table.width)
    at = table.at + req * table.stride + column
    return tl.load(at, mask=mask, other=-1).to(tl.int64)


@triton.jit
def load_tokens(rows, index, mask, salt):
    """Load the new tokens at `index` [N] of [T]; terms are 0 outside `mask`."""
    token = tl.load(rows.input_ids + index, mask=mask, other=0)
    position = tl.load(rows.positions + index, mask=mask, other=0)
    word0 = pack_word0(token, position)
    term = tl.where(mask, lineage_term(word0, salt), 0)
    return Tokens(token=token, position=position, word0=word0, term=term)


@triton.jit
def sum_terms(rows, begin, end, salt):
    """Sum the lineage terms of tokens [begin, end)."""
    total = tl.zeros([SUM_BLOCK], dtype=tl.int64)
    for at in range(begin, end, SUM_BLOCK):
        index = at + tl.arange(0, SUM_BLOCK)
        total += load_tokens(rows, index, index < end, salt).term
    return tl.sum(total, axis=0)


@triton.jit
def sum_ancestors(rows, row, index, mask, max_depth):
    """Sum the terms of the ancestors of each new token [N] of a `Row`."""
    node = tl.load(rows.parent_index + index, mask=mask, other=-1)
    total = tl.zeros_like(index)
    end = row.start + row.extend
    for _ in range(max_depth):
        mask = mask & (node >= row.start) & (node < end)
        total += load_tokens(rows, node, mask, row.salt).term
        node = tl.load(rows.parent_index + node, mask=mask, other=-1)
    return total


@triton.jit
def count_ancestors(rows, row, index, mask, max_depth):
    """Count the ancestors of new tokens [N] of a `Row`; return whether each precedes
    its child and the walk ends at a node without a parent."""
    node = tl.load(rows.parent_index + index, mask=mask, other=-1)
    child = index
    depth = tl.zeros_like(index)
    for _ in range(max_depth):
        active = mask & (node >= row.start) & (node < child)
        depth += active.to(tl.int64)
        child = tl.where(active, node, child)
        parent = tl.load(rows.parent_index + node, mask=active, other=-1)
        node = tl.where(active, parent, node)
    return depth, node == -1
