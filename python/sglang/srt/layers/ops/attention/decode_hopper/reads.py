"""How decode attention on Hopper finds the slots of a row, in Gluon."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class TileReads(NamedTuple):
    """K and V of one KV head as one row reads them from the pool.

    Fields:
        k, v: pointers to the first word of slot 0, and the strides between slots, in
            words of 16 bits (`operands`).
        table, column_stride: the row's pages. end: first element past the row.
    """

    k: Any
    v: Any
    k_stride: Any
    v_stride: Any
    table: Any
    column_stride: Any
    end: Any


@gluon.jit
def make_reads(pool, pages, row, kv_head, end):
    """Return the `TileReads` of a row up to element `end`."""
    table_row = row
    if pages.row_index is not None:
        table_row = gl.load(pages.row_index + row)
    k = pool.k + kv_head.to(gl.int64) * pool.k_head_stride
    v = pool.v + kv_head.to(gl.int64) * pool.v_head_stride
    k_stride, v_stride = pool.k_slot_stride, pool.v_slot_stride
    if pool.k.dtype.element_ty.primitive_bitwidth == 8:
        k = k.to(gl.pointer_type(gl.int16), bitcast=True)
        v = v.to(gl.pointer_type(gl.int16), bitcast=True)
        k_stride, v_stride = k_stride // 2, v_stride // 2
    return TileReads(
        k,
        v,
        k_stride,
        v_stride,
        pages.table + table_row * pages.row_stride,
        pages.column_stride,
        end,
    )


@gluon.jit
def load_slots(reads, element, PAGE: gl.constexpr):
    """Return the slots of elements. Elements that are not read get the first page."""
    at = reads.table + (element // PAGE).to(gl.int64) * reads.column_stride
    page = gl.load(at, mask=element < reads.end, other=0)
    return page + element % PAGE
