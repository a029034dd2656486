"""Triton kernels of the canary's head and tail writes; see `launches.py`.

A program takes a run of blocks of one row's new tokens, and adds up the terms before
its run itself: an extend of any length is one launch.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.kv_canary.kernels.records import NUM_COUNTERS, Counter, Phase, Reason
from sglang.srt.kv_canary.kernels.triton_common import (
    CLOCK_MASK,
    CLOCK_SHIFT,
    NONE,
    POISON,
    SALT_KEY,
    SERIAL_MASK,
    column_of,
    fingerprint_of,
    mix64,
    pack_word0,
    pack_word3,
    report,
    step_phase,
    term_of,
    told_to_all,
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
SUM_BLOCK = tl.constexpr(512)
COUNTERS = tl.constexpr(NUM_COUNTERS)
COUNTERS_BLOCK = tl.constexpr(triton.next_power_of_2(NUM_COUNTERS))
ROWS_BLOCK = tl.constexpr(128)


@triton.jit
def _terms(input_ids, positions, token_index, mask, salt):
    token = tl.load(input_ids + token_index, mask=mask, other=0)
    position = tl.load(positions + token_index, mask=mask, other=0)
    word0 = pack_word0(token, position)
    return token, position, word0, tl.where(mask, term_of(word0, salt), 0)


@triton.jit
def sum_of_terms(input_ids, positions, begin, end, salt):
    """Sum of the lineage terms of tokens begin .. end - 1."""
    total = tl.zeros([SUM_BLOCK], dtype=tl.int64)
    for at in range(begin, end, SUM_BLOCK):
        index = at + tl.arange(0, SUM_BLOCK)
        _, _, _, term = _terms(input_ids, positions, index, index < end, salt)
        total += term
    return tl.sum(total, axis=0)


@triton.jit
def _sum_of_ancestors(
    input_ids, positions, parent_index, index, mask, begin, end, salt, max_depth
):
    """Sums of the terms of the ancestors of tokens [N] among begin .. end - 1."""
    node = tl.load(parent_index + index, mask=mask, other=-1)
    total = tl.zeros_like(index)
    for _ in range(max_depth):
        mask = mask & (node >= begin) & (node < end)
        _, _, _, term = _terms(input_ids, positions, node, mask, salt)
        total += term
        node = tl.load(parent_index + node, mask=mask, other=-1)
    return total


@triton.jit
def base_of(
    expected_lineage,
    lineage_rows,
    seeds,
    row,
    req,
    live,
    prefix,
    HAS_LINEAGE_ROWS: tl.constexpr,
    HAS_SEEDS: tl.constexpr,
    HAS_SEED_TABLE: tl.constexpr,
):
    """Lineage of what stands before the row's first new token."""
    lineage_row = req
    if HAS_LINEAGE_ROWS:
        lineage_row = tl.load(lineage_rows + row, mask=live, other=0)
    seed = prefix * 0
    if HAS_SEEDS:
        seed_row = row
        if HAS_SEED_TABLE:
            seed_row = req
        seed = tl.load(seeds + seed_row, mask=live, other=0)
    return tl.where(prefix > 0, tl.load(expected_lineage + lineage_row), seed)


@triton.jit
def take_status(ring_count, counters, findings):
    """The words of findings before the verdicts."""
    tl.store(findings, tl.load(ring_count, cache_modifier=".cg"))
    index = tl.arange(0, COUNTERS_BLOCK)
    is_counter = index < COUNTERS
    value = tl.load(counters + index, mask=is_counter, other=0, cache_modifier=".cg")
    tl.store(findings + 1 + index, value, mask=is_counter)


@triton.jit
def take_verdicts(verdict, findings, row, req, inside, live):
    """Verdicts of rows into findings; those of live ones are cleared."""
    found = tl.load(verdict + req, mask=live, other=0, cache_modifier=".cg")
    tl.store(findings + 1 + COUNTERS + row, found.to(tl.int64), mask=inside)
    # All warps have read what it was.
    tl.debug_barrier()
    tl.store(verdict + req, tl.zeros_like(found), mask=live)


@triton.jit
def _end_forward(
    expected_lineage,
    next_lineage,
    verdict,
    ring_count,
    counters,
    findings,
    req_rows,
    lineage_rows,
    publish_rows,
    num_rows,
    HAS_FINDINGS: tl.constexpr,
    HAS_LINEAGE_ROWS: tl.constexpr,
    HAS_PUBLISH_ROWS: tl.constexpr,
):
    """Lineages published, status, verdicts taken and cleared; by the last program, when
    all others are done. Loads go past L1, which does not see what others wrote."""
    if HAS_FINDINGS:
        take_status(ring_count, counters, findings)
    for begin in range(0, num_rows, ROWS_BLOCK):
        row = begin + tl.arange(0, ROWS_BLOCK)
        inside = row < num_rows
        req = tl.load(req_rows + row, mask=inside, other=0)
        live = req != 0
        published = req
        if HAS_PUBLISH_ROWS:
            published = tl.load(publish_rows + row, mask=live, other=0)
        elif HAS_LINEAGE_ROWS:
            published = tl.load(lineage_rows + row, mask=live, other=0)
        lineage = tl.load(next_lineage + row, mask=live, other=0, cache_modifier=".cg")
        tl.store(expected_lineage + published, lineage, mask=live)
        if HAS_FINDINGS:
            take_verdicts(verdict, findings, row, req, inside, live)


@triton.jit
def write_program(
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
    ticket,
    next_lineage,
    findings,
    req_rows,
    prefix_lens,
    extend_lens,
    input_ids,
    positions,
    out_cache_loc,
    serials,
    salts,
    qo_indptr,
    parent_index,
    seeds,
    lineage_rows,
    shift_from,
    column_shift,
    publish_rows,
    stay_lens,
    req_to_token,
    oracle_tokens,
    oracle_positions,
    k_words,
    v_words,
    num_rows,
    num_slots,
    num_tokens,
    capacity,
    columns_stride,
    columns_width,
    k_layer_stride,
    k_slot_stride,
    v_layer_stride,
    v_slot_stride,
    page_size,
    max_depth,
    kind,
    manager,
    tag,
    IS_TAIL: tl.constexpr,
    ADVANCES: tl.constexpr,
    HAS_FINDINGS: tl.constexpr,
    HAS_QO_INDPTR: tl.constexpr,
    IS_TREE: tl.constexpr,
    HAS_SEEDS: tl.constexpr,
    HAS_SEED_TABLE: tl.constexpr,
    HAS_LINEAGE_ROWS: tl.constexpr,
    HAS_PUBLISH_ROWS: tl.constexpr,
    HAS_STAY_LENS: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    HAS_ORACLE: tl.constexpr,
    MODE: tl.constexpr,
    LAYERS: tl.constexpr,
    K_WORDS: tl.constexpr,
    V_WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS_PHASE: tl.constexpr,
):
    """The `split`-th of `splits` programs of a row. Without STEPS_PHASE the launch it
    is a part of takes care of the phase."""
    now = tl.load(clock)
    if (row == 0) & (split == 0):
        if STEPS_PHASE:
            step_phase(
                phase,
                manager,
                ring,
                ring_count,
                capacity,
                verdict,
                now,
                tag,
                AFTER_HEAD if IS_TAIL else AFTER_VERIFY,
                IDLE if IS_TAIL else AFTER_HEAD,
            )
        tl.atomic_add(counters + (TAIL_LAUNCHES if IS_TAIL else HEAD_LAUNCHES), 1)
    req = tl.load(req_rows + row, mask=row < num_rows, other=0)
    live = req != 0
    prefix = tl.load(prefix_lens + row, mask=live, other=0)
    start = row
    if HAS_QO_INDPTR:
        start = tl.load(qo_indptr + row, mask=live, other=0)
    extend = tl.load(extend_lens + row, mask=live, other=0)
    extend = tl.maximum(tl.minimum(extend, num_tokens - start), 0)
    end = start + extend
    serial = tl.load(serials + row, mask=live, other=0)
    salt = mix64(tl.load(salts + row, mask=live, other=0) ^ SALT_KEY)
    base = base_of(
        expected_lineage,
        lineage_rows,
        seeds,
        row,
        req,
        live,
        prefix,
        HAS_LINEAGE_ROWS,
        HAS_SEEDS,
        HAS_SEED_TABLE,
    )
    first_base = base
    count = extend
    if not (IS_TAIL or HAS_QO_INDPTR):
        # A padded row is looked at, too: all it may write is scratch.
        count = tl.where(live | (row >= num_rows), extend, 1)
    blocks = (count + BLOCK - 1) // BLOCK
    run = (blocks + splits - 1) // splits
    first_block = tl.minimum(split * run, blocks)
    last_block = tl.minimum(first_block + run, blocks)
    if HAS_QO_INDPTR and not IS_TREE:
        before = tl.where(first_block < last_block, first_block * BLOCK, 0)
        base += sum_of_terms(input_ids, positions, start, start + before, salt)
    written = prefix * 0
    for block in range(first_block, last_block):
        j = block * BLOCK + tl.arange(0, BLOCK)
        inside = j < count
        t = start + j
        token, position, word0, term = _terms(input_ids, positions, t, inside, salt)
        if IS_TREE:
            ancestors = _sum_of_ancestors(
                input_ids,
                positions,
                parent_index,
                t,
                inside,
                start,
                end,
                salt,
                max_depth,
            )
            lineage = base + term + ancestors
        else:
            lineage = base + tl.cumsum(term, axis=0)
            base += tl.sum(term, axis=0)
        slot = tl.load(out_cache_loc + t, mask=inside, other=-1)
        writable = inside & live & (slot >= page_size) & (slot < num_slots)
        record = head + slot * 4
        old0 = tl.load(record, mask=writable, other=0)
        old1 = tl.load(record + 1, mask=writable, other=0)
        old3 = tl.load(record + 3, mask=writable, other=0)
        word3 = tl.zeros_like(t) + pack_word3(now, kind, serial)
        found0 = old0
        expected0 = word0
        expected_slot = tl.zeros_like(t) - 1
        if IS_TAIL:
            is_alias = writable & ((old0 != word0) | (old3 != word3))
            reasons = tl.where(is_alias, ALIAS, 0).to(tl.int64)
        else:
            scratch = inside & (slot >= 0) & (slot < page_size)
            reasons = tl.where(scratch & live, SCRATCH, 0).to(tl.int64)
            # A record of this very forward is an alias, which the tail write reports.
            other = ((old3 >> CLOCK_SHIFT) & CLOCK_MASK) != (now & CLOCK_MASK)
            other = other & (((old3 ^ serial) & SERIAL_MASK) != 0)
            foreign = inside & (scratch == 0) & (writable == 0)
            foreign = foreign | (writable & (old0 != POISON) & other)
            if HAS_COLUMNS and not IS_TREE:
                at = column_of(prefix + j, row, shift_from, column_shift, HAS_SHIFT)
                has = inside & live & (at >= 0) & (at < columns_width)
                at = req_to_token + req * columns_stride + at
                expected_slot = tl.load(at, mask=has, other=-1).to(tl.int64)
                moved = inside & (scratch == 0) & (slot != expected_slot)
                foreign = foreign | moved
            reasons |= tl.where(foreign, FOREIGN, 0)
            if HAS_ORACLE:
                token_due = tl.load(oracle_tokens + t, mask=inside & live, other=-1)
                wrong = (token_due >= 0) & (token_due != token)
                reasons |= tl.where(wrong, TOKEN, 0)
                at = oracle_positions + t
                position_due = tl.load(at, mask=inside & live, other=-1)
                misplaced = (position_due >= 0) & (position_due != position)
                reasons |= tl.where(misplaced, POSITION, 0)
                due0 = pack_word0(token_due, position_due)
                expected0 = tl.where(live, due0, expected0)
                found0 = tl.where(wrong | misplaced, word0, found0)
            reasons = told_to_all(reasons)
        nothing = tl.zeros_like(t)
        report(
            ring,
            ring_count,
            capacity,
            verdict + req,
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
        if IS_TAIL:
            record = tail + slot * 4
        word2 = nothing
        if IS_TAIL and MODE != NONE:
            word2 = fingerprint_of(
                k_words,
                v_words,
                slot,
                writable,
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
        if not IS_TAIL:
            # Warps that look at the same record have all read what it was.
            tl.debug_barrier()
        tl.store(record, word0, mask=writable)
        tl.store(record + 1, lineage, mask=writable)
        tl.store(record + 2, word2, mask=writable)
        tl.store(record + 3, word3, mask=writable)
        written += tl.sum(writable.to(tl.int64), axis=0)
    if written > 0:
        tl.atomic_add(counters + (TAIL_SLOTS if IS_TAIL else HEAD_SLOTS), written)
    if ADVANCES:
        # Others of this row still start from the old lineage: the last program of all
        # publishes the new one.
        ends_here = (first_block < last_block) & (last_block == blocks)
        if ends_here | ((blocks == 0) & (split == 0)):
            if HAS_STAY_LENS:
                stay = tl.load(stay_lens + row, mask=live, other=0)
                stay_end = start + tl.minimum(stay, extend)
                base = first_base + sum_of_terms(
                    input_ids, positions, start, stay_end, salt
                )
            tl.store(next_lineage + row, base, mask=row < num_rows)
    if IS_TAIL:
        # All threads have read the clock, and written what they have to, before this
        # program says that it is done.
        tl.debug_barrier()
        programs = tl.num_programs(0) * splits
        if tl.atomic_add(ticket, 1) == programs - 1:
            tl.store(ticket, 0)
            tl.store(clock, now + 1)
            if ADVANCES:
                _end_forward(
                    expected_lineage,
                    next_lineage,
                    verdict,
                    ring_count,
                    counters,
                    findings,
                    req_rows,
                    lineage_rows,
                    publish_rows,
                    num_rows,
                    HAS_FINDINGS,
                    HAS_LINEAGE_ROWS,
                    HAS_PUBLISH_ROWS,
                )


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_slots",
        "num_tokens",
        "capacity",
        "columns_width",
        "page_size",
        "max_depth",
        "kind",
        "manager",
        "tag",
    ]
)
def write_kernel(
    head,
    tail,
    expected_lineage,
    verdict,
    ring,
    ring_count,
    counters,
    clock,
    phase,
    ticket,
    next_lineage,
    findings,
    req_rows,
    prefix_lens,
    extend_lens,
    input_ids,
    positions,
    out_cache_loc,
    serials,
    salts,
    qo_indptr,
    parent_index,
    seeds,
    lineage_rows,
    shift_from,
    column_shift,
    publish_rows,
    stay_lens,
    req_to_token,
    oracle_tokens,
    oracle_positions,
    k_words,
    v_words,
    num_rows,
    num_slots,
    num_tokens,
    capacity,
    columns_stride,
    columns_width,
    k_layer_stride,
    k_slot_stride,
    v_layer_stride,
    v_slot_stride,
    page_size,
    max_depth,
    kind,
    manager,
    tag,
    IS_TAIL: tl.constexpr,
    ADVANCES: tl.constexpr,
    HAS_FINDINGS: tl.constexpr,
    HAS_QO_INDPTR: tl.constexpr,
    IS_TREE: tl.constexpr,
    HAS_SEEDS: tl.constexpr,
    HAS_SEED_TABLE: tl.constexpr,
    HAS_LINEAGE_ROWS: tl.constexpr,
    HAS_PUBLISH_ROWS: tl.constexpr,
    HAS_STAY_LENS: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    HAS_ORACLE: tl.constexpr,
    MODE: tl.constexpr,
    LAYERS: tl.constexpr,
    K_WORDS: tl.constexpr,
    V_WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    write_program(
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
        ticket,
        next_lineage,
        findings,
        req_rows,
        prefix_lens,
        extend_lens,
        input_ids,
        positions,
        out_cache_loc,
        serials,
        salts,
        qo_indptr,
        parent_index,
        seeds,
        lineage_rows,
        shift_from,
        column_shift,
        publish_rows,
        stay_lens,
        req_to_token,
        oracle_tokens,
        oracle_positions,
        k_words,
        v_words,
        num_rows,
        num_slots,
        num_tokens,
        capacity,
        columns_stride,
        columns_width,
        k_layer_stride,
        k_slot_stride,
        v_layer_stride,
        v_slot_stride,
        page_size,
        max_depth,
        kind,
        manager,
        tag,
        IS_TAIL,
        ADVANCES,
        HAS_FINDINGS,
        HAS_QO_INDPTR,
        IS_TREE,
        HAS_SEEDS,
        HAS_SEED_TABLE,
        HAS_LINEAGE_ROWS,
        HAS_PUBLISH_ROWS,
        HAS_STAY_LENS,
        HAS_SHIFT,
        HAS_COLUMNS,
        HAS_ORACLE,
        MODE,
        LAYERS,
        K_WORDS,
        V_WORDS,
        CHUNK,
        BLOCK,
        True,
    )
