"""Triton kernels of the canary's head and tail writes; see `launches.py`.

A program takes a run of blocks of one row's new tokens, and adds up the terms before
its run itself: an extend of any length is one launch. The parameters `state`, `rows`,
`columns`, `published`, `data`, `oracle`, `ends` and HASHING are the tuples of
`triton_args.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary.kernels.triton_common import (
    CLOCK_MASK,
    CLOCK_SHIFT,
    NONE,
    POISON,
    SERIAL_MASK,
    column_of,
    fingerprint_of,
    in_table,
    lineage_row_of,
    pack_word0,
    pack_word3,
    report,
    salt_of,
    seed_of,
    start_of,
    step_phase,
    term_of,
    told_to_all,
)
from kv_canary.records import (
    NUM_COUNTERS,
    Counter,
    Phase,
    Reason,
    WriterKind,
)

FOREIGN = tl.constexpr(int(Reason.WRITE_FOREIGN))
ALIAS = tl.constexpr(int(Reason.WRITE_ALIAS))
SCRATCH = tl.constexpr(int(Reason.WRITE_SCRATCH))
TOKEN = tl.constexpr(int(Reason.WRITE_TOKEN))
POSITION = tl.constexpr(int(Reason.WRITE_POSITION))
IDLE = tl.constexpr(int(Phase.IDLE))
AFTER_VERIFY = tl.constexpr(int(Phase.AFTER_VERIFY))
AFTER_HEAD = tl.constexpr(int(Phase.AFTER_HEAD))
HEAD_SLOTS = tl.constexpr(int(Counter.HEAD_SLOTS))
TAIL_SLOTS = tl.constexpr(int(Counter.TAIL_SLOTS))
HEAD_LAUNCHES = tl.constexpr(int(Counter.HEAD_LAUNCHES))
TAIL_LAUNCHES = tl.constexpr(int(Counter.TAIL_LAUNCHES))
VERIFY_KIND = tl.constexpr(int(WriterKind.VERIFY))
SUM_BLOCK = tl.constexpr(512)
COUNTERS = tl.constexpr(NUM_COUNTERS)
COUNTERS_BLOCK = tl.constexpr(triton.next_power_of_2(NUM_COUNTERS))
ROWS_BLOCK = tl.constexpr(128)


@triton.jit
def _terms(rows, token_index, mask, salt):
    token = tl.load(rows.input_ids + token_index, mask=mask, other=0)
    position = tl.load(rows.positions + token_index, mask=mask, other=0)
    word0 = pack_word0(token, position)
    return token, position, word0, tl.where(mask, term_of(word0, salt), 0)


@triton.jit
def sum_of_terms(rows, begin, end, salt):
    """Sum of the lineage terms of tokens begin .. end - 1."""
    total = tl.zeros([SUM_BLOCK], dtype=tl.int64)
    for at in range(begin, end, SUM_BLOCK):
        index = at + tl.arange(0, SUM_BLOCK)
        _, _, _, term = _terms(rows, index, index < end, salt)
        total += term
    return tl.sum(total, axis=0)


@triton.jit
def _sum_of_ancestors(rows, index, mask, begin, end, salt, max_depth):
    """Sums of the terms of the ancestors of tokens [N] among begin .. end - 1."""
    node = tl.load(rows.parent_index + index, mask=mask, other=-1)
    total = tl.zeros_like(index)
    for _ in range(max_depth):
        mask = mask & (node >= begin) & (node < end)
        _, _, _, term = _terms(rows, node, mask, salt)
        total += term
        node = tl.load(rows.parent_index + node, mask=mask, other=-1)
    return total


@triton.jit
def base_of(state, rows, row, req, live, prefix):
    """Lineage of what stands before the row's first new token."""
    lineage = tl.load(state.expected_lineage + lineage_row_of(rows, row, req, live))
    return tl.where(prefix > 0, lineage, seed_of(rows, row, req, live))


@triton.jit
def published_row_of(rows, ends, row, req, live):
    """The row of `expected_lineage` that gets the lineage behind the new tokens."""
    if ends.publish_rows is not None:
        published = tl.load(ends.publish_rows + row, mask=live, other=0)
    else:
        published = lineage_row_of(rows, row, req, live)
    return published


@triton.jit
def take_status(state, findings):
    """The words of findings before the verdicts."""
    tl.store(findings, tl.load(state.ring_count, cache_modifier=".cg"))
    index = tl.arange(0, COUNTERS_BLOCK)
    is_counter = index < COUNTERS
    at = state.counters + index
    value = tl.load(at, mask=is_counter, other=0, cache_modifier=".cg")
    tl.store(findings + 1 + index, value, mask=is_counter)


@triton.jit
def take_verdicts(state, findings, row, req, inside, live):
    """Verdicts of rows into findings; those of live ones are cleared."""
    verdict = state.verdict + req
    found = tl.load(verdict, mask=live, other=0, cache_modifier=".cg")
    tl.store(findings + 1 + COUNTERS + row, found.to(tl.int64), mask=inside)
    # All warps have read what it was.
    tl.debug_barrier()
    tl.store(verdict, tl.zeros_like(found), mask=live)


@triton.jit
def _end_forward(state, rows, ends, num_rows):
    """Lineages published, status, verdicts taken and cleared; by the last program, when
    all others are done. Loads go past L1, which does not see what others wrote."""
    if ends.findings is not None:
        take_status(state, ends.findings)
    for begin in range(0, num_rows, ROWS_BLOCK):
        row = begin + tl.arange(0, ROWS_BLOCK)
        inside = row < num_rows
        req = tl.load(rows.req_rows + row, mask=inside, other=0)
        live = req != 0
        published = published_row_of(rows, ends, row, req, live)
        at = state.next_lineage + row
        lineage = tl.load(at, mask=live, other=0, cache_modifier=".cg")
        tl.store(state.expected_lineage + published, lineage, mask=live)
        if ends.findings is not None:
            take_verdicts(state, ends.findings, row, req, inside, live)


@triton.jit
def _tokens_of_padded(rows, row, is_inside, start, num_tokens):
    """New tokens of a padded row, none outside of the batch."""
    count = is_inside.to(tl.int64)
    if rows.qo_indptr is not None:
        end = tl.load(rows.qo_indptr + row + 1, mask=is_inside, other=0)
        count = tl.maximum(tl.minimum(end, num_tokens) - start, 0)
    return count


@triton.jit
def _leave_lineage(
    state, rows, ends, row, live, start, extend, first_base, base, salt, is_inside
):
    """The row's lineage behind the new tokens that stay, for the last program of all:
    others of this row still start from the old one."""
    if ends.stay_lens is not None:
        stay = tl.load(ends.stay_lens + row, mask=live, other=0)
        stay_end = start + tl.minimum(stay, extend)
        base = first_base + sum_of_terms(rows, start, stay_end, salt)
    tl.store(state.next_lineage + row, base, mask=is_inside)


@triton.jit
def _check_head(
    state,
    rows,
    columns,
    req,
    serial,
    row,
    prefix,
    page_size,
    j,
    slot,
    inside,
    writable,
    old0,
    old3,
    now,
):
    """(reasons, the slots that are due) of a head write, -1 where none is known."""
    live = req != 0
    expected_slot = j * 0 - 1
    scratch = inside & (slot >= 0) & (slot < page_size)
    reasons = tl.where(scratch & live, SCRATCH, 0).to(tl.int64)
    # A record of this very forward is an alias, which the tail write reports.
    is_old = writable & (old0 != POISON)
    is_old = is_old & (((old3 >> CLOCK_SHIFT) & CLOCK_MASK) != (now & CLOCK_MASK))
    is_other = ((old3 ^ serial) & SERIAL_MASK) != 0
    foreign = (inside & (scratch == 0) & (writable == 0)) | (is_old & is_other)
    if columns is not None:
        column = column_of(rows, prefix + j, row)
        expected_slot = in_table(columns, column, req, inside & live)
        foreign = foreign | (inside & live & (scratch == 0) & (slot != expected_slot))
        # What the row reads as its own prefix may not be written, either.
        place = old0 >> 32
        is_prefix = is_old & (is_other == 0) & (place < prefix)
        held = in_table(columns, column_of(rows, place, row), req, is_prefix)
        foreign = foreign | (is_prefix & (held == slot))
    return reasons | tl.where(foreign, FOREIGN, 0), expected_slot


@triton.jit
def _check_published(published, req, prefix, j, mask, kind, token, position):
    """(reasons, word 0 that was due) of new tokens that have been published; what a
    verification reads behind its roots are proposals."""
    mask = mask & ((j == 0) | (kind != VERIFY_KIND))
    due = prefix + j
    token_due = in_table(published, due, req, mask)
    is_known = token_due >= 0
    reasons = tl.where(is_known & (token_due != token), TOKEN, 0)
    reasons |= tl.where(is_known & (due != position), POSITION, 0)
    return reasons.to(tl.int64), pack_word0(token_due, due)


@triton.jit
def _check_oracle(oracle, t, mask, token, position):
    """(reasons, word 0 that was due) of new tokens."""
    token_due = tl.load(oracle.tokens + t, mask=mask, other=-1)
    wrong = (token_due >= 0) & (token_due != token)
    position_due = tl.load(oracle.positions + t, mask=mask, other=-1)
    misplaced = (position_due >= 0) & (position_due != position)
    reasons = tl.where(wrong, TOKEN, 0) | tl.where(misplaced, POSITION, 0)
    return reasons.to(tl.int64), pack_word0(token_due, position_due)


@triton.jit
def write_program(
    row,
    split,
    splits,
    state,
    rows,
    columns,
    data,
    oracle,
    published,
    ends,
    num_rows,
    num_tokens,
    page_size,
    max_depth,
    kind,
    manager,
    tag,
    IS_TAIL: tl.constexpr,
    ADVANCES: tl.constexpr,
    HASHING: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS_PHASE: tl.constexpr,
):
    """The `split`-th of `splits` programs of a row. Without STEPS_PHASE the launch it
    is a part of takes care of the phase."""
    IS_TREE: tl.constexpr = rows.parent_index is not None
    now = tl.load(state.clock)
    if (row == 0) & (split == 0):
        if STEPS_PHASE:
            step_phase(
                state,
                manager,
                now,
                tag,
                AFTER_HEAD if IS_TAIL else AFTER_VERIFY,
                IDLE if IS_TAIL else AFTER_HEAD,
            )
        launches = TAIL_LAUNCHES if IS_TAIL else HEAD_LAUNCHES
        tl.atomic_add(state.counters + launches, 1)
    is_inside = row < num_rows
    req = tl.load(rows.req_rows + row, mask=is_inside, other=0)
    live = req != 0
    prefix = tl.load(rows.prefix_lens + row, mask=live, other=0)
    start = start_of(rows, row, is_inside)
    extend = tl.load(rows.extend_lens + row, mask=live, other=0)
    extend = tl.maximum(tl.minimum(extend, num_tokens - start), 0)
    serial = tl.load(rows.serials + row, mask=live, other=0)
    salt = salt_of(rows, row, live)
    base = base_of(state, rows, row, req, live, prefix)
    first_base = base
    count = extend
    if not IS_TAIL:
        # A padded row is looked at, too: all it may write is scratch.
        padded = _tokens_of_padded(rows, row, is_inside, start, num_tokens)
        count = tl.where(live, extend, padded)
    blocks = (count + BLOCK - 1) // BLOCK
    run = (blocks + splits - 1) // splits
    first_block = tl.minimum(split * run, blocks)
    last_block = tl.minimum(first_block + run, blocks)
    if rows.qo_indptr is not None and not IS_TREE:
        before = tl.where(first_block < last_block, first_block * BLOCK, 0)
        base += sum_of_terms(rows, start, start + before, salt)
    written = prefix * 0
    for block in range(first_block, last_block):
        j = block * BLOCK + tl.arange(0, BLOCK)
        inside = j < count
        t = start + j
        token, position, word0, term = _terms(rows, t, inside, salt)
        if IS_TREE:
            end = start + extend
            lineage = base + term
            lineage += _sum_of_ancestors(rows, t, inside, start, end, salt, max_depth)
        else:
            lineage = base + tl.cumsum(term, axis=0)
            base += tl.sum(term, axis=0)
        slot = tl.load(rows.out_cache_loc + t, mask=inside, other=-1)
        writable = inside & live & (slot >= page_size) & (slot < state.num_slots)
        record = state.head + slot * 4
        old0 = tl.load(record, mask=writable, other=0)
        old1 = tl.load(record + 1, mask=writable, other=0)
        old3 = tl.load(record + 3, mask=writable, other=0)
        word3 = tl.zeros_like(t) + pack_word3(now, kind, serial)
        found0 = old0
        expected0 = word0
        expected_slot = tl.zeros_like(t) - 1
        if IS_TAIL:
            is_own = (old0 == word0) & (old1 == lineage) & (old3 == word3)
            reasons = tl.where(writable & (is_own == 0), ALIAS, 0).to(tl.int64)
        else:
            reasons, expected_slot = _check_head(
                state,
                rows,
                columns,
                req,
                serial,
                row,
                prefix,
                page_size,
                j,
                slot,
                inside,
                writable,
                old0,
                old3,
                now,
            )
            lineage = tl.where(live, lineage, 0)
            if published is not None:
                unlike, due0 = _check_published(
                    published, req, prefix, j, inside & live, kind, token, position
                )
                reasons |= unlike
                expected0 = tl.where(unlike != 0, due0, expected0)
                found0 = tl.where(unlike != 0, word0, found0)
            if oracle is not None:
                unlike, due0 = _check_oracle(oracle, t, inside & live, token, position)
                reasons |= unlike
                expected0 = tl.where(live, due0, expected0)
                found0 = tl.where(unlike != 0, word0, found0)
            reasons = told_to_all(reasons)
        nothing = tl.zeros_like(t)
        report(
            state,
            reasons,
            req,
            serial,
            slot,
            position,
            expected0,
            found0,
            lineage,
            old1,
            old3,
            now,
            row,
            expected_slot,
            nothing,
            nothing,
            tag,
        )
        word2 = nothing
        if IS_TAIL:
            record = state.tail + slot * 4
            if HASHING.mode != NONE:
                word2 = fingerprint_of(data, slot, writable, lineage, HASHING)
        else:
            # Warps that look at the same record have all read what it was.
            tl.debug_barrier()
        tl.store(record, word0, mask=writable)
        tl.store(record + 1, lineage, mask=writable)
        tl.store(record + 2, word2, mask=writable)
        tl.store(record + 3, word3, mask=writable)
        written += tl.sum(writable.to(tl.int64), axis=0)
    if written > 0:
        tl.atomic_add(state.counters + (TAIL_SLOTS if IS_TAIL else HEAD_SLOTS), written)
    if ADVANCES:
        ends_here = (first_block < last_block) & (last_block == blocks)
        if ends_here | ((blocks == 0) & (split == 0)):
            _leave_lineage(
                state,
                rows,
                ends,
                row,
                live,
                start,
                extend,
                first_base,
                base,
                salt,
                is_inside,
            )
    if IS_TAIL:
        # All threads have read the clock, and written what they have to, before this
        # program says that it is done.
        tl.debug_barrier()
        programs = tl.num_programs(0) * splits
        if tl.atomic_add(state.ticket, 1) == programs - 1:
            tl.store(state.ticket, 0)
            tl.store(state.clock, now + 1)
            if ADVANCES:
                _end_forward(state, rows, ends, num_rows)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_tokens",
        "page_size",
        "max_depth",
        "kind",
        "manager",
        "tag",
    ]
)
def write_kernel(
    state,
    rows,
    columns,
    data,
    oracle,
    published,
    ends,
    num_rows,
    num_tokens,
    page_size,
    max_depth,
    kind,
    manager,
    tag,
    IS_TAIL: tl.constexpr,
    ADVANCES: tl.constexpr,
    HASHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    write_program(
        tl.program_id(0).to(tl.int64),
        tl.program_id(1),
        tl.num_programs(1),
        state,
        rows,
        columns,
        data,
        oracle,
        published,
        ends,
        num_rows,
        num_tokens,
        page_size,
        max_depth,
        kind,
        manager,
        tag,
        IS_TAIL,
        ADVANCES,
        HASHING,
        BLOCK,
        True,
    )
