"""One launch for the read check and the head write of a forward, in one group of slots
or in two.

Of the programs of a row some verify, the others write, all at once. What one of them
reads and another writes is the head record of a new token's slot, and only where that
slot also is in some row's prefix. The head write then reports WRITE_FOREIGN whatever
the schedule, because it looks at records that verify does not write; verify may find
the record old, new (of another position or history) or torn. Lineages and tail records
stay as they are until the tail launch.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary.kernels.triton_rows import Batch, Program
from kv_canary.kernels.triton_verify import verify_program
from kv_canary.kernels.triton_write import AFTER_HEAD, write_program


@triton.jit
def _before_program(
    row,
    split,
    state,
    rows,
    checks,
    reads,
    data,
    batch,
    table_rows,
    table_columns,
    page_size,
    kind,
    manager,
    tag,
    head_tag,
    verify_splits,
    write_splits,
    PAGES: tl.constexpr,
    HASHING: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    """The first programs of a row verify, the next ones write."""
    if split < verify_splits:
        verify_program(
            Program(row=row, split=split, splits=verify_splits),
            state,
            rows,
            checks,
            reads,
            data,
            batch,
            table_rows,
            table_columns,
            manager,
            tag,
            PAGES,
            HASHING,
            BLOCK,
            NEXT_PHASE=AFTER_HEAD,
        )
    elif split < verify_splits + write_splits:
        write_program(
            Program(row=row, split=split - verify_splits, splits=write_splits),
            state,
            rows,
            checks,
            data=data,
            ends=None,
            batch=batch,
            page_size=page_size,
            kind=kind,
            manager=manager,
            tag=head_tag,
            IS_TAIL=False,
            ADVANCES=False,
            STEPS_PHASE=False,
            HASHING=HASHING,
            BLOCK=HEAD_BLOCK,
        )


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_tokens",
        "table_rows",
        "table_columns",
        "page_size",
        "max_depth",
        "kind",
        "manager",
        "tag",
        "head_tag",
        "verify_splits",
        "write_splits",
        "other_table_rows",
        "other_table_columns",
        "other_tag",
        "other_head_tag",
        "other_verify_splits",
    ]
)
def before_kernel(
    state,
    rows,
    checks,
    reads,
    data,
    num_rows,
    num_tokens,
    table_rows,
    table_columns,
    page_size,
    max_depth,
    kind,
    manager,
    tag,
    head_tag,
    verify_splits,
    write_splits,
    PAGES: tl.constexpr,
    HASHING: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    other_state=None,
    other_rows=None,
    other_checks=None,
    other_reads=None,
    other_data=None,
    other_table_rows=0,
    other_table_columns=0,
    other_tag=0,
    other_head_tag=0,
    other_verify_splits=0,
    OTHER_PAGES: tl.constexpr = None,
    OTHER_HASHING: tl.constexpr = None,
    HAS_OTHER: tl.constexpr = False,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    batch = Batch(num_rows=num_rows, num_tokens=num_tokens, max_depth=max_depth)
    if tl.program_id(2) == 0:
        _before_program(
            row,
            split,
            state,
            rows,
            checks,
            reads,
            data,
            batch,
            table_rows,
            table_columns,
            page_size,
            kind,
            manager,
            tag,
            head_tag,
            verify_splits,
            write_splits,
            PAGES,
            HASHING,
            BLOCK,
            HEAD_BLOCK,
        )
    elif HAS_OTHER:
        _before_program(
            row,
            split,
            other_state,
            other_rows,
            other_checks,
            other_reads,
            other_data,
            batch,
            other_table_rows,
            other_table_columns,
            page_size,
            kind,
            manager,
            other_tag,
            other_head_tag,
            other_verify_splits,
            write_splits,
            OTHER_PAGES,
            OTHER_HASHING,
            BLOCK,
            HEAD_BLOCK,
        )
