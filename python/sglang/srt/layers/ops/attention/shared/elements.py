"""Device functions of the attention kernels: where queries and KV elements lie.

Element e of a row is token e of its sequence. Its slot in the pool comes from the row's
pages. `SHAPE` is the compile-time `args.Shape`. Triton inlines these functions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from typing import NamedTuple

import triton
import triton.language as tl

from sglang.srt.layers.ops.stored_kv import read_value


class RowKV(NamedTuple):
    """K and V of one KV head as one row reads them from the pool.

    Fields:
        k, v: pointers to the channels of slot 0, [1, channels].
        k_stride, v_stride: distance between slots.
        table: pointer to the first page of the row.
        column_stride: distance between pages.
        is_channel: [channels], false for padding.
    """

    k: tl.tensor
    v: tl.tensor
    k_stride: tl.tensor
    v_stride: tl.tensor
    table: tl.tensor
    column_stride: tl.tensor
    is_channel: tl.tensor


class RowNewKV(NamedTuple):
    """K and V of one row's new tokens: pointers to the first token, [1, channels], and
    the strides between tokens."""

    k: tl.tensor
    v: tl.tensor
    k_stride: tl.tensor
    v_stride: tl.tensor


@triton.jit
def find_row(qo_indptr, rows, tile, TOKENS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return the row of a tile number, or -1 if there is none.

    Row r owns the tile numbers from qo_indptr[r] // TOKENS + r on. These are at least
    as many as it needs, in row order, and need no sum over rows.
    """
    count = tl.zeros([BLOCK_R], tl.int32)
    for chunk in range(0, rows, BLOCK_R):
        r = chunk + tl.arange(0, BLOCK_R)
        is_row = r < rows
        start = tl.load(qo_indptr + r, mask=is_row, other=0).to(tl.int32) // TOKENS + r
        count += (is_row & (start <= tile)).to(tl.int32)
    return tl.sum(count, 0) - 1


@triton.jit
def find_tile(qo_indptr, rows, tile, TOKENS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return (row, first token of the tile within the row) for a tile number; the row
    is -1 if there is none."""
    row = find_row(qo_indptr, rows, tile, TOKENS, BLOCK_R)
    start = tl.load(qo_indptr + tl.maximum(row, 0)).to(tl.int32) // TOKENS + row
    return row, (tile - start) * TOKENS


@triton.jit
def query_tokens(first_token, TILE: tl.constexpr):
    """Return the token within the row of each query of a tile, which has some heads of
    each token."""
    return first_token + tl.arange(0, TILE.block_m) // TILE.heads


@triton.jit
def is_before(token, end, TILE: tl.constexpr):
    """Return which queries of a tile have a token before `end`; perhaps none do."""
    QUERIES: tl.constexpr = TILE.block_m // TILE.heads * TILE.heads
    return (token < end) & (tl.arange(0, TILE.block_m) < QUERIES)


@triton.jit
def query_heads(lane, TILE: tl.constexpr):
    """Return the query head of each query of a tile."""
    return lane * TILE.heads + tl.arange(0, TILE.block_m) % TILE.heads


@triton.jit
def token_pointers(tokens, row, head, channel, HEAD_DIM: tl.constexpr):
    """Return pointers into `args.Tokens`: [queries, channels]."""
    at = (row * tokens.stride + head * HEAD_DIM)[:, None]
    return tokens.at + at + channel[None, :]


@triton.jit
def find_table_row(pages, row):
    """Return the page table row that a row reads."""
    table_row = row.to(tl.int64)
    if pages.row_index is not None:
        table_row = tl.load(pages.row_index + row)
    return table_row


@triton.jit
def row_kv(pool, pages, table_row, kv_head, channel, is_channel):
    """Return the `RowKV` of a row of the page table."""
    kv_head = kv_head.to(tl.int64)
    return RowKV(
        k=pool.k + kv_head * pool.k_head_stride + channel[None, :],
        v=pool.v + kv_head * pool.v_head_stride + channel[None, :],
        k_stride=pool.k_slot_stride,
        v_stride=pool.v_slot_stride,
        table=pages.table + table_row * pages.row_stride,
        column_stride=pages.column_stride,
        is_channel=is_channel,
    )


@triton.jit
def row_new_kv(new_kv, q_begin, first_channel, channel):
    """Return the `RowNewKV` of the row whose first new token is `q_begin`."""
    return RowNewKV(
        k=new_kv.k + (q_begin * new_kv.k_stride + first_channel + channel[None, :]),
        v=new_kv.v + (q_begin * new_kv.v_stride + first_channel + channel[None, :]),
        k_stride=new_kv.k_stride,
        v_stride=new_kv.v_stride,
    )


@triton.jit
def page_at(kv, element, PAGE_SIZE: tl.constexpr):
    """Return pointers to the table entries of elements' pages."""
    return kv.table + (element // PAGE_SIZE).to(tl.int64) * kv.column_stride


@triton.jit
def page_to_slots(page, element, PAGE_SIZE: tl.constexpr):
    """Return the slots of elements, [elements, 1], from the first slots of their
    pages."""
    return (page + element % PAGE_SIZE).to(tl.int64)[:, None]


@triton.jit
def slots_of_tile(kv, start, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the slots of elements start .. start + BLOCK_N, which all exist:
    [BLOCK_N, 1]."""
    element = tl.multiple_of(start, BLOCK_N) + tl.arange(0, BLOCK_N)
    return page_to_slots(tl.load(page_at(kv, element, PAGE_SIZE)), element, PAGE_SIZE)


@triton.jit
def load_tile(at, is_channel, dtype, SHAPE: tl.constexpr):
    """Load [elements, channels] of elements that all exist as `dtype`, the queries';
    padding is zero."""
    if SHAPE.block_d != SHAPE.head_dim:
        stored = tl.load(at, mask=is_channel[None, :], other=0.0)
    else:
        stored = tl.load(at)
    return read_value(stored, dtype)
