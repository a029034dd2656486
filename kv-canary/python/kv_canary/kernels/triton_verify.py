"""Triton kernel of the canary's read check; `launches.verify` describes it.

A program takes every `splits`-th block of elements of one row. Records are loaded as
separate strided words: each word is needed as a vector of its own, and the words of a
record share one 32-byte sector, which the first load brings into L1. The parameters
`state`, `rows`, `columns`, `reads`, `tokens`, `data` and HASHING are the tuples of
`triton_args.py`; without `columns` it is a sweep.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary.kernels.triton_common import (
    LOW_HALF,
    NONE,
    POISON,
    ROTATE,
    column_of,
    fingerprint_of,
    in_table,
    lineage_row_of,
    pack_word0,
    report,
    report_one,
    salt_of,
    seed_of,
    start_of,
    step_phase,
    term_of,
    told_to_all,
)
from kv_canary.records import Counter, Phase, Reason

LINEAGE = tl.constexpr(int(Reason.VERIFY_LINEAGE))
POSITION = tl.constexpr(int(Reason.VERIFY_POSITION))
TOKEN = tl.constexpr(int(Reason.VERIFY_TOKEN))
REAL_KV = tl.constexpr(int(Reason.VERIFY_REAL_KV))
TORN = tl.constexpr(int(Reason.VERIFY_TORN))
FREED = tl.constexpr(int(Reason.VERIFY_FREED))
READ_SET = tl.constexpr(int(Reason.READ_SET))
READ_SCRATCH = tl.constexpr(int(Reason.READ_SCRATCH))
IDLE = tl.constexpr(int(Phase.IDLE))
AFTER_VERIFY = tl.constexpr(int(Phase.AFTER_VERIFY))
VERIFIED = tl.constexpr(int(Counter.VERIFIED_SLOTS))
SWEPT = tl.constexpr(int(Counter.SWEPT_SLOTS))
REHASHED = tl.constexpr(int(Counter.REHASHED_SLOTS))
LAUNCHES = tl.constexpr(int(Counter.VERIFY_LAUNCHES))
SWEEPS = tl.constexpr(int(Counter.SWEEP_LAUNCHES))


@triton.jit
def _entries_of(reads, row, live, table_rows, table_columns):
    """(where the row starts in the entries, entries from there on); in a page table the
    second are its columns."""
    if reads.indptr is None:
        begin = row
        if reads.row_index is not None:
            begin = tl.load(reads.row_index + row, mask=live, other=-1)
        is_inside = (begin >= 0) & (begin < table_rows)
        count = tl.where(is_inside, table_columns, 0).to(tl.int64)
        begin = begin * reads.row_stride
    else:
        begin = tl.load(reads.indptr + row, mask=live, other=0).to(tl.int64)
        count = table_columns - begin
    return begin, count


@triton.jit
def _slot_of(
    reads,
    begin,
    count,
    element,
    mask,
    PAGE_SIZE: tl.constexpr,
    ENTRY_SIZE: tl.constexpr,
):
    """Slots of elements; -1 beyond the entries (`_entries_of`) and outside `mask`."""
    if reads.indptr is None:
        column = element // PAGE_SIZE
        mask = mask & (column >= 0) & (column < count)
        at = reads.entries + begin + column * reads.column_stride
        entry = tl.load(at, mask=mask, other=-1).to(tl.int64)
        return tl.where(entry >= 0, entry + element % PAGE_SIZE, -1)
    else:
        column = element // ENTRY_SIZE
        mask = mask & (column >= -begin) & (column < count)
        at = reads.entries + begin + column
        entry = tl.load(at, mask=mask, other=-1).to(tl.int64)
        return tl.where(entry >= 0, entry * ENTRY_SIZE + element % ENTRY_SIZE, -1)


@triton.jit
def _slot_before(reads, rows, columns, row, req, live, first):
    """The slot of the token before element 0; -1: none."""
    slot = first * 0 - 1
    if reads.prev_slots is not None:
        slot = tl.load(reads.prev_slots + row, mask=live, other=-1)
    elif columns is not None:
        slot = in_table(columns, column_of(rows, first - 1, row), req, live)
    return slot


@triton.jit
def _rotating(data, slot, due, HASHING: tl.constexpr, BLOCK: tl.constexpr):
    """Fingerprints of the few slots that are due, one after the other."""
    lane = tl.arange(0, BLOCK)
    pending = due.to(tl.int32)
    computed = tl.zeros([BLOCK], dtype=tl.int64)
    for _ in range(tl.sum(pending, axis=0)):
        chosen = tl.min(tl.where(pending != 0, lane, BLOCK), axis=0)
        one = tl.sum(tl.where(lane == chosen, slot, 0), axis=0)
        one = one + tl.zeros([1], dtype=tl.int64)
        value = fingerprint_of(data, one, one >= 0, one, HASHING)
        computed = tl.where(lane == chosen, tl.sum(value, axis=0), computed)
        pending = tl.where(lane == chosen, 0, pending)
    return computed


@triton.jit
def _check_bytes(
    state,
    data,
    slot,
    sound,
    lineage,
    stored,
    prefix,
    max_advance,
    HASHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(reasons, computed fingerprints) of sound records that hold `stored` ones."""
    due = sound
    if HASHING.mode == ROTATE:
        # Each slot has its turn while the row grows by a period, whatever its steps.
        since = (slot + prefix) % data.period
        due = sound & ((data.period - since) % data.period < max_advance)
        computed = _rotating(data, slot, due, HASHING, BLOCK)
    else:
        computed = fingerprint_of(data, slot, due, lineage, HASHING)
    if HASHING.mode >= ROTATE:
        rehashed = tl.sum(due.to(tl.int64), axis=0)
        tl.atomic_add(state.counters + REHASHED, rehashed, mask=rehashed > 0)
    return tl.where(due & (computed != stored), REAL_KV, 0), computed


@triton.jit
def verify_program(
    row,
    split,
    splits,
    state,
    rows,
    columns,
    reads,
    tokens,
    data,
    num_rows,
    num_tokens,
    table_rows,
    table_columns,
    max_depth,
    manager,
    tag,
    PAGE_SIZE: tl.constexpr,
    ENTRY_SIZE: tl.constexpr,
    HASHING: tl.constexpr,
    BLOCK: tl.constexpr,
    NEXT_PHASE: tl.constexpr,
):
    """The `split`-th of `splits` programs of a row; the first of row 0 takes the phase
    from IDLE to NEXT_PHASE."""
    SWEEP: tl.constexpr = columns is None
    now = tl.load(state.clock)
    req = tl.load(rows.req_rows + row, mask=row < num_rows, other=0)
    live = req != 0
    length = tl.maximum(tl.load(reads.read_lens + row, mask=live, other=0), 0)
    prefix = tl.load(rows.prefix_lens + row, mask=live, other=0)
    first = prefix * 0
    if reads.first_position is not None:
        first = tl.load(reads.first_position + row, mask=live, other=0)
    start = start_of(rows, row, live)
    extend = tl.load(rows.extend_lens + row, mask=live, other=0)
    extend = tl.minimum(extend, num_tokens - start)
    max_advance = extend
    if rows.parent_index is not None:
        max_advance = tl.minimum(extend, max_depth + 1)
    serial = tl.load(rows.serials + row, mask=live, other=0)
    salt = salt_of(rows, row, live)
    seed = seed_of(rows, row, req, live)
    owner = req
    truth = prefix * 0
    if SWEEP:
        owner = req * 0
    else:
        truth = tl.load(state.expected_lineage + lineage_row_of(rows, row, req, live))
    begin, count = _entries_of(reads, row, live, table_rows, table_columns)
    slot_before = _slot_before(reads, rows, columns, row, req, live, first)

    if split == 0:
        if row == 0:
            step_phase(state, manager, now, tag, IDLE, NEXT_PHASE)
            tl.atomic_add(state.counters + (SWEEPS if SWEEP else LAUNCHES), 1)
        end = first + length
        is_short = (end > prefix) & (end < prefix + extend)
        if live & (is_short | (end < prefix)):
            nowhere = pack_word0(end * 0 - 1, end)
            report_one(state, READ_SET, owner, serial, end, nowhere, 0, now, row, tag)
        visited = tl.minimum(prefix, end) - first
        if visited > 0:
            tl.atomic_add(state.counters + (SWEPT if SWEEP else VERIFIED), visited)

    for block in range(split, (length + BLOCK - 1) // BLOCK, splits):
        i = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        inside = i < length
        p = first + i
        is_prefix = inside & (p < prefix)
        slot = _slot_of(reads, begin, count, i, inside, PAGE_SIZE, ENTRY_SIZE)
        in_range = (slot >= 0) & (slot < state.num_slots)
        new = p - prefix
        is_new = inside & (new >= 0) & (new < extend)
        at = rows.out_cache_loc + start + new
        expected_slot = tl.load(at, mask=is_new, other=-1)
        compared = inside
        if SWEEP:
            compared = inside & (p >= prefix)
        else:
            column = in_table(columns, column_of(rows, p, row), req, is_prefix)
            expected_slot = tl.where(is_prefix, column, expected_slot)
        wrong = (inside & (in_range == 0)) | (compared & (slot != expected_slot))
        reasons = tl.where(wrong, READ_SET, 0).to(tl.int64)
        scratch = is_prefix & in_range & (slot < PAGE_SIZE)
        reasons |= tl.where(scratch, READ_SCRATCH, 0)

        found = is_prefix & in_range & (slot >= PAGE_SIZE)
        record = state.tail + slot * 4
        word0 = tl.load(record, mask=found, other=0)
        lineage = tl.load(record + 1, mask=found, other=0)
        word2 = tl.load(record + 2, mask=found, other=0)
        word3 = tl.load(record + 3, mask=found, other=0)
        record = state.head + slot * 4
        head0 = tl.load(record, mask=found, other=0)
        head1 = tl.load(record + 1, mask=found, other=0)
        head3 = tl.load(record + 3, mask=found, other=0)
        freed = (word0 == POISON) & (head0 == POISON)
        reasons |= tl.where(found & freed, FREED, 0)
        differ = (word0 != head0) | (lineage != head1) | (word3 != head3)
        reasons |= tl.where(found & differ & (freed == 0), TORN, 0)
        sound = found & (word0 != POISON) & (head0 != POISON)
        reasons |= tl.where(sound & ((word0 >> 32) != p), POSITION, 0)

        previous = _slot_of(
            reads, begin, count, i - 1, sound & (i > 0), PAGE_SIZE, ENTRY_SIZE
        )
        previous = tl.where(i == 0, slot_before, previous)
        known = sound & (p > 0)
        known = known & (previous >= PAGE_SIZE) & (previous < state.num_slots)
        record = state.tail + previous * 4
        before0 = tl.load(record, mask=known, other=POISON)
        before1 = tl.load(record + 1, mask=known, other=0)
        parent = tl.where(p == 0, seed, before1)
        known = sound & ((p == 0) | (before0 != POISON))
        expected = tl.where(known, parent + term_of(word0, salt), 0)
        reasons |= tl.where(known & (expected != lineage), LINEAGE, 0)
        if not SWEEP:
            last = sound & (p == prefix - 1)
            expected = tl.where(last, truth, expected)
            reasons |= tl.where(last & (expected != lineage), TOKEN, 0)
        expected_word0 = pack_word0(tl.zeros_like(p) - 1, p)
        if tokens is not None:
            token = in_table(tokens, p + tokens.offset, req, sound)
            packed = pack_word0(token, p)
            expected_word0 = tl.where(token >= 0, packed, expected_word0)
            wrong = (token >= 0) & (token != (word0 & LOW_HALF))
            reasons |= tl.where(wrong, TOKEN, 0)
        computed = tl.zeros_like(slot)
        if HASHING.mode != NONE:
            changed, computed = _check_bytes(
                state,
                data,
                slot,
                sound,
                lineage,
                word2,
                prefix,
                max_advance,
                HASHING,
                BLOCK,
            )
            reasons |= changed
        report(
            state,
            told_to_all(reasons),
            owner,
            serial,
            slot,
            p,
            expected_word0,
            word0,
            expected,
            lineage,
            word3,
            now,
            row,
            expected_slot,
            word2,
            computed,
            tag,
        )


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_tokens",
        "table_rows",
        "table_columns",
        "max_depth",
        "manager",
        "tag",
    ]
)
def verify_kernel(
    state,
    rows,
    columns,
    reads,
    tokens,
    data,
    num_rows,
    num_tokens,
    table_rows,
    table_columns,
    max_depth,
    manager,
    tag,
    PAGE_SIZE: tl.constexpr,
    ENTRY_SIZE: tl.constexpr,
    HASHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    verify_program(
        tl.program_id(0).to(tl.int64),
        tl.program_id(1),
        tl.num_programs(1),
        state,
        rows,
        columns,
        reads,
        tokens,
        data,
        num_rows,
        num_tokens,
        table_rows,
        table_columns,
        max_depth,
        manager,
        tag,
        PAGE_SIZE,
        ENTRY_SIZE,
        HASHING,
        BLOCK,
        AFTER_VERIFY,
    )
