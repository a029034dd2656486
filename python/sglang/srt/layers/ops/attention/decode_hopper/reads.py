"""How decode attention on Hopper finds the slots of a row, in Gluon."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: allow-untyped-calls

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class TileReads(NamedTuple):
    """K and V of one KV head as one row reads them from the pool.

    Fields:
        k, v: pointers to the first channel of slot 0, and the strides between slots.
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
def load_slots(reads, element, PAGE: gl.constexpr):
    """Return the slots of elements. Elements that are not read get the first page."""
    at = reads.table + (element // PAGE).to(gl.int64) * reads.column_stride
    page = gl.load(at, mask=element < reads.end, other=0)
    return page + element % PAGE
