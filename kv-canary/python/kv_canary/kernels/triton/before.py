"""One launch for the read check and the head write of a forward.

Some programs of a row verify while the others write. They share only the head record of
a new token's slot, and only if some row's prefix contains that slot too. The head write
then always reports WRITE_FOREIGN, because it looks at records that verify does not
write; verify may find the record old, new (for another position or history) or torn.
Lineages and tail records do not change until the tail launch.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kv_canary.kernels.triton.args import check_args, row_args, state_args
from kv_canary.kernels.triton.rows import Batch, Program
from kv_canary.kernels.triton.verify import read_arguments, read_splits, verify_program
from kv_canary.kernels.triton.write import AFTER_HEAD, write_program, write_shape
from kv_canary.layout import FingerprintMode
from kv_canary.records import Launch, ring_tag

if TYPE_CHECKING:
    from kv_canary.pool_checks import PoolChecks
    from kv_canary.state import CanaryState
    from kv_canary.view import ForwardView


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


def before_model(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    """Launch both checks at once: the first programs of a row verify, others write."""
    table, manager = view.reads[0], view.manager
    verify_splits = read_splits(view, table, checks)
    block, _, write_splits = write_shape(view, FingerprintMode.NONE)
    before_kernel[(max(view.num_rows, 1), verify_splits + write_splits)](
        state=state_args(state),
        rows=row_args(view),
        checks=check_args(checks, reads=True, writes=view),
        **read_arguments(state, view, checks, table, manager),
        page_size=checks.page_size,
        kind=int(view.writer_kind),
        head_tag=ring_tag(Launch.HEAD, manager, state.pool),
        verify_splits=verify_splits,
        HEAD_BLOCK=block,
        num_warps=4,
    )
