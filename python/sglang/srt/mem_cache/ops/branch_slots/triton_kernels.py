"""Triton kernels over the slots of draft branches; `slots.py` launches them.

All read rows of req_to_token by the rules of `draft_layout.py`. Columns past a row's
end give scratch slot 0.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.utils.triton_launch import let_next_start, wait_for_inputs


@triton.jit
def _branch_width(seq_len, PAGE: tl.constexpr, STEPS: tl.constexpr):
    """Return the columns of one branch, in whole pages."""
    return (seq_len % PAGE + STEPS + PAGE - 1) // PAGE * PAGE


@triton.jit
def _shift(
    seq_len,
    branch,
    region,
    PAGE: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_REGION: tl.constexpr,
):
    """Return how far a branch's own elements are from their columns."""
    if HAS_REGION:
        shift = region + branch * STEPS - seq_len
    else:
        shift = branch * _branch_width(seq_len, PAGE, STEPS)
    return shift


@triton.jit
def _row(table, indices, q, row_stride):
    return table + tl.load(indices + q) * row_stride


@triton.jit
def _slots(row, column, width, mask):
    return tl.load(row + column, mask=mask & (column < width), other=0)


@triton.jit
def tail_kernel(
    table,
    indices,
    lens,
    out,
    row_stride,
    row_width,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    q = tl.program_id(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    at = tl.arange(0, BLOCK)
    column = tl.load(lens + q) + at
    row = _row(table, indices, q, row_stride)
    slots = _slots(row, column, row_width, at < WIDTH)
    tl.store(out + q * WIDTH + at, slots.to(tl.int64), mask=at < WIDTH)


@triton.jit(do_not_specialize=["region"])
def draft_kernel(
    table,
    indices,
    lens,
    out,
    row_stride,
    row_width,
    region,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_REGION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    q = tl.program_id(0)
    rows = tl.num_programs(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    seq_len = tl.load(lens + q)
    at = tl.arange(0, BLOCK)
    step = at // K
    branch = at % K
    inside = at < STEPS * K
    column = seq_len + _shift(seq_len, branch, region, PAGE, STEPS, HAS_REGION) + step
    row = _row(table, indices, q, row_stride)
    slots = _slots(row, column, row_width, inside)
    tl.store(out + (step * rows + q) * K + branch, slots.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["region"])
def shifts_kernel(
    lens,
    shift_from,
    column_shift,
    region,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_REGION: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_PAGED: tl.constexpr,
    PDL: tl.constexpr,
):
    q = tl.program_id(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    seq_len = tl.load(lens + q)
    branch = tl.arange(0, BLOCK)
    own = seq_len - seq_len % PAGE if IS_PAGED else seq_len
    shift = _shift(seq_len, branch, region, PAGE, STEPS, HAS_REGION)
    out = q * K + branch
    tl.store(shift_from + out, tl.zeros([BLOCK], tl.int64) + own, mask=branch < K)
    tl.store(column_shift + out, shift, mask=branch < K)


@triton.jit(do_not_specialize=["region"])
def tail_copies_kernel(
    table,
    indices,
    lens,
    src,
    dst,
    row_stride,
    row_width,
    region,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_REGION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    q = tl.program_id(0)
    copies = tl.num_programs(1)
    copy = tl.program_id(1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    seq_len = tl.load(lens + q)
    tail = seq_len % PAGE
    offset = tl.arange(0, BLOCK)
    source = seq_len - tail + offset
    branch = 1 + copy
    target = source + _shift(seq_len, branch, region, PAGE, STEPS, HAS_REGION)
    row = _row(table, indices, q, row_stride)
    is_copied = offset < tail
    out = (q * copies + copy) * (PAGE - 1) + offset
    inside = offset < PAGE - 1
    moved = _slots(row, source, row_width, is_copied)
    tl.store(src + out, moved.to(tl.int64), mask=inside)
    moved = _slots(row, target, row_width, is_copied)
    tl.store(dst + out, moved.to(tl.int64), mask=inside)


@triton.jit
def accepted_moves_kernel(
    accept_index,
    locs,
    src,
    dst,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    q = tl.program_id(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < PATH
    place = tl.load(accept_index + q * PATH + column, mask=inside, other=-1)
    source = tl.load(locs + place, mask=place >= 0, other=0)
    target = tl.load(locs + q * NODES + column, mask=place >= 0, other=0)
    tl.store(src + q * PATH + column, source, mask=inside)
    tl.store(dst + q * PATH + column, target, mask=inside)


@triton.jit(do_not_specialize=["columns", "region"])
def branch_table_kernel(
    table,
    indices,
    lens,
    out,
    row_stride,
    row_width,
    columns,
    out_stride,
    region,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_REGION: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_PAGED: tl.constexpr,
    SKIP_PREFIX: tl.constexpr,
    PDL: tl.constexpr,
):
    z = tl.program_id(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    q = z // K
    seq_len = tl.load(lens + q)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if IS_PAGED:
        own = seq_len - seq_len % PAGE
        end = own + _branch_width(seq_len, PAGE, STEPS)
        element = entry.to(tl.int64) * PAGE
    else:
        own = seq_len
        end = own + STEPS
        element = entry.to(tl.int64)
    if SKIP_PREFIX:
        element += own
    shift = _shift(seq_len, z % K, region, PAGE, STEPS, HAS_REGION)
    column = tl.where(element < own, element, element + shift)
    row = _row(table, indices, q, row_stride)
    slots = _slots(row, column, row_width, (element < end) & (entry < columns))
    cell = out + z.to(tl.int64) * out_stride + entry
    tl.store(cell, slots, mask=entry < columns)


@triton.jit(do_not_specialize=["rows", "capacity", "region"])
def branch_indices_kernel(
    table,
    indices,
    lens,
    indptr,
    out,
    rows,
    row_stride,
    row_width,
    capacity,
    region,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_REGION: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    z = tl.program_id(0)
    step = tl.program_id(2)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    q = z // K
    branch = z % K
    seq_len = tl.load(lens + q)
    count = seq_len + step + 1
    other = tl.arange(0, ROWS_BLOCK)
    before = tl.load(lens + other, mask=other < q, other=0)
    before = tl.where(other < q, before + step + 1, 0)
    begin = tl.sum(before, axis=0) * K + branch * count
    if tl.program_id(1) == 0:
        ends = indptr + step * (rows * K + 1)
        tl.store(ends + z + 1, (begin + count).to(tl.int32))
        if z == 0:
            tl.store(ends, 0)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_read = (element < count) & (begin + element < capacity)
    shift = _shift(seq_len, branch, region, PAGE, STEPS, HAS_REGION)
    column = tl.where(element < seq_len, element, element + shift)
    slots = _slots(_row(table, indices, q, row_stride), column, row_width, is_read)
    to = out + step.to(tl.int64) * capacity + begin + element
    tl.store(to, slots, mask=is_read)


@triton.jit(do_not_specialize=["step", "rows", "size"])
def ancestors_kernel(
    parents,
    draft_slots,
    lens,
    begins,
    out,
    step,
    rows,
    size,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per request. It walks up from all of its branches at once."""
    q = tl.program_id(0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    own = tl.arange(0, BLOCK)
    inside = own < K
    branch = own.to(tl.int64)
    first = tl.load(begins + q * K + own, mask=inside, other=0) + tl.load(lens + q)
    for s in range(step, 0, -1):
        at = parents + q.to(tl.int64) * GROUPS + 1 + K * s + branch
        candidate = tl.load(at, mask=inside, other=0)
        branch = (candidate - K - K * K * (s - 1)) // K
        # Never out of the request's branches, whatever a padding row holds.
        inside = inside & (branch >= 0) & (branch < K)
        at = draft_slots + ((s - 1) * rows + q) * K + branch
        slot = tl.load(at, mask=inside, other=0)
        place = first + s - 1
        tl.store(out + place, slot.to(tl.int32), mask=inside & (place < size))
