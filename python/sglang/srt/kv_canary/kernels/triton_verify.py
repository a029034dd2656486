"""Triton kernel of the canary's read check; `launches.verify` describes it.

A program takes every `splits`-th block of elements of one row. Records are loaded as
separate strided words: each word is needed as a vector of its own, and the words of a
record share one 32-byte sector, which the first load brings into L1.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.kv_canary.kernels.records import Counter, Phase, Reason
from sglang.srt.kv_canary.kernels.triton_common import (
    LOW_HALF,
    NONE,
    POISON,
    ROTATE,
    SALT_KEY,
    column_of,
    fingerprint_of,
    mix64,
    pack_word0,
    report,
    report_one,
    step_phase,
    term_of,
    told_to_all,
)

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
def _slot_of(
    entries,
    begin,
    element,
    mask,
    columns,
    column_stride,
    PAGED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ENTRY_SIZE: tl.constexpr,
):
    """Slots of elements; -1 beyond the table and outside of `mask`.

    `begin` is where the row starts in `entries`; with a page table `columns` counts its
    columns, else the entries behind `begin`.
    """
    if PAGED:
        column = element // PAGE_SIZE
        mask = mask & (column >= 0) & (column < columns)
        entry = tl.load(entries + begin + column * column_stride, mask=mask, other=-1)
        entry = entry.to(tl.int64)
        return tl.where(entry >= 0, entry + element % PAGE_SIZE, -1)
    else:
        column = element // ENTRY_SIZE
        mask = mask & (column >= -begin) & (column < columns)
        entry = tl.load(entries + begin + column, mask=mask, other=-1).to(tl.int64)
        return tl.where(entry >= 0, entry * ENTRY_SIZE + element % ENTRY_SIZE, -1)


@triton.jit
def _rotating(
    k_words,
    v_words,
    slot,
    due,
    k_layer_stride,
    k_slot_stride,
    v_layer_stride,
    v_slot_stride,
    LAYERS: tl.constexpr,
    K_WORDS: tl.constexpr,
    V_WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fingerprints of the few slots that are due, one after the other."""
    lane = tl.arange(0, BLOCK)
    pending = due.to(tl.int32)
    computed = tl.zeros([BLOCK], dtype=tl.int64)
    for _ in range(tl.sum(pending, axis=0)):
        chosen = tl.min(tl.where(pending != 0, lane, BLOCK), axis=0)
        one = tl.sum(tl.where(lane == chosen, slot, 0), axis=0)
        one = one + tl.zeros([1], dtype=tl.int64)
        value = fingerprint_of(
            k_words,
            v_words,
            one,
            one >= 0,
            one,
            k_layer_stride,
            k_slot_stride,
            v_layer_stride,
            v_slot_stride,
            ROTATE,
            LAYERS,
            K_WORDS,
            V_WORDS,
            CHUNK,
        )
        computed = tl.where(lane == chosen, tl.sum(value, axis=0), computed)
        pending = tl.where(lane == chosen, 0, pending)
    return computed


@triton.jit
def verify_program(
    row,
    split,
    splits,
    head,
    tail,
    expected_lineage,
    verdict,
    ring,
    ring_count,
    counters,
    clock,
    phase,
    req_rows,
    prefix_lens,
    extend_lens,
    qo_indptr,
    out_cache_loc,
    serials,
    salts,
    seeds,
    lineage_rows,
    shift_from,
    column_shift,
    read_lens,
    entries,
    row_index,
    indptr,
    first_position,
    prev_slots,
    k_words,
    v_words,
    req_to_token,
    tokens,
    num_rows,
    num_slots,
    num_tokens,
    capacity,
    table_rows,
    table_columns,
    table_row_stride,
    table_column_stride,
    columns_stride,
    columns_width,
    tokens_stride,
    tokens_width,
    token_offset,
    k_layer_stride,
    k_slot_stride,
    v_layer_stride,
    v_slot_stride,
    period,
    manager,
    tag,
    PAGED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ENTRY_SIZE: tl.constexpr,
    HAS_QO_INDPTR: tl.constexpr,
    HAS_SEEDS: tl.constexpr,
    HAS_SEED_TABLE: tl.constexpr,
    HAS_LINEAGE_ROWS: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_ROW_INDEX: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_PREV: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    SWEEP: tl.constexpr,
    MODE: tl.constexpr,
    LAYERS: tl.constexpr,
    K_WORDS: tl.constexpr,
    V_WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    NEXT_PHASE: tl.constexpr,
):
    """The `split`-th of `splits` programs of a row; the first of row 0 takes the phase
    from IDLE to NEXT_PHASE."""
    now = tl.load(clock)
    is_row = row < num_rows
    req = tl.load(req_rows + row, mask=is_row, other=0)
    live = req != 0
    length = tl.load(read_lens + row, mask=live, other=0)
    length = tl.maximum(length, 0)
    prefix = tl.load(prefix_lens + row, mask=live, other=0)
    first = prefix * 0
    if HAS_FIRST:
        first = tl.load(first_position + row, mask=live, other=0)
    start = row
    if HAS_QO_INDPTR:
        start = tl.load(qo_indptr + row, mask=live, other=0)
    extend = tl.load(extend_lens + row, mask=live, other=0)
    extend = tl.minimum(extend, num_tokens - start)
    serial = tl.load(serials + row, mask=live, other=0)
    salt = mix64(tl.load(salts + row, mask=live, other=0) ^ SALT_KEY)
    seed = prefix * 0
    if HAS_SEEDS:
        seed_row = row
        if HAS_SEED_TABLE:
            seed_row = req
        seed = tl.load(seeds + seed_row, mask=live, other=0)
    owner = req
    truth = prefix * 0
    if SWEEP:
        owner = req * 0
    else:
        lineage_row = req
        if HAS_LINEAGE_ROWS:
            lineage_row = tl.load(lineage_rows + row, mask=live, other=0)
        truth = tl.load(expected_lineage + lineage_row)
    begin = row
    columns = length * 0 + table_columns
    if PAGED:
        if HAS_ROW_INDEX:
            begin = tl.load(row_index + row, mask=live, other=-1)
        columns = tl.where((begin >= 0) & (begin < table_rows), columns, 0)
        begin = begin * table_row_stride
    else:
        begin = tl.load(indptr + row, mask=live, other=0).to(tl.int64)
        columns = columns - begin
    previous_of_first = prefix * 0 - 1
    if HAS_PREV:
        previous_of_first = tl.load(prev_slots + row, mask=live, other=-1)
    elif not SWEEP:
        column_before = column_of(first - 1, row, shift_from, column_shift, HAS_SHIFT)
        has_before = live & (column_before >= 0) & (column_before < columns_width)
        previous_of_first = tl.load(
            req_to_token + req * columns_stride + column_before,
            mask=has_before,
            other=-1,
        ).to(tl.int64)

    if split == 0:
        if row == 0:
            step_phase(
                phase,
                manager,
                ring,
                ring_count,
                capacity,
                verdict,
                now,
                tag,
                IDLE,
                NEXT_PHASE,
            )
            tl.atomic_add(counters + (SWEEPS if SWEEP else LAUNCHES), 1)
        end = first + length
        is_short = (end > prefix) & (end < prefix + extend)
        if live & (is_short | (end < prefix)):
            report_one(
                ring,
                ring_count,
                capacity,
                verdict + owner,
                READ_SET,
                owner,
                serial,
                end,
                pack_word0(end * 0 - 1, end),
                0,
                now,
                row,
                tag,
            )
        visited = tl.minimum(prefix, end) - first
        if visited > 0:
            tl.atomic_add(counters + (SWEPT if SWEEP else VERIFIED), visited)

    blocks = (length + BLOCK - 1) // BLOCK
    for block in range(split, blocks, splits):
        i = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        inside = i < length
        p = first + i
        is_prefix = inside & (p < prefix)
        slot = _slot_of(
            entries,
            begin,
            i,
            inside,
            columns,
            table_column_stride,
            PAGED,
            PAGE_SIZE,
            ENTRY_SIZE,
        )
        in_range = (slot >= 0) & (slot < num_slots)
        new = p - prefix
        is_new = inside & (new >= 0) & (new < extend)
        expected_slot = tl.load(out_cache_loc + start + new, mask=is_new, other=-1)
        compared = inside
        if SWEEP:
            compared = inside & (p >= prefix)
        else:
            at = column_of(p, row, shift_from, column_shift, HAS_SHIFT)
            has = is_prefix & (at >= 0) & (at < columns_width)
            at = req_to_token + req * columns_stride + at
            column = tl.load(at, mask=has, other=-1).to(tl.int64)
            expected_slot = tl.where(is_prefix, column, expected_slot)
        wrong = (inside & (in_range == 0)) | (compared & (slot != expected_slot))
        reasons = tl.where(wrong, READ_SET, 0).to(tl.int64)
        scratch = is_prefix & in_range & (slot < PAGE_SIZE)
        reasons |= tl.where(scratch, READ_SCRATCH, 0)

        reads = is_prefix & in_range & (slot >= PAGE_SIZE)
        record = tail + slot * 4
        word0 = tl.load(record, mask=reads, other=0)
        lineage = tl.load(record + 1, mask=reads, other=0)
        word2 = tl.load(record + 2, mask=reads, other=0)
        word3 = tl.load(record + 3, mask=reads, other=0)
        record = head + slot * 4
        head0 = tl.load(record, mask=reads, other=0)
        head1 = tl.load(record + 1, mask=reads, other=0)
        head3 = tl.load(record + 3, mask=reads, other=0)
        freed = (word0 == POISON) & (head0 == POISON)
        reasons |= tl.where(reads & freed, FREED, 0)
        differ = (word0 != head0) | (lineage != head1) | (word3 != head3)
        reasons |= tl.where(reads & differ & (freed == 0), TORN, 0)
        sound = reads & (word0 != POISON) & (head0 != POISON)
        reasons |= tl.where(sound & ((word0 >> 32) != p), POSITION, 0)

        previous = _slot_of(
            entries,
            begin,
            i - 1,
            sound & (i > 0),
            columns,
            table_column_stride,
            PAGED,
            PAGE_SIZE,
            ENTRY_SIZE,
        )
        previous = tl.where(i == 0, previous_of_first, previous)
        known = sound & (p > 0) & (previous >= PAGE_SIZE) & (previous < num_slots)
        before0 = tl.load(tail + previous * 4, mask=known, other=POISON)
        before1 = tl.load(tail + previous * 4 + 1, mask=known, other=0)
        parent = tl.where(p == 0, seed, before1)
        known = sound & ((p == 0) | (before0 != POISON))
        expected = tl.where(known, parent + term_of(word0, salt), 0)
        reasons |= tl.where(known & (expected != lineage), LINEAGE, 0)
        if not SWEEP:
            last = sound & (p == prefix - 1)
            expected = tl.where(last, truth, expected)
            reasons |= tl.where(last & (expected != lineage), TOKEN, 0)
        expected_word0 = pack_word0(tl.zeros_like(p) - 1, p)
        if HAS_TOKENS:
            at = p + token_offset
            has = sound & (at >= 0) & (at < tokens_width)
            at = tokens + req * tokens_stride + at
            token = tl.load(at, mask=has, other=-1).to(tl.int64)
            packed = pack_word0(token, p)
            expected_word0 = tl.where(token >= 0, packed, expected_word0)
            wrong = (token >= 0) & (token != (word0 & LOW_HALF))
            reasons |= tl.where(wrong, TOKEN, 0)
        computed = tl.zeros_like(slot)
        if MODE != NONE:
            due = sound
            if MODE == ROTATE:
                due = sound & ((slot + now) % period == 0)
                computed = _rotating(
                    k_words,
                    v_words,
                    slot,
                    due,
                    k_layer_stride,
                    k_slot_stride,
                    v_layer_stride,
                    v_slot_stride,
                    LAYERS,
                    K_WORDS,
                    V_WORDS,
                    CHUNK,
                    BLOCK,
                )
            else:
                computed = fingerprint_of(
                    k_words,
                    v_words,
                    slot,
                    due,
                    lineage,
                    k_layer_stride,
                    k_slot_stride,
                    v_layer_stride,
                    v_slot_stride,
                    MODE,
                    LAYERS,
                    K_WORDS,
                    V_WORDS,
                    CHUNK,
                )
            reasons |= tl.where(due & (computed != word2), REAL_KV, 0)
            if MODE >= ROTATE:
                rehashed = tl.sum(due.to(tl.int64), axis=0)
                tl.atomic_add(counters + REHASHED, rehashed, mask=rehashed > 0)
        report(
            ring,
            ring_count,
            capacity,
            verdict + owner,
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
        "num_slots",
        "num_tokens",
        "capacity",
        "table_rows",
        "table_columns",
        "columns_width",
        "tokens_width",
        "token_offset",
        "period",
        "manager",
        "tag",
    ]
)
def verify_kernel(
    head,
    tail,
    expected_lineage,
    verdict,
    ring,
    ring_count,
    counters,
    clock,
    phase,
    req_rows,
    prefix_lens,
    extend_lens,
    qo_indptr,
    out_cache_loc,
    serials,
    salts,
    seeds,
    lineage_rows,
    shift_from,
    column_shift,
    read_lens,
    entries,
    row_index,
    indptr,
    first_position,
    prev_slots,
    k_words,
    v_words,
    req_to_token,
    tokens,
    num_rows,
    num_slots,
    num_tokens,
    capacity,
    table_rows,
    table_columns,
    table_row_stride,
    table_column_stride,
    columns_stride,
    columns_width,
    tokens_stride,
    tokens_width,
    token_offset,
    k_layer_stride,
    k_slot_stride,
    v_layer_stride,
    v_slot_stride,
    period,
    manager,
    tag,
    PAGED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ENTRY_SIZE: tl.constexpr,
    HAS_QO_INDPTR: tl.constexpr,
    HAS_SEEDS: tl.constexpr,
    HAS_SEED_TABLE: tl.constexpr,
    HAS_LINEAGE_ROWS: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_ROW_INDEX: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_PREV: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    SWEEP: tl.constexpr,
    MODE: tl.constexpr,
    LAYERS: tl.constexpr,
    K_WORDS: tl.constexpr,
    V_WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    verify_program(
        tl.program_id(0).to(tl.int64),
        tl.program_id(1),
        tl.num_programs(1),
        head,
        tail,
        expected_lineage,
        verdict,
        ring,
        ring_count,
        counters,
        clock,
        phase,
        req_rows,
        prefix_lens,
        extend_lens,
        qo_indptr,
        out_cache_loc,
        serials,
        salts,
        seeds,
        lineage_rows,
        shift_from,
        column_shift,
        read_lens,
        entries,
        row_index,
        indptr,
        first_position,
        prev_slots,
        k_words,
        v_words,
        req_to_token,
        tokens,
        num_rows,
        num_slots,
        num_tokens,
        capacity,
        table_rows,
        table_columns,
        table_row_stride,
        table_column_stride,
        columns_stride,
        columns_width,
        tokens_stride,
        tokens_width,
        token_offset,
        k_layer_stride,
        k_slot_stride,
        v_layer_stride,
        v_slot_stride,
        period,
        manager,
        tag,
        PAGED,
        PAGE_SIZE,
        ENTRY_SIZE,
        HAS_QO_INDPTR,
        HAS_SEEDS,
        HAS_SEED_TABLE,
        HAS_LINEAGE_ROWS,
        HAS_SHIFT,
        HAS_ROW_INDEX,
        HAS_FIRST,
        HAS_PREV,
        HAS_TOKENS,
        SWEEP,
        MODE,
        LAYERS,
        K_WORDS,
        V_WORDS,
        CHUNK,
        BLOCK,
        AFTER_VERIFY,
    )
