"""Triton kernels of the canary's head and tail writes; see `launches.py`.

A program takes a run of blocks of one row's new tokens and itself adds up the terms
before its run, so that an extend of any length is one launch. The parameters `state`,
`rows`, `checks`, `data`, `ends` and HASHING are the tuples from `args.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from kv_canary.checks import Reason
from kv_canary.kernels.triton.args import (
    NO_CHECKS,
    Checks,
    byte_args,
    check_args,
    end_args,
    hashing_args,
    row_args,
    state_args,
)
from kv_canary.kernels.triton.ends import end_forward, store_next_lineage
from kv_canary.kernels.triton.grid import cdiv, splits_for, write_block
from kv_canary.kernels.triton.hash import (
    CLOCK_SHIFT,
    NONE,
    POISON,
    SERIAL_MASK,
    fill_sentinel,
    fingerprint,
    has_sentinel,
    pack_word0,
    pack_word3,
)
from kv_canary.kernels.triton.report import (
    ReportSite,
    RingFinding,
    agree_across_warps,
    report,
    step_phase,
)
from kv_canary.kernels.triton.rows import (
    Batch,
    Program,
    Row,
    count_ancestors,
    load_base_lineage,
    load_columns,
    load_salt,
    load_start,
    load_tokens,
    shift_columns,
    sum_ancestors,
    sum_terms,
)
from kv_canary.kernels.triton.sums import store_head_sums
from kv_canary.layout import NO_FINGERPRINT, FingerprintMode
from kv_canary.records import CLOCK_MASK as RECORDS_CLOCK_MASK
from kv_canary.records import TOKEN_MASK as RECORDS_TOKEN_MASK
from kv_canary.records import UNKNOWN as RECORDS_UNKNOWN
from kv_canary.records import Counter, Launch, Phase, Request, WriterKind, ring_tag

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.layout import Fingerprint
    from kv_canary.pool_checks import PoolChecks
    from kv_canary.state import CanaryState
    from kv_canary.view import ForwardView

CLOCK_MASK = tl.constexpr(RECORDS_CLOCK_MASK)
FOREIGN = tl.constexpr(int(Reason.WRITE_FOREIGN))
ALIAS = tl.constexpr(int(Reason.WRITE_ALIAS))
SCRATCH = tl.constexpr(int(Reason.WRITE_SCRATCH))
TOKEN = tl.constexpr(int(Reason.WRITE_TOKEN))
POSITION = tl.constexpr(int(Reason.WRITE_POSITION))
OWNER = tl.constexpr(int(Reason.ROW_OWNER))
SHAPE = tl.constexpr(int(Reason.TREE_SHAPE))
MISSING = tl.constexpr(int(Reason.WRITE_MISSING))
ALL = tl.constexpr(int(FingerprintMode.ALL))
TOKEN_BITS = tl.constexpr(RECORDS_TOKEN_MASK)
UNKNOWN = tl.constexpr(RECORDS_UNKNOWN)
SERIAL_WORD = tl.constexpr(int(Request.SERIAL))
NEXT_WORD = tl.constexpr(int(Request.NEXT_WORD0))
REQUEST_WORDS = tl.constexpr(len(Request))
MASK_TILE = tl.constexpr(16)
IDLE = tl.constexpr(int(Phase.IDLE))
AFTER_VERIFY = tl.constexpr(int(Phase.AFTER_VERIFY))
AFTER_HEAD = tl.constexpr(int(Phase.AFTER_HEAD))
HEAD_SLOTS = tl.constexpr(int(Counter.HEAD_SLOTS))
TAIL_SLOTS = tl.constexpr(int(Counter.TAIL_SLOTS))
HEAD_LAUNCHES = tl.constexpr(int(Counter.HEAD_LAUNCHES))
TAIL_LAUNCHES = tl.constexpr(int(Counter.TAIL_LAUNCHES))
VERIFY_KIND = tl.constexpr(int(WriterKind.VERIFY))
DRAFT_KIND = tl.constexpr(int(WriterKind.DRAFT))


class _Run(NamedTuple):
    """The run of blocks [first, last) of a row's new tokens that a program takes; the
    row has `blocks` in all. `tokens` counts the row's tokens, even if it is padded."""

    first: Any
    last: Any
    blocks: Any
    tokens: Any


class _Writes(NamedTuple):
    """A block of new tokens [N] of a row, and the head records of their slots.

    Fields:
        place: index in [T]. number: number in the row. inside: whether the row has it.
        token, position, word0, lineage, word3: values to write.
        slot: where to write them. writable: whether the slot can have a record.
        old0, old1, old3: words of the head record.
    """

    place: Any
    number: Any
    inside: Any
    token: Any
    position: Any
    word0: Any
    lineage: Any
    word3: Any
    slot: Any
    writable: Any
    old0: Any
    old1: Any
    old3: Any


class _Outcome(NamedTuple):
    """The result of checking new tokens [N]: reasons, due words 0, due slots and found
    words 0."""

    reasons: Any
    expected0: Any
    found0: Any
    expected_slot: Any


@triton.jit
def _load_row(state, rows, row, batch):
    """Load a `Row` by its number, which counts as padded past the end of the batch."""
    inside = row < batch.num_rows
    req = tl.load(rows.req_rows + row, mask=inside, other=0)
    live = req != 0
    prefix = tl.load(rows.prefix_lens + row, mask=live, other=0)
    start = load_start(rows, row, inside)
    extend = tl.load(rows.extend_lens + row, mask=live, other=0)
    extend = tl.maximum(tl.minimum(extend, batch.num_tokens - start), 0)
    serial = tl.load(rows.serials + row, mask=live, other=0)
    salt = load_salt(rows, row, live)
    base = load_base_lineage(state, rows, row, req, live, prefix)
    return Row(
        row=row,
        inside=inside,
        req=req,
        live=live,
        prefix=prefix,
        start=start,
        extend=extend,
        serial=serial,
        salt=salt,
        base=base,
    )


@triton.jit
def _count_padded_tokens(rows, row, num_tokens):
    """Count the new tokens of a padded row; 0 past the end of the batch."""
    count = row.inside.to(tl.int64)
    if rows.qo_indptr is not None:
        end = tl.load(rows.qo_indptr + row.row + 1, mask=row.inside, other=0)
        count = tl.maximum(tl.minimum(end, num_tokens) - row.start, 0)
    return count


@triton.jit
def _find_run(
    rows, row, program, num_tokens, IS_TAIL: tl.constexpr, BLOCK: tl.constexpr
):
    tokens = row.extend
    if not IS_TAIL:
        # Padded rows are checked too: they may only write to the scratch page.
        padded = _count_padded_tokens(rows, row, num_tokens)
        tokens = tl.where(row.live, row.extend, padded)
    blocks = (tokens + BLOCK - 1) // BLOCK
    each = (blocks + program.splits - 1) // program.splits
    first = tl.minimum(program.split * each, blocks)
    last = tl.minimum(first + each, blocks)
    return _Run(first=first, last=last, blocks=blocks, tokens=tokens)


@triton.jit
def _check_slots(rows, columns, row, writes, page_size, clock):
    """Return reasons of a head write and the due slots, -1 if unknown."""
    slot, old0, old3, live = writes.slot, writes.old0, writes.old3, row.live
    expected_slot = writes.number * 0 - 1
    scratch = writes.inside & (slot >= 0) & (slot < page_size)
    reasons = tl.where(scratch & live, SCRATCH, 0).to(tl.int64)
    # A record of this same forward is an alias, which the tail write reports.
    is_old = writes.writable & (old0 != POISON)
    is_old = is_old & (((old3 >> CLOCK_SHIFT) & CLOCK_MASK) != (clock & CLOCK_MASK))
    is_other = ((old3 ^ row.serial) & SERIAL_MASK) != 0
    nowhere = writes.inside & (scratch == 0) & (writes.writable == 0)
    foreign = nowhere | (is_old & is_other)
    if columns is not None:
        column = shift_columns(rows, row.prefix + writes.number, row.row)
        expected_slot = load_columns(columns, column, row.req, writes.inside & live)
        is_stray = (scratch == 0) & (slot != expected_slot)
        foreign = foreign | (writes.inside & live & is_stray)
        # Nor may the row overwrite its own prefix.
        place = old0 >> 32
        is_prefix = is_old & (is_other == 0) & (place < row.prefix)
        column = shift_columns(rows, place, row.row)
        held = load_columns(columns, column, row.req, is_prefix)
        foreign = foreign | (is_prefix & (held == slot))
    return reasons | tl.where(foreign, FOREIGN, 0), expected_slot


@triton.jit
def _check_published(published, row, writes, kind):
    """Compare new tokens with published ones; return reasons and due words 0. A draft
    step, and a verification after its roots, read proposals."""
    mask = writes.inside & row.live & ((writes.number == 0) | (kind != VERIFY_KIND))
    mask = mask & (kind != DRAFT_KIND)
    due = row.prefix + writes.number
    token_due = load_columns(published, due + published.offset, row.req, mask)
    wrong = (token_due >= 0) & (token_due != writes.token)
    due0 = tl.where(wrong, pack_word0(token_due, due), writes.word0)
    return tl.where(wrong, TOKEN, 0).to(tl.int64), due0


@triton.jit
def _find_wrong_masks(checks, row, writes, parent):
    """Return whether nodes [N] of a tree attend to anything other than themselves and
    whatever their parents attend to."""
    wrong = writes.place < 0
    mask = writes.inside & row.live
    has_parent = mask & (parent >= row.start) & (parent < writes.place)
    own = checks.mask.at + writes.place * checks.mask.width
    of_parent = checks.mask.at + parent * checks.mask.width
    for begin in range(0, checks.mask.width, MASK_TILE):
        column = begin + tl.arange(0, MASK_TILE)
        inside = (column < checks.mask.width)[None, :]
        at = own[:, None] + column[None, :]
        seen = tl.load(at, mask=mask[:, None] & inside, other=0) != 0
        at = of_parent[:, None] + column[None, :]
        wanted = tl.load(at, mask=has_parent[:, None] & inside, other=0) != 0
        wanted = wanted | (column[None, :] == writes.number[:, None])
        unlike = (seen != wanted) & mask[:, None] & inside
        wrong = wrong | (tl.max(unlike.to(tl.int32), axis=1) != 0)
    return wrong


@triton.jit
def _check_shape(rows, checks, row, writes, max_depth):
    """Compare positions, and in a tree parents and masks, with the places of new
    tokens; return reasons and due words 0."""
    mask = writes.inside & row.live
    due = row.prefix + writes.number
    reasons = tl.zeros_like(writes.place)
    if rows.parent_index is not None:
        parent = tl.load(rows.parent_index + writes.place, mask=mask, other=-1)
        depth, sound = count_ancestors(rows, row, writes.place, mask, max_depth)
        is_orphan = (parent == -1) & (writes.number > 0)
        due = tl.where(is_orphan, writes.position, row.prefix + depth)
        wrong = mask & ((sound == 0) | is_orphan)
        if checks.mask is not None:
            wrong = wrong | _find_wrong_masks(checks, row, writes, parent)
        reasons = tl.where(wrong, SHAPE, 0).to(tl.int64)
    reasons |= tl.where(mask & (due != writes.position), POSITION, 0)
    due0 = tl.where(reasons != 0, pack_word0(writes.token, due), writes.word0)
    return reasons, due0


@triton.jit
def _check_request(state, rows, row, writes):
    """Compare the first new token of a row with the known state of its request; return
    reasons and due words 0. A branch belongs to no request."""
    reasons = tl.zeros_like(writes.place)
    due0 = writes.word0
    if rows.lineage_rows is None:
        mask = writes.inside & row.live & (writes.number == 0)
        known = state.requests + row.req * REQUEST_WORDS
        serial = tl.load(known + SERIAL_WORD)
        next0 = tl.load(known + NEXT_WORD)
        is_other = mask & (serial != UNKNOWN) & (serial != row.serial)
        unlike = tl.where(mask & (next0 != UNKNOWN), next0 ^ writes.word0, 0)
        reasons |= tl.where(is_other, OWNER, 0)
        reasons |= tl.where((unlike & TOKEN_BITS) != 0, TOKEN, 0)
        reasons |= tl.where((unlike >> 32) != 0, POSITION, 0)
        due0 = tl.where(unlike != 0, next0, due0)
    return reasons, due0


@triton.jit
def _check_oracle(oracle, row, writes):
    """Compare new tokens with the oracle; return reasons and due words 0."""
    mask = writes.inside & row.live
    token_due = tl.load(oracle.tokens + writes.place, mask=mask, other=-1)
    wrong = (token_due >= 0) & (token_due != writes.token)
    position_due = tl.load(oracle.positions + writes.place, mask=mask, other=-1)
    misplaced = (position_due >= 0) & (position_due != writes.position)
    reasons = tl.where(wrong, TOKEN, 0) | tl.where(misplaced, POSITION, 0)
    return reasons.to(tl.int64), pack_word0(token_due, position_due)


@triton.jit
def _check_head(state, rows, checks, row, writes, page_size, kind, max_depth, clock):
    """Check slots and inputs of new tokens before the model."""
    reasons, expected_slot = _check_slots(
        rows, checks.columns, row, writes, page_size, clock
    )
    unlike, expected0 = _check_shape(rows, checks, row, writes, max_depth)
    reasons |= unlike
    found0 = tl.where(unlike != 0, writes.word0, writes.old0)
    unlike, due0 = _check_request(state, rows, row, writes)
    reasons |= unlike
    expected0 = tl.where(due0 != writes.word0, due0, expected0)
    found0 = tl.where(due0 != writes.word0, writes.word0, found0)
    if checks.published is not None:
        unlike, due0 = _check_published(checks.published, row, writes, kind)
        reasons |= unlike
        expected0 = tl.where(unlike != 0, due0, expected0)
        found0 = tl.where(unlike != 0, writes.word0, found0)
    if checks.oracle is not None:
        unlike, due0 = _check_oracle(checks.oracle, row, writes)
        reasons |= unlike
        expected0 = tl.where(row.live, due0, expected0)
        found0 = tl.where(unlike != 0, writes.word0, found0)
    return _Outcome(
        reasons=agree_across_warps(reasons),
        expected0=expected0,
        found0=found0,
        expected_slot=expected_slot,
    )


@triton.jit
def _check_tail(data, writes, HASHING: tl.constexpr):
    """Check new tokens after the model: the heads must still belong to this forward
    and, if all bytes are covered, K and V must be stored."""
    is_own = (writes.old0 == writes.word0) & (writes.old1 == writes.lineage)
    is_own = is_own & (writes.old3 == writes.word3)
    reasons = tl.where(writes.writable & (is_own == 0), ALIAS, 0).to(tl.int64)
    if HASHING.mode == ALL:
        missing = has_sentinel(data, writes.slot, writes.writable, HASHING)
        reasons |= tl.where(writes.writable & missing, MISSING, 0)
        reasons = agree_across_warps(reasons)
    return _Outcome(
        reasons=reasons,
        expected0=writes.word0,
        found0=writes.old0,
        expected_slot=tl.zeros_like(writes.slot) - 1,
    )


@triton.jit
def _report_writes(state, site, row, writes, outcome):
    finding = RingFinding(
        reasons=outcome.reasons,
        req_row=row.req,
        serial=row.serial,
        slot=writes.slot,
        position=writes.position,
        expected_word0=outcome.expected0,
        found_word0=outcome.found0,
        expected_lineage=writes.lineage,
        found_lineage=writes.old1,
        found_word3=writes.old3,
        clock=site.clock,
        batch_row=row.row,
        expected_slot=outcome.expected_slot,
        found_fingerprint=None,
        computed_fingerprint=None,
        tag=site.tag,
    )
    report(state, finding)


@triton.jit
def _store_records(records, writes, word2):
    record = records + writes.slot * 4
    tl.store(record, writes.word0, mask=writes.writable)
    tl.store(record + 1, writes.lineage, mask=writes.writable)
    tl.store(record + 2, word2, mask=writes.writable)
    tl.store(record + 3, writes.word3, mask=writes.writable)


@triton.jit
def _load_writes(
    state, rows, row, tokens, place, number, inside, lineage, page_size, word3
):
    """Load the `_Writes` of a block whose tokens and lineages are known."""
    slot = tl.load(rows.out_cache_loc + place, mask=inside, other=-1)
    writable = inside & row.live & (slot >= page_size) & (slot < state.num_slots)
    record = state.head + slot * 4
    old0 = tl.load(record, mask=writable, other=0)
    old1 = tl.load(record + 1, mask=writable, other=0)
    old3 = tl.load(record + 3, mask=writable, other=0)
    return _Writes(
        place=place,
        number=number,
        inside=inside,
        token=tokens.token,
        position=tokens.position,
        word0=tokens.word0,
        lineage=lineage,
        word3=tl.zeros_like(place) + word3,
        slot=slot,
        writable=writable,
        old0=old0,
        old1=old1,
        old3=old3,
    )


@triton.jit
def _share_sums(
    state,
    rows,
    data,
    program,
    row,
    page_size,
    HASHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store this program's share of the sums of a row's one new token."""
    j = tl.arange(0, BLOCK)
    inside = (j < row.extend) & row.live
    slot = tl.load(rows.out_cache_loc + row.start + j, mask=inside, other=-1)
    inside = inside & (slot >= page_size) & (slot < state.num_slots)
    store_head_sums(data, slot, inside, program.split, program.splits, HASHING)


@triton.jit
def _end_launch(state, rows, ends, batch, programs, clock, ADVANCES: tl.constexpr):
    """Step the clock and end the forward in the last program to arrive."""
    # All threads have read the clock and written their results before this program
    # announces that it is done.
    tl.debug_barrier()
    if tl.atomic_add(state.ticket, 1) == programs - 1:
        tl.store(state.ticket, 0)
        tl.store(state.clock, clock + 1)
        if ADVANCES:
            end_forward(state, rows, ends, batch.num_rows)


@triton.jit
def write_program(
    program,
    state,
    rows,
    checks,
    data,
    ends,
    batch,
    page_size,
    kind,
    manager,
    tag,
    IS_TAIL: tl.constexpr,
    ADVANCES: tl.constexpr,
    STEPS_PHASE: tl.constexpr,
    HASHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one program's share of a row. With ADVANCES the launch ends the forward as
    `ends` says. Without STEPS_PHASE the enclosing launch steps the phase.
    """
    IS_TREE: tl.constexpr = rows.parent_index is not None
    site = ReportSite(clock=tl.load(state.clock), manager=manager, tag=tag)
    if (program.row == 0) & (program.split == 0):
        if STEPS_PHASE:
            step_phase(
                state,
                site,
                DUE=AFTER_HEAD if IS_TAIL else AFTER_VERIFY,
                NEXT=IDLE if IS_TAIL else AFTER_HEAD,
            )
        launches = TAIL_LAUNCHES if IS_TAIL else HEAD_LAUNCHES
        tl.atomic_add(state.counters + launches, 1)
    row = _load_row(state, rows, program.row, batch)
    run = _find_run(rows, row, program, batch.num_tokens, IS_TAIL, BLOCK)
    base = row.base
    if rows.qo_indptr is not None and not IS_TREE:
        before = tl.where(run.first < run.last, run.first * BLOCK, 0)
        base += sum_terms(rows, row.start, row.start + before, row.salt)
    written = row.prefix * 0
    for block in range(run.first, run.last):
        j = block * BLOCK + tl.arange(0, BLOCK)
        inside = j < run.tokens
        t = row.start + j
        tokens = load_tokens(rows, t, inside, row.salt)
        if IS_TREE:
            lineage = base + tokens.term
            lineage += sum_ancestors(rows, row, t, inside, batch.max_depth)
        else:
            lineage = base + tl.cumsum(tokens.term, axis=0)
            base += tl.sum(tokens.term, axis=0)
        if not IS_TAIL:
            lineage = tl.where(row.live, lineage, 0)
        word3 = pack_word3(site.clock, kind, row.serial)
        writes = _load_writes(
            state, rows, row, tokens, t, j, inside, lineage, page_size, word3
        )
        if IS_TAIL:
            outcome = _check_tail(data, writes, HASHING)
            _report_writes(state, site, row, writes, outcome)
            word2 = tl.zeros_like(t)
            if HASHING.mode != NONE and HASHING.heads == 0:
                word2 = fingerprint(
                    data, writes.slot, writes.writable, lineage, HASHING
                )
            _store_records(state.tail, writes, word2)
            if HASHING.heads > 0 and rows.qo_indptr is not None:
                store_head_sums(data, writes.slot, writes.writable, 0, 1, HASHING)
        else:
            outcome = _check_head(
                state,
                rows,
                checks,
                row,
                writes,
                page_size,
                kind,
                batch.max_depth,
                site.clock,
            )
            _report_writes(state, site, row, writes, outcome)
            # Warps that look at the same record have all read the old one.
            tl.debug_barrier()
            _store_records(state.head, writes, tl.zeros_like(t))
            if HASHING.mode == ALL:
                fill_sentinel(data, writes.slot, writes.writable, HASHING)
        written += tl.sum(writes.writable.to(tl.int64), axis=0)
    if IS_TAIL and HASHING.heads > 0 and rows.qo_indptr is None:
        _share_sums(state, rows, data, program, row, page_size, HASHING, BLOCK)
    if written > 0:
        tl.atomic_add(state.counters + (TAIL_SLOTS if IS_TAIL else HEAD_SLOTS), written)
    if ADVANCES:
        ends_here = (run.first < run.last) & (run.last == run.blocks)
        if ends_here | ((run.blocks == 0) & (program.split == 0)):
            store_next_lineage(state, rows, ends, row, base)
    if IS_TAIL:
        programs = tl.num_programs(0) * program.splits
        _end_launch(state, rows, ends, batch, programs, site.clock, ADVANCES)


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
    checks,
    data,
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
        Program(
            row=tl.program_id(0).to(tl.int64),
            split=tl.program_id(1),
            splits=tl.num_programs(1),
        ),
        state,
        rows,
        checks,
        data,
        ends,
        Batch(num_rows=num_rows, num_tokens=num_tokens, max_depth=max_depth),
        page_size,
        kind,
        manager,
        tag,
        IS_TAIL=IS_TAIL,
        ADVANCES=ADVANCES,
        STEPS_PHASE=True,
        HASHING=HASHING,
        BLOCK=BLOCK,
    )


def write_head(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    # Before the model runs, bytes only matter if they are filled with the sentinel.
    fills = checks.fingerprint.mode is FingerprintMode.ALL
    _write(
        state,
        view,
        checks.fingerprint if fills else NO_FINGERPRINT,
        Launch.HEAD,
        checks=check_args(checks, writes=view),
        ends=None,
        page_size=checks.page_size,
    )


def write_tail(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    advance: bool,
    findings: Tensor | None,
) -> None:
    if advance and view.num_rows > state.next_lineage.shape[0]:
        raise ValueError(f"write_tail: {view.num_rows} rows exceed the scratch memory")
    _write(
        state,
        view,
        checks.fingerprint,
        Launch.TAIL,
        checks=NO_CHECKS,
        ends=end_args(view, findings) if advance else None,
        page_size=checks.page_size,
    )


def _write(
    state: CanaryState,
    view: ForwardView,
    source: Fingerprint,
    launch: Launch,
    *,
    checks: Checks,
    ends: Any,
    page_size: int,
) -> None:
    block, chunk, splits = write_shape(view, source.mode)
    hashing = hashing_args(source, chunk=chunk, slots=block)
    if launch is Launch.TAIL and hashing.heads and view.qo_indptr is None:
        cells = hashing.layers * hashing.heads
        splits = splits_for(view.num_rows, cdiv(cells, hashing.cells))
    write_kernel[(max(view.num_rows, 1), splits)](
        state=state_args(state),
        rows=row_args(view),
        checks=checks,
        data=byte_args(source),
        ends=ends,
        num_rows=view.num_rows,
        num_tokens=view.num_tokens,
        page_size=page_size,
        max_depth=view.max_depth,
        kind=int(view.writer_kind),
        manager=view.manager,
        tag=ring_tag(launch, view.manager, state.pool),
        IS_TAIL=launch is Launch.TAIL,
        ADVANCES=ends is not None,
        HASHING=hashing,
        BLOCK=block,
        num_warps=1 if view.qo_indptr is None and chunk == 1 else 4,
    )


def write_shape(rows: ForwardView, mode: FingerprintMode) -> tuple[int, int, int]:
    """Return tokens per program, words hashed at a time, and programs per row."""
    one_token = rows.qo_indptr is None
    block, chunk = write_block(mode, one_token=one_token)
    blocks = 1 if one_token else cdiv(rows.num_tokens, block)
    return block, chunk, splits_for(rows.num_rows, blocks)
