"""The end of a forward in Triton: lineages published, status and verdicts gathered.

`state`, `rows` and `ends` are tuples of `triton_args.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary.findings import STATUS_WORDS
from kv_canary.kernels.triton_rows import (
    load_base_lineage,
    load_lineage_row,
    load_salt,
    load_start,
    sum_terms,
)
from kv_canary.records import NUM_COUNTERS

COUNTERS = tl.constexpr(NUM_COUNTERS)
COUNTERS_BLOCK = tl.constexpr(triton.next_power_of_2(NUM_COUNTERS))
STATUS = tl.constexpr(STATUS_WORDS)
ROWS_BLOCK = tl.constexpr(128)


@triton.jit
def _load_published_row(rows, ends, row, req, live):
    """The row of `expected_lineage` that gets the lineage after the new tokens."""
    if ends.publish_rows is not None:
        published = tl.load(ends.publish_rows + row, mask=live, other=0)
    else:
        published = load_lineage_row(rows, row, req, live)
    return published


@triton.jit
def _gather_status(state, findings):
    """The words of findings before the verdicts."""
    tl.store(findings + COUNTERS, tl.load(state.ring_count, cache_modifier=".cg"))
    index = tl.arange(0, COUNTERS_BLOCK)
    is_counter = index < COUNTERS
    at = state.counters + index
    value = tl.load(at, mask=is_counter, other=0, cache_modifier=".cg")
    tl.store(findings + index, value, mask=is_counter)


@triton.jit
def _gather_verdicts(state, findings, row, req, inside, live):
    """Verdicts of rows into findings; those of live ones are cleared."""
    verdict = state.verdict + req
    found = tl.load(verdict, mask=live, other=0, cache_modifier=".cg")
    tl.store(findings + STATUS + row, found.to(tl.int64), mask=inside)
    # All warps have read the old verdict.
    tl.debug_barrier()
    tl.store(verdict, tl.zeros_like(found), mask=live)


@triton.jit
def gather_findings(state, req_rows, findings, num_rows):
    """Status and verdicts of all rows into findings, by one program."""
    _gather_status(state, findings)
    for begin in range(0, num_rows, ROWS_BLOCK):
        row = begin + tl.arange(0, ROWS_BLOCK)
        inside = row < num_rows
        req = tl.load(req_rows + row, mask=inside, other=0)
        _gather_verdicts(state, findings, row, req, inside, req != 0)


@triton.jit
def store_next_lineage(state, rows, ends, row, lineage):
    """The lineage after the new tokens of a `Row`, or after those that stay, into the
    scratch that `end_forward` publishes: its other programs still start from the old
    one."""
    if ends.stay_lens is not None:
        stay = tl.load(ends.stay_lens + row.row, mask=row.live, other=0)
        stay_end = row.start + tl.minimum(stay, row.extend)
        lineage = row.base + sum_terms(rows, row.start, stay_end, row.salt)
    tl.store(state.next_lineage + row.row, lineage, mask=row.inside)


@triton.jit
def end_forward(state, rows, ends, num_rows):
    """Publish lineages, gather status and verdicts; by the last program, when all
    others are done. Loads go past L1, which does not see stores of other programs."""
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
    """A program per row: its verdict, and its lineage if it ADVANCES; the first also
    gathers the status, which this launch does not change."""
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
        # All threads have read the old value before one stores the new.
        tl.debug_barrier()
        tl.store(state.expected_lineage + published, value, mask=live)
