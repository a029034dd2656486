"""Triton kernel of `window_table`: one program per row and block of entries."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.layers.attention.window_tables import WindowRows

BLOCK = 256


def window_table(
    page_table: Tensor,
    row_index: Tensor | None,
    *,
    prefix_lens: Tensor,
    read_lens: Tensor,
    mapping: Tensor,
    window: int,
    page_size: int,
    out: WindowRows,
) -> None:
    """As `window_table_ref`."""
    rows, columns = out.page_table.shape
    if not rows:
        return
    window_table_kernel[(rows, triton.cdiv(columns, BLOCK))](
        page_table,
        row_index,
        prefix_lens,
        read_lens,
        mapping,
        *out,
        page_table.stride(0),
        page_table.stride(1),
        page_table.shape[1],
        out.page_table.stride(0),
        columns,
        window,
        PAGE=page_size,
        BLOCK=BLOCK,
    )


@triton.jit(do_not_specialize=["num_columns", "num_entries"])
def window_table_kernel(
    table,
    row_index,
    prefix_lens,
    read_lens,
    mapping,
    out,
    first_position,
    out_prefix_lens,
    out_read_lens,
    row_stride,
    column_stride,
    num_columns,
    out_stride,
    num_entries,
    window,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    prefix = tl.load(prefix_lens + row)
    length = tl.load(read_lens + row)
    first = tl.maximum(prefix - window + 1, 0) // PAGE
    begin = first * PAGE
    column = first + entry
    inside = entry < num_entries
    is_read = inside & (column * PAGE < length) & (column < num_columns)
    source = row if row_index is None else tl.load(row_index + row)
    slots = tl.load(
        table + source * row_stride + column * column_stride, mask=is_read, other=0
    )
    slots = tl.load(mapping + slots, mask=is_read, other=0)
    tl.store(out + row * out_stride + entry, slots.to(tl.int32), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(first_position + row, begin)
        tl.store(out_prefix_lens + row, prefix - begin)
        tl.store(out_read_lens + row, length - begin)
