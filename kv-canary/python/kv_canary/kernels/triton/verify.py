"""Triton kernel of the canary's read check; `launches.verify` describes it.

A program takes every `splits`-th block of elements of one row. Records are loaded as
separate strided words: each word is needed as its own vector, and the words of a record
share one 32-byte sector, which the first load brings into L1. The parameters `state`,
`rows`, `checks`, `reads`, `data`, PAGES and HASHING are the tuples from `args.py`;
without `checks.columns` the launch is a sweep.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from kv_canary.checks import Reason
from kv_canary.kernels.triton.args import (
    byte_args,
    check_args,
    hashing_args,
    page_args,
    read_args,
    row_args,
    state_args,
)
from kv_canary.kernels.triton.grid import HASH_SLOTS, cdiv, splits_for, verify_block
from kv_canary.kernels.triton.hash import (
    CLOCK_MASK,
    CLOCK_SHIFT,
    LOW_HALF,
    NONE,
    POISON,
    ROTATE,
    fingerprint,
    lineage_term,
    pack_word0,
)
from kv_canary.kernels.triton.report import (
    ReportSite,
    RingFinding,
    agree_across_warps,
    report,
    report_one,
    step_phase,
)
from kv_canary.kernels.triton.rows import (
    Batch,
    Program,
    load_columns,
    load_lineage_row,
    load_salt,
    load_seed,
    load_start,
    shift_columns,
)
from kv_canary.kernels.triton.sums import whole_sums
from kv_canary.layout import NO_FINGERPRINT
from kv_canary.records import Counter, Launch, Phase, ring_tag
from kv_canary.view import NO_MANAGER

if TYPE_CHECKING:
    from kv_canary.pool_checks import PoolChecks
    from kv_canary.state import CanaryState
    from kv_canary.view import ForwardView, KVReadView

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
# Greater than any position.
NOWHERE = tl.constexpr((1 << 63) - 1)


class _Reader(NamedTuple):
    """A batch row that reads.

    Fields:
        row: number in the batch. req: row of the request table. live: false if padded.
        owner: the request row that findings name, 0 in a sweep.
        prefix: tokens before this forward. start, extend: its new tokens in [T].
        max_advance: most tokens by which the prefix can grow.
        first: position of element 0. length: number of elements.
        begin, limit: first entry, and number of entries from there; the limit of a page
            table is its columns.
        salt: in the form that `lineage_term` takes. seed: lineage before position 0.
            last: lineage of the last prefix token.
        slot_before: slot of the token before element 0, or -1.
    """

    row: Any
    req: Any
    live: Any
    owner: Any
    serial: Any
    prefix: Any
    start: Any
    extend: Any
    max_advance: Any
    first: Any
    length: Any
    begin: Any
    limit: Any
    salt: Any
    seed: Any
    last: Any
    slot_before: Any


class _Elements(NamedTuple):
    """Elements [N] of a row's read view.

    Fields:
        number: number in the view.
        expected_slot: the due slot, or -1 if unknown.
        in_prefix: whether the token is in the prefix. in_range: whether the slot is in
            the pool.
    """

    number: Any
    position: Any
    slot: Any
    expected_slot: Any
    in_prefix: Any
    in_range: Any


class _Record(NamedTuple):
    """Tail records [N]; a record is `sound` if both halves are there."""

    word0: Any
    lineage: Any
    word2: Any
    word3: Any
    sound: Any


@triton.jit
def _find_entries(reads, row, live, table_rows, table_columns):
    """Return begin and limit of the row's entries, as in `_Reader`."""
    if reads.indptr is None:
        begin = row
        if reads.row_index is not None:
            begin = tl.load(reads.row_index + row, mask=live, other=-1)
        is_inside = (begin >= 0) & (begin < table_rows)
        limit = tl.where(is_inside, table_columns, 0).to(tl.int64)
        begin = begin * reads.row_stride
    else:
        begin = tl.load(reads.indptr + row, mask=live, other=0).to(tl.int64)
        limit = table_columns - begin
    return begin, limit


@triton.jit
def _load_slots(reads, reader, element, mask, PAGES: tl.constexpr):
    """Load the slots of elements; -1 past the row's entries and outside `mask`."""
    if reads.indptr is None:
        column = element // PAGES.page_size
        mask = mask & (column >= 0) & (column < reader.limit)
        at = reads.entries + reader.begin + column * reads.column_stride
        entry = tl.load(at, mask=mask, other=-1).to(tl.int64)
        return tl.where(entry >= 0, entry + element % PAGES.page_size, -1)
    else:
        column = element // PAGES.entry_size
        mask = mask & (column >= -reader.begin) & (column < reader.limit)
        at = reads.entries + reader.begin + column
        entry = tl.load(at, mask=mask, other=-1).to(tl.int64)
        slot = entry * PAGES.entry_size + element % PAGES.entry_size
        return tl.where(entry >= 0, slot, -1)


@triton.jit
def _load_slot_before(reads, rows, columns, row, req, live, first):
    """Load the slot of the token before element 0, or -1."""
    slot = first * 0 - 1
    if reads.prev_slots is not None:
        slot = tl.load(reads.prev_slots + row, mask=live, other=-1)
    elif columns is not None:
        slot = load_columns(columns, shift_columns(rows, first - 1, row), req, live)
    return slot


@triton.jit
def _load_reader(state, rows, checks, reads, row, batch, table_rows, table_columns):
    """Load the `_Reader` of a row, which counts as padded past the end of the batch."""
    req = tl.load(rows.req_rows + row, mask=row < batch.num_rows, other=0)
    live = req != 0
    length = tl.maximum(tl.load(reads.read_lens + row, mask=live, other=0), 0)
    prefix = tl.load(rows.prefix_lens + row, mask=live, other=0)
    first = prefix * 0
    if reads.first_position is not None:
        first = tl.load(reads.first_position + row, mask=live, other=0)
    start = load_start(rows, row, live)
    extend = tl.load(rows.extend_lens + row, mask=live, other=0)
    extend = tl.minimum(extend, batch.num_tokens - start)
    max_advance = extend
    if rows.parent_index is not None:
        max_advance = tl.minimum(extend, batch.max_depth + 1)
    serial = tl.load(rows.serials + row, mask=live, other=0)
    salt = load_salt(rows, row, live)
    seed = load_seed(rows, row, req, live)
    owner = req
    last = prefix * 0
    if checks.columns is None:
        owner = req * 0
    else:
        lineage_row = load_lineage_row(rows, row, req, live)
        last = tl.load(state.expected_lineage + lineage_row)
    begin, limit = _find_entries(reads, row, live, table_rows, table_columns)
    slot_before = _load_slot_before(reads, rows, checks.columns, row, req, live, first)
    return _Reader(
        row=row,
        req=req,
        live=live,
        owner=owner,
        serial=serial,
        prefix=prefix,
        start=start,
        extend=extend,
        max_advance=max_advance,
        first=first,
        length=length,
        begin=begin,
        limit=limit,
        salt=salt,
        seed=seed,
        last=last,
        slot_before=slot_before,
    )


@triton.jit
def _check_length(state, site, reader, PAGES: tl.constexpr):
    """Report the first missing position of a row that ends before its prefix or its
    last new token, or begins too late."""
    end = reader.first + reader.length
    missing = end
    is_wrong = end < reader.prefix + reader.extend
    if not PAGES.takes_new:
        is_wrong = is_wrong & (end != reader.prefix)
    if PAGES.reach >= 0:
        due = tl.maximum(reader.prefix - PAGES.reach, 0)
        is_late = reader.first > due
        missing = tl.where(is_late, due, end)
        is_wrong = is_wrong | is_late
    if reader.live & is_wrong:
        _report_row(state, site, reader, missing)
    return tl.minimum(reader.prefix, end) - reader.first


@triton.jit
def _check_counting(state, rows, reads, site, reader, BLOCK: tl.constexpr):
    """Report the first due position of a row whose prefix or new tokens attention
    counts differently from the forward."""
    differs = reader.prefix * 0 + NOWHERE
    if reads.prefix_lens is not None:
        prefix = tl.load(reads.prefix_lens + reader.row, mask=reader.live, other=0)
        is_other = reader.first + prefix != reader.prefix
        differs = tl.where(is_other, reader.prefix, differs)
    if reads.positions is not None:
        for begin in range(0, reader.extend, BLOCK):
            j = begin + tl.arange(0, BLOCK)
            mask = j < reader.extend
            at = reader.start + j
            due = tl.load(rows.positions + at, mask=mask, other=0)
            position = tl.load(reads.positions + at, mask=mask, other=0)
            is_wrong = mask & (reader.first + position != due)
            first = tl.min(tl.where(is_wrong, due, NOWHERE), axis=0)
            differs = tl.minimum(differs, first)
    if reader.live & (differs != NOWHERE):
        _report_row(state, site, reader, differs)


@triton.jit
def _report_row(state, site, reader, position):
    """Report a READ_SET of a row at a position, with slot -1."""
    finding = RingFinding(
        reasons=READ_SET,
        req_row=reader.owner,
        serial=reader.serial,
        slot=-1,
        position=position,
        expected_word0=pack_word0(position * 0 - 1, position),
        found_word0=0,
        expected_lineage=None,
        found_lineage=None,
        found_word3=None,
        clock=site.clock,
        batch_row=reader.row,
        expected_slot=-1,
        found_fingerprint=None,
        computed_fingerprint=None,
        tag=site.tag,
    )
    report_one(state, finding)


@triton.jit
def _check_slots(
    state, rows, columns, reads, reader, block, PAGES: tl.constexpr, BLOCK: tl.constexpr
):
    """Return reasons and elements of a block: attention must read the due slots."""
    i = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = i < reader.length
    p = reader.first + i
    is_prefix = inside & (p < reader.prefix)
    slot = _load_slots(reads, reader, i, inside, PAGES)
    in_range = (slot >= 0) & (slot < state.num_slots)
    new = p - reader.prefix
    is_new = inside & (new >= 0) & (new < reader.extend)
    at = rows.out_cache_loc + reader.start + new
    expected_slot = tl.load(at, mask=is_new, other=-1)
    compared = inside
    if columns is None:
        compared = inside & (p >= reader.prefix)
    else:
        column = shift_columns(rows, p, reader.row)
        column = load_columns(columns, column, reader.req, is_prefix)
        expected_slot = tl.where(is_prefix, column, expected_slot)
    wrong = (inside & (in_range == 0)) | (compared & (slot != expected_slot))
    reasons = tl.where(wrong, READ_SET, 0).to(tl.int64)
    scratch = is_prefix & in_range & (slot < PAGES.page_size)
    reasons |= tl.where(scratch, READ_SCRATCH, 0)
    elements = _Elements(
        number=i,
        position=p,
        slot=slot,
        expected_slot=expected_slot,
        in_prefix=is_prefix,
        in_range=in_range,
    )
    return reasons, elements


@triton.jit
def _check_halves(state, elements, PAGES: tl.constexpr):
    """Return reasons and tail records: both halves must exist, match and have these
    positions."""
    slot = elements.slot
    found = elements.in_prefix & elements.in_range & (slot >= PAGES.page_size)
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
    reasons = tl.where(found & freed, FREED, 0)
    differ = (word0 != head0) | (lineage != head1) | (word3 != head3)
    reasons |= tl.where(found & differ & (freed == 0), TORN, 0)
    sound = found & (word0 != POISON) & (head0 != POISON)
    reasons |= tl.where(sound & ((word0 >> 32) != elements.position), POSITION, 0)
    tail = _Record(word0=word0, lineage=lineage, word2=word2, word3=word3, sound=sound)
    return reasons, tail


@triton.jit
def _check_lineages(
    state, reads, reader, elements, record, HAS_LAST: tl.constexpr, PAGES: tl.constexpr
):
    """Return reasons and expected lineages: each record continues the one before it,
    and with HAS_LAST the last prefix token has the known lineage."""
    i, p, sound = elements.number, elements.position, record.sound
    previous = _load_slots(reads, reader, i - 1, sound & (i > 0), PAGES)
    previous = tl.where(i == 0, reader.slot_before, previous)
    known = sound & (p > 0)
    known = known & (previous >= PAGES.page_size) & (previous < state.num_slots)
    before = state.tail + previous * 4
    before0 = tl.load(before, mask=known, other=POISON)
    before1 = tl.load(before + 1, mask=known, other=0)
    parent = tl.where(p == 0, reader.seed, before1)
    known = sound & ((p == 0) | (before0 != POISON))
    term = lineage_term(record.word0, reader.salt)
    expected = tl.where(known, parent + term, 0)
    reasons = tl.where(known & (expected != record.lineage), LINEAGE, 0)
    if HAS_LAST:
        is_last = sound & (p == reader.prefix - 1)
        expected = tl.where(is_last, reader.last, expected)
        reasons |= tl.where(is_last & (expected != record.lineage), TOKEN, 0)
    return reasons, expected


@triton.jit
def _check_tokens(tokens, reader, position, record):
    """Compare records with the request's tokens; return reasons and due words 0."""
    reasons = tl.zeros_like(position)
    expected_word0 = pack_word0(tl.zeros_like(position) - 1, position)
    if tokens is not None:
        token = load_columns(tokens, position + tokens.offset, reader.req, record.sound)
        packed = pack_word0(token, position)
        expected_word0 = tl.where(token >= 0, packed, expected_word0)
        wrong = (token >= 0) & (token != (record.word0 & LOW_HALF))
        reasons = tl.where(wrong, TOKEN, 0).to(tl.int64)
    return reasons, expected_word0


@triton.jit
def _fingerprint(data, slot, due, record, HASHING: tl.constexpr):
    """Return the fingerprints of slots now, and as they were recorded."""
    if HASHING.heads > 0:
        computed, kept = whole_sums(data, slot, due, HASHING)
    else:
        computed = fingerprint(data, slot, due, record.lineage, HASHING)
        kept = record.word2
    return computed, kept


@triton.jit
def _fingerprint_one_by_one(data, slot, due, record, HASHING: tl.constexpr):
    """Return `_fingerprint` of the few due slots, one after the other."""
    BLOCK: tl.constexpr = slot.shape[0]
    lane = tl.arange(0, BLOCK)
    pending = due.to(tl.int32)
    computed = tl.zeros([BLOCK], dtype=tl.int64)
    kept = record.word2
    for _ in range(tl.sum(pending, axis=0)):
        chosen = tl.min(tl.where(pending != 0, lane, BLOCK), axis=0)
        one = tl.sum(tl.where(lane == chosen, slot, 0), axis=0)
        one = one + tl.zeros([1], dtype=tl.int64)
        if HASHING.heads > 0:
            value, then = whole_sums(data, one, one >= 0, HASHING)
            kept = tl.where(lane == chosen, tl.sum(then, axis=0), kept)
        else:
            value = fingerprint(data, one, one >= 0, one, HASHING)
        computed = tl.where(lane == chosen, tl.sum(value, axis=0), computed)
        pending = tl.where(lane == chosen, 0, pending)
    return computed, kept


@triton.jit
def _check_bytes(state, data, reader, slot, record, clock, HASHING: tl.constexpr):
    """Compare the bytes of slots with their records; return reasons, fingerprints now
    and as they were recorded."""
    due = record.sound
    if HASHING.skips_new:
        written = (record.word3 >> CLOCK_SHIFT) & CLOCK_MASK
        due = due & (written != (clock & CLOCK_MASK))
    if HASHING.mode == ROTATE:
        # Each slot gets its turn while the row grows by a period, in steps of any size.
        since = (slot + reader.prefix) % data.period
        due = due & ((data.period - since) % data.period < reader.max_advance)
        computed, kept = _fingerprint_one_by_one(data, slot, due, record, HASHING)
    else:
        computed, kept = _fingerprint(data, slot, due, record, HASHING)
    if HASHING.mode >= ROTATE:
        rehashed = tl.sum(due.to(tl.int64), axis=0)
        tl.atomic_add(state.counters + REHASHED, rehashed, mask=rehashed > 0)
    return tl.where(due & (computed != kept), REAL_KV, 0), computed, kept


@triton.jit
def verify_program(
    program,
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
    PAGES: tl.constexpr,
    HASHING: tl.constexpr,
    BLOCK: tl.constexpr,
    NEXT_PHASE: tl.constexpr,
):
    """Verify one program's share of a row. The first program of row 0 moves the phase
    from IDLE to NEXT_PHASE."""
    IS_SWEEP: tl.constexpr = checks.columns is None
    row = program.row
    site = ReportSite(clock=tl.load(state.clock), manager=manager, tag=tag)
    reader = _load_reader(
        state, rows, checks, reads, row, batch, table_rows, table_columns
    )
    if program.split == 0:
        if row == 0:
            step_phase(state, site, DUE=IDLE, NEXT=NEXT_PHASE)
            tl.atomic_add(state.counters + (SWEEPS if IS_SWEEP else LAUNCHES), 1)
        visited = _check_length(state, site, reader, PAGES)
        _check_counting(state, rows, reads, site, reader, BLOCK)
        if visited > 0:
            tl.atomic_add(state.counters + (SWEPT if IS_SWEEP else VERIFIED), visited)

    blocks = (reader.length + BLOCK - 1) // BLOCK
    for block in range(program.split, blocks, program.splits):
        reasons, elements = _check_slots(
            state, rows, checks.columns, reads, reader, block, PAGES, BLOCK
        )
        broken, record = _check_halves(state, elements, PAGES)
        reasons |= broken
        wrong, lineage = _check_lineages(
            state, reads, reader, elements, record, HAS_LAST=not IS_SWEEP, PAGES=PAGES
        )
        reasons |= wrong
        unlike, word0 = _check_tokens(checks.tokens, reader, elements.position, record)
        reasons |= unlike
        computed = tl.zeros_like(elements.slot)
        kept = record.word2
        if HASHING.compares and HASHING.mode != NONE:
            changed, computed, kept = _check_bytes(
                state, data, reader, elements.slot, record, site.clock, HASHING
            )
            reasons |= changed
        finding = RingFinding(
            reasons=agree_across_warps(reasons),
            req_row=reader.owner,
            serial=reader.serial,
            slot=elements.slot,
            position=elements.position,
            expected_word0=word0,
            found_word0=record.word0,
            expected_lineage=lineage,
            found_lineage=record.lineage,
            found_word3=record.word3,
            clock=site.clock,
            batch_row=row,
            expected_slot=elements.expected_slot,
            found_fingerprint=kept,
            computed_fingerprint=computed,
            tag=tag,
        )
        report(state, finding)


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
    checks,
    reads,
    data,
    num_rows,
    num_tokens,
    table_rows,
    table_columns,
    max_depth,
    manager,
    tag,
    PAGES: tl.constexpr,
    HASHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    verify_program(
        Program(
            row=tl.program_id(0).to(tl.int64),
            split=tl.program_id(1),
            splits=tl.num_programs(1),
        ),
        state,
        rows,
        checks,
        reads,
        data,
        Batch(num_rows=num_rows, num_tokens=num_tokens, max_depth=max_depth),
        table_rows,
        table_columns,
        manager,
        tag,
        PAGES,
        HASHING,
        BLOCK,
        NEXT_PHASE=AFTER_VERIFY,
    )


def verify(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    table: KVReadView,
    steps_phase: bool = True,
) -> None:
    manager = view.manager if steps_phase else NO_MANAGER
    verify_kernel[(max(view.num_rows, 1), read_splits(view, table, checks))](
        state=state_args(state),
        rows=row_args(view),
        checks=check_args(checks, reads=True),
        **read_arguments(state, view, checks, table, manager),
        num_warps=4,
    )


def read_splits(rows: ForwardView, table: KVReadView, checks: PoolChecks) -> int:
    """Return how many programs of a row verify."""
    block, _ = _read_block(checks)
    elements = table.entries.shape[-1] * table.entry_size
    return splits_for(rows.num_rows, cdiv(elements, block))


def _read_block(checks: PoolChecks) -> tuple[int, int]:
    """Return `verify_block` for the bytes that verify compares."""
    source = checks.fingerprint if checks.compares_bytes else NO_FINGERPRINT
    return verify_block(source.mode)


def read_arguments(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    table: KVReadView,
    manager: int,
) -> dict[str, object]:
    """Return the arguments about the reads and the tiles that cover them."""
    block, chunk = _read_block(checks)
    launch = Launch.SWEEP if checks.req_to_token is None else Launch.VERIFY
    return {
        "reads": read_args(table),
        "data": byte_args(checks.fingerprint),
        "num_rows": view.num_rows,
        "num_tokens": view.num_tokens,
        "table_rows": table.entries.shape[0],
        "table_columns": table.entries.shape[-1],
        "max_depth": view.max_depth,
        "manager": manager,
        "tag": ring_tag(launch, manager, state.pool),
        "PAGES": page_args(table),
        "HASHING": hashing_args(
            # If slots take turns, they are hashed one by one.
            checks.fingerprint,
            chunk=chunk,
            slots=block if block == HASH_SLOTS else 1,
        )._replace(compares=checks.compares_bytes, skips_new=checks.skips_new),
        "BLOCK": block,
    }
