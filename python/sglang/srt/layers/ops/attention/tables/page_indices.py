"""Gathers a batch's pages into one list, for kernels that read (indptr, indices).

Reads a page table whose entries are first slots of pages; writes page numbers.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def page_indices_kernel(
    page_table,
    row_index,
    indptr,
    out,
    table_row_stride,
    table_column_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    begin = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - begin
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = page < count
    source = page_table + tl.load(row_index + row) * table_row_stride
    slots = tl.load(source + page * table_column_stride, mask=inside, other=0)
    tl.store(out + begin + page, slots // PAGE_SIZE, mask=inside)


def page_indices(
    page_table: Tensor,
    *,
    row_index: Tensor,
    indptr: Tensor,
    out: Tensor,
    max_pages: int,
    page_size: int,
) -> None:
    """out[indptr[r] + i] = page_table[row_index[r], i] // page_size.

    Args:
        page_table: [rows, columns] int32, any strides; first slots of pages.
        row_index: [R] int64, rows of `page_table`.
        indptr: [R + 1] int32; row r has pages indptr[r] .. indptr[r + 1].
        out: [at least indptr[R]] int32; entries after that are left alone.
        max_pages: at least the pages of the longest row. It sizes the grid, so that the
            host need not read `indptr`.
        page_size: slots of a page.
    """
    grid = (row_index.shape[0], triton.cdiv(max_pages, _BLOCK))
    page_indices_kernel[grid](
        page_table,
        row_index,
        indptr,
        out,
        page_table.stride(0),
        page_table.stride(1),
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
    )


def page_indices_ref(
    page_table: Tensor,
    *,
    row_index: Tensor,
    indptr: Tensor,
    out: Tensor,
    max_pages: int,
    page_size: int,
) -> None:
    """Torch oracle of `page_indices`; reads `indptr` on the host."""
    bounds = indptr.tolist()
    for row, table_row in enumerate(row_index.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        slots = page_table[table_row, : end - begin]
        out[begin:end] = torch.div(slots, page_size, rounding_mode="floor")
