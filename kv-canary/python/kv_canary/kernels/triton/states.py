"""Triton kernels of the records of recurrent state; see `launches.py`.

`state`, `rows` and `data` are tuples, HASHING as in `args.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from kv_canary.checks import Reason
from kv_canary.kernels.triton.args import byte_args, hashing_args, state_args
from kv_canary.kernels.triton.hash import (
    LOW_HALF,
    NONE,
    POISON,
    SERIAL_BITS,
    SERIAL_MASK,
    mix64,
    pack_word0,
    pack_word3,
)
from kv_canary.kernels.triton.report import RingFinding, report_one
from kv_canary.layout import require_samples
from kv_canary.records import KIND_MASK as RECORDS_KIND_MASK
from kv_canary.records import (
    NO_HEAD,
    PLACE_LAYER_SHIFT,
    TAG_LAUNCH_MASK,
    Counter,
    Launch,
    WriterKind,
    ring_tag,
)
from kv_canary.state_rows import loads_of
from kv_canary.view import NO_MANAGER

if TYPE_CHECKING:
    from kv_canary.layout import Fingerprint
    from kv_canary.state import CanaryState
    from kv_canary.state_rows import StateRows

KIND_MASK = tl.constexpr(RECORDS_KIND_MASK)
MOVE = tl.constexpr(int(WriterKind.MOVE))
READ_SET = tl.constexpr(int(Reason.READ_SET))
FREED = tl.constexpr(int(Reason.VERIFY_FREED))
POSITION = tl.constexpr(int(Reason.VERIFY_POSITION))
LINEAGE = tl.constexpr(int(Reason.VERIFY_LINEAGE))
OWNER = tl.constexpr(int(Reason.ROW_OWNER))
REAL_KV = tl.constexpr(int(Reason.VERIFY_REAL_KV))
VERIFIED_SLOTS = tl.constexpr(int(Counter.VERIFIED_SLOTS))
VERIFY_LAUNCHES = tl.constexpr(int(Counter.VERIFY_LAUNCHES))
SWEPT_SLOTS = tl.constexpr(int(Counter.SWEPT_SLOTS))
SWEEP_LAUNCHES = tl.constexpr(int(Counter.SWEEP_LAUNCHES))
SWEEP = tl.constexpr(int(Launch.SWEEP))
LAUNCH_MASK = tl.constexpr(TAG_LAUNCH_MASK)
FOLDS = tl.constexpr(int(Reason.STATE_FOLDS))
LAYER_SHIFT = tl.constexpr(PLACE_LAYER_SHIFT)
WHOLE_LAYER = tl.constexpr(NO_HEAD)
TAIL_SLOTS = tl.constexpr(int(Counter.TAIL_SLOTS))
TAIL_LAUNCHES = tl.constexpr(int(Counter.TAIL_LAUNCHES))


class _Rows(NamedTuple):
    """The tensors of `StateRows`."""

    slots: Any
    due_slots: Any
    req_rows: Any
    serials: Any
    lengths: Any
    lineages: Any
    lineage_rows: Any
    folded: Any
    marks: Any


class _Row(NamedTuple):
    """One of them. `holds`: whether it has a state in a slot that can have a record."""

    req: Any
    slot: Any
    due_slot: Any
    serial: Any
    length: Any
    lineage: Any
    in_range: Any
    holds: Any


@triton.jit
def _load_row(state, rows, row):
    req = tl.load(rows.req_rows + row)
    slot = tl.load(rows.slots + row)
    length = tl.load(rows.lengths + row)
    lineage_row = req
    if rows.lineage_rows is not None:
        lineage_row = tl.load(rows.lineage_rows + row)
    in_range = (slot > 0) & (slot < state.num_slots)
    return _Row(
        req=req,
        slot=slot,
        due_slot=tl.load(rows.due_slots + row),
        serial=tl.load(rows.serials + row),
        length=length,
        lineage=tl.load(rows.lineages + lineage_row),
        in_range=in_range,
        holds=(req != 0) & (length > 0) & in_range,
    )


@triton.jit
def _sum_samples(
    words,
    slot,
    lineage,
    layers,
    slot_stride,
    LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Sum the hashed words of a 16-byte chunk of every layer."""
    layer = tl.arange(0, BLOCK).to(tl.int64)
    mask = layer < LAYERS
    # The place that the reference's `sample_place` gives for one layer.
    spread = mix64(mix64(lineage + layer))
    chunk = (((spread >> 32) & LOW_HALF) * (WORDS // 2)) >> 32
    at = words + layer * layers + slot * slot_stride + 2 * chunk
    key = (layer << 32) | (2 * chunk)
    first = mix64(tl.load(at, mask=mask, other=0) ^ mix64(key))
    second = mix64(tl.load(at + 1, mask=mask, other=0) ^ mix64(key + 1))
    return tl.sum(tl.where(mask, first + second, 0), axis=0)


@triton.jit
def _fingerprint(data, slot, lineage, HASHING: tl.constexpr):
    if HASHING.mode == NONE:
        found = slot * 0
    else:
        low = _sum_samples(
            data.k_words,
            slot,
            lineage,
            data.k_layers,
            data.k_slot_stride,
            LAYERS=HASHING.layers,
            BLOCK=HASHING.layer_block,
            WORDS=HASHING.k_words,
        )
        high = _sum_samples(
            data.v_words,
            slot,
            lineage,
            data.v_layers,
            data.v_slot_stride,
            LAYERS=HASHING.layers,
            BLOCK=HASHING.layer_block,
            WORDS=HASHING.v_words,
        )
        found = (low & LOW_HALF) | (high << 32)
    return found


@triton.jit
def _check_record(
    state, data, own, word0, lineage, word3, is_sweep, HASHING: tl.constexpr
):
    """Return the reasons against a record that is not poison, and the fingerprints
    that it holds and that the bytes have."""
    kept = tl.load(state.tail + own.slot * 4 + 2)
    computed = _fingerprint(data, own.slot, lineage, HASHING)
    is_other = ((word3 ^ own.serial) & SERIAL_MASK) != 0
    is_other = is_other & (((word3 >> SERIAL_BITS) & KIND_MASK) != MOVE)
    reasons = tl.where((word0 >> 32) != own.length - 1, POSITION, 0)
    reasons |= tl.where(lineage != own.lineage, LINEAGE, 0)
    reasons |= tl.where(is_other & ~is_sweep, OWNER, 0)
    reasons |= tl.where(kept != computed, REAL_KV, 0)
    return reasons, kept, computed


@triton.jit
def _report_marks(state, rows, own, req, row, tag, LAYERS: tl.constexpr):
    """Report the first layer that loaded other bytes than were stored last, and clear
    the marks."""
    BLOCK: tl.constexpr = triton.next_power_of_2(LAYERS)
    layer = tl.arange(0, BLOCK)
    mask = layer < LAYERS
    marks = rows.marks + own.slot * LAYERS + layer
    is_marked = tl.load(marks, mask=mask, other=0) != 0
    first = tl.min(tl.where(is_marked, layer, LAYERS), axis=0)
    record = state.tail + own.slot * 4
    word0 = tl.load(record)
    if first < LAYERS:
        tl.store(marks, 0, mask=is_marked)
        if word0 != POISON:
            lineage = tl.load(record + 1)
            place = ((first.to(tl.int64) << LAYER_SHIFT) | WHOLE_LAYER) << 32
            finding = RingFinding(
                reasons=REAL_KV,
                req_row=req,
                serial=own.serial,
                slot=own.slot,
                position=word0 >> 32,
                expected_word0=pack_word0(own.slot * 0 - 1, word0 >> 32),
                found_word0=word0,
                expected_lineage=lineage,
                found_lineage=lineage,
                found_word3=tl.load(record + 3),
                clock=tl.load(state.clock),
                batch_row=row,
                expected_slot=own.due_slot,
                found_fingerprint=place,
                computed_fingerprint=place,
                tag=tag,
            )
            report_one(state, finding)


@triton.jit(do_not_specialize=["tag", "read_tag"])
def check_states_kernel(
    state, rows, data, tag, read_tag, MARKS: tl.constexpr, HASHING: tl.constexpr
):
    """Compare the record of one row's slot with the row's prefix. `tag` says whether
    the launch is a sweep, so that both run one compiled kernel."""
    row = tl.program_id(0).to(tl.int64)
    own = _load_row(state, rows, row)
    is_sweep = (tag & LAUNCH_MASK) == SWEEP
    reasons = 0
    if own.req != 0:
        stray = (own.slot != own.due_slot) | (own.in_range == 0)
        reasons = tl.where(stray, READ_SET, 0)
    record = state.tail + own.slot * 4
    word0 = tl.load(record, mask=own.holds, other=0)
    lineage = tl.load(record + 1, mask=own.holds, other=0)
    word3 = tl.load(record + 3, mask=own.holds, other=0)
    kept = word0 * 0
    computed = kept
    if own.holds:
        if MARKS > 0:
            req = tl.where(is_sweep, 0, own.req)
            _report_marks(state, rows, own, req, row, read_tag, MARKS)
        visited = tl.where(is_sweep, SWEPT_SLOTS, VERIFIED_SLOTS)
        tl.atomic_add(state.counters + visited, 1)
        if word0 == POISON:
            reasons |= FREED
        else:
            unlike, kept, computed = _check_record(
                state, data, own, word0, lineage, word3, is_sweep, HASHING
            )
            reasons |= unlike
    if row == 0:
        launches = tl.where(is_sweep, SWEEP_LAUNCHES, VERIFY_LAUNCHES)
        tl.atomic_add(state.counters + launches, 1)
    if reasons != 0:
        finding = RingFinding(
            reasons=reasons,
            req_row=tl.where(is_sweep, 0, own.req),
            serial=own.serial,
            slot=own.slot,
            position=own.length - 1,
            expected_word0=pack_word0(own.slot * 0 - 1, own.length - 1),
            found_word0=word0,
            expected_lineage=own.lineage,
            found_lineage=lineage,
            found_word3=word3,
            clock=tl.load(state.clock),
            batch_row=row,
            expected_slot=own.due_slot,
            found_fingerprint=kept,
            computed_fingerprint=computed,
            tag=tag,
        )
        report_one(state, finding)


@triton.jit
def _check_folded(state, rows, own, row, tag, LAYERS: tl.constexpr):
    """Report the first layer that has folded another number of tokens."""
    BLOCK: tl.constexpr = triton.next_power_of_2(LAYERS)
    layer = tl.arange(0, BLOCK)
    mask = layer < LAYERS
    counts = tl.load(rows.folded + own.slot * LAYERS + layer, mask=mask, other=0)
    first = tl.min(tl.where(mask & (counts != own.length), layer, LAYERS), axis=0)
    if first < LAYERS:
        found = tl.sum(tl.where(layer == first, counts, 0), axis=0).to(tl.int64)
        finding = RingFinding(
            reasons=FOLDS,
            req_row=own.req,
            serial=own.serial,
            slot=own.slot,
            position=own.length - 1,
            expected_word0=pack_word0(own.slot * 0 - 1, own.length - 1),
            found_word0=pack_word0(own.slot * 0 - 1, found - 1),
            expected_lineage=own.lineage,
            found_lineage=None,
            found_word3=None,
            clock=tl.load(state.clock),
            batch_row=row,
            expected_slot=own.due_slot,
            found_fingerprint=first.to(tl.int64),
            computed_fingerprint=None,
            tag=tag,
        )
        report_one(state, finding)


@triton.jit(do_not_specialize=["kind", "tag", "read_tag"])
def note_states_kernel(
    state,
    rows,
    data,
    kind,
    tag,
    read_tag,
    ENDS: tl.constexpr,
    LAYERS: tl.constexpr,
    MARKS: tl.constexpr,
    HASHING: tl.constexpr,
):
    """Check what LAYERS counts of folds and MARKS marks say, and write the record of
    one row's slot. If it ENDS a forward, the last program advances the clock."""
    row = tl.program_id(0).to(tl.int64)
    own = _load_row(state, rows, row)
    if own.holds:
        if LAYERS > 0:
            _check_folded(state, rows, own, row, tag, LAYERS)
        if MARKS > 0:
            _report_marks(state, rows, own, own.req, row, read_tag, MARKS)
        of_bytes = _fingerprint(data, own.slot, own.lineage, HASHING)
        word0 = pack_word0(own.slot * 0 - 1, own.length - 1)
        word3 = pack_word3(tl.load(state.clock), kind, own.serial)
        for half in tl.static_range(2):
            record = state.tail + own.slot * 4
            if half == 1:
                record = state.head + own.slot * 4
            tl.store(record, word0)
            tl.store(record + 1, own.lineage)
            tl.store(record + 2, of_bytes)
            tl.store(record + 3, word3)
        tl.atomic_add(state.counters + TAIL_SLOTS, 1)
    if ENDS:
        tl.debug_barrier()
        arrived = tl.atomic_add(state.ticket, 1, sem="acq_rel", scope="gpu")
        if arrived == tl.num_programs(0) - 1:
            tl.store(state.ticket, 0)
            tl.atomic_add(state.counters + TAIL_LAUNCHES, 1)
            tl.store(state.clock, tl.load(state.clock) + 1)


def check_states(
    state: CanaryState,
    rows: StateRows,
    source: Fingerprint,
    launch: Launch = Launch.VERIFY,
) -> None:
    if rows.num_rows:
        check_states_kernel[(rows.num_rows,)](
            state_args(state),
            _row_args(rows),
            byte_args(source),
            ring_tag(launch, NO_MANAGER, state.pool),
            ring_tag(loads_of(launch), NO_MANAGER, state.pool),
            **_constants(rows, source),
        )


def note_states(
    state: CanaryState,
    rows: StateRows,
    source: Fingerprint,
    kind: WriterKind,
    ends_forward: bool,
) -> None:
    if rows.num_rows:
        note_states_kernel[(rows.num_rows,)](
            state_args(state),
            _row_args(rows),
            byte_args(source),
            int(kind),
            ring_tag(Launch.TAIL, NO_MANAGER, state.pool),
            ring_tag(loads_of(Launch.TAIL), NO_MANAGER, state.pool),
            ENDS=ends_forward,
            LAYERS=0 if rows.folded is None else rows.folded.shape[1],
            **_constants(rows, source),
        )


def _constants(rows: StateRows, source: Fingerprint) -> dict[str, Any]:
    require_samples(source)
    return {
        "MARKS": 0 if rows.marks is None else rows.marks.shape[1],
        "HASHING": hashing_args(source, chunk=1),
        "num_warps": 1,
    }


def _row_args(rows: StateRows) -> _Rows:
    rows.check_layout()
    return _Rows(
        slots=rows.slots,
        due_slots=rows.due_slots,
        req_rows=rows.req_rows,
        serials=rows.serials,
        lengths=rows.lengths,
        lineages=rows.lineages,
        lineage_rows=rows.lineage_rows,
        folded=rows.folded,
        marks=rows.marks,
    )
