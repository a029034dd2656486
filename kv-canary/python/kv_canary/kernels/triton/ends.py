"""The end of a forward in Triton: lineages advance, findings are gathered.

`state`, `rows` and `ends` are tuples from `args.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kv_canary.findings import STATUS_WORDS
from kv_canary.kernels.triton.args import end_args, row_args, state_args
from kv_canary.kernels.triton.rows import (
    load_base_lineage,
    load_lineage_row,
    load_salt,
    load_start,
    sum_terms,
)
from kv_canary.records import NUM_COUNTERS
from kv_canary.view import ForwardView

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.state import CanaryState

COUNTERS = tl.constexpr(NUM_COUNTERS)
COUNTERS_BLOCK = tl.constexpr(triton.next_power_of_2(NUM_COUNTERS))
STATUS = tl.constexpr(STATUS_WORDS)
ROWS_BLOCK = tl.constexpr(128)


@triton.jit
def _load_published_row(rows, ends, row, req, live):
    """Load the row of `expected_lineage` that gets the new lineage."""
    if ends.publish_rows is not None:
        published = tl.load(ends.publish_rows + row, mask=live, other=0)
    else:
        published = load_lineage_row(rows, row, req, live)
    return published


@triton.jit
def _gather_status(state, findings):
    """Store the words of findings that precede the verdicts."""
    tl.store(findings + COUNTERS, tl.load(state.ring_count, cache_modifier=".cg"))
    index = tl.arange(0, COUNTERS_BLOCK)
    is_counter = index < COUNTERS
    at = state.counters + index
    value = tl.load(at, mask=is_counter, other=0, cache_modifier=".cg")
    tl.store(findings + index, value, mask=is_counter)


@triton.jit
def _gather_verdicts(state, findings, row, req, inside, live):
    """Move the verdicts of rows into findings, and clear them for live rows."""
    verdict = state.verdict + req
    found = tl.load(verdict, mask=live, other=0, cache_modifier=".cg")
    tl.store(findings + STATUS + row, found.to(tl.int64), mask=inside)
    # All warps have read the old verdict.
    tl.debug_barrier()
    tl.store(verdict, tl.zeros_like(found), mask=live)


@triton.jit
def gather_in_one(state, req_rows, findings, num_rows):
    """Gather status and verdicts of all rows into findings, by one program."""
    _gather_status(state, findings)
    for begin in range(0, num_rows, ROWS_BLOCK):
        row = begin + tl.arange(0, ROWS_BLOCK)
        inside = row < num_rows
        req = tl.load(req_rows + row, mask=inside, other=0)
        _gather_verdicts(state, findings, row, req, inside, req != 0)


@triton.jit
def store_next_lineage(state, rows, ends, row, lineage):
    """Store a row's lineage after its new tokens, or after those that stay, in scratch.

    `end_forward` publishes it later, because the row's other programs still start from
    the old lineage.
    """
    if ends.stay_lens is not None:
        stay = tl.load(ends.stay_lens + row.row, mask=row.live, other=0)
        stay_end = row.start + tl.minimum(stay, row.extend)
        lineage = row.base + sum_terms(rows, row.start, stay_end, row.salt)
    tl.store(state.next_lineage + row.row, lineage, mask=row.inside)


@triton.jit
def end_forward(state, rows, ends, num_rows):
    """Publish lineages and gather findings, in the last program after all others.

    Loads bypass L1, which does not see stores of other programs.
    """
    if ends.findings is not None:
        _gather_status(state, ends.findings)
    for begin in range(0, num_rows, ROWS_BLOCK):
        row = begin + tl.arange(0, ROWS_BLOCK)
        inside = row < num_rows
        req = tl.load(rows.req_rows + row, mask=inside, other=0)
        live = req != 0
        published = _load_published_row(rows, ends, row, req, live)
        at = state.next_lineage + row
        lineage = tl.load(at, mask=live, other=0, cache_modifier=".cg")
        tl.store(state.expected_lineage + published, lineage, mask=live)
        if ends.findings is not None:
            _gather_verdicts(state, ends.findings, row, req, inside, live)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def finish_kernel(state, rows, ends, num_rows, num_tokens, ADVANCES: tl.constexpr):
    """Gather the verdict of one row per program and, with ADVANCES, its lineage.

    The first program also gathers the status, which this launch does not change.
    """
    row = tl.program_id(0).to(tl.int64)
    inside = row < num_rows
    req = tl.load(rows.req_rows + row, mask=inside, other=0)
    live = req != 0
    if row == 0:
        _gather_status(state, ends.findings)
    _gather_verdicts(state, ends.findings, row, req, inside, live)
    if ADVANCES:
        prefix = tl.load(rows.prefix_lens + row, mask=live, other=0)
        start = load_start(rows, row, live)
        extend = tl.load(rows.extend_lens + row, mask=live, other=0)
        if ends.stay_lens is not None:
            stay = tl.load(ends.stay_lens + row, mask=live, other=0)
            extend = tl.minimum(stay, extend)
        end = tl.minimum(start + extend, num_tokens)
        value = load_base_lineage(state, rows, row, req, live, prefix)
        value += sum_terms(rows, start, end, load_salt(rows, row, live))
        published = _load_published_row(rows, ends, row, req, live)
        # All threads have read the old value before one thread stores the new one.
        tl.debug_barrier()
        tl.store(state.expected_lineage + published, value, mask=live)


def finish_step(state: CanaryState, view: ForwardView, findings: Tensor) -> None:
    _finish(state, view, findings, advance=True)


def gather_findings(state: CanaryState, req_rows: Tensor, findings: Tensor) -> None:
    # The kernel reads only `req_rows`.
    rows = ForwardView(
        req_rows=req_rows,
        prefix_lens=req_rows,
        extend_lens=req_rows,
        input_ids=req_rows,
        positions=req_rows,
        out_cache_loc=req_rows,
        serials=req_rows,
        salts=req_rows,
    )
    _finish(state, rows, findings, advance=False)


def _finish(
    state: CanaryState, rows: ForwardView, findings: Tensor, *, advance: bool
) -> None:
    finish_kernel[(max(rows.num_rows, 1),)](
        state=state_args(state),
        rows=row_args(rows),
        ends=end_args(rows, findings),
        num_rows=rows.num_rows,
        num_tokens=rows.num_tokens,
        ADVANCES=advance,
        num_warps=1,
    )
