"""One launch for the read check and the head write of a forward.

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
    PAGES: tl.constexpr,
    HASHING: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    batch = Batch(num_rows=num_rows, num_tokens=num_tokens, max_depth=max_depth)
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
    else:
        write_program(
            Program(
                row=row,
                split=split - verify_splits,
                splits=tl.num_programs(1) - verify_splits,
            ),
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
