"""Records of recurrent state in torch: the oracle of the Triton version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kv_canary.checks import Reason
from kv_canary.hashing import mix64
from kv_canary.kernels.reference.report import Report, flag
from kv_canary.layout import FingerprintMode, require_samples
from kv_canary.records import (
    HALF_BITS,
    KIND_MASK,
    NO_HEAD,
    PLACE_LAYER_SHIFT,
    POISON_WORD,
    SERIAL_BITS,
    SERIAL_MASK,
    TOKEN_MASK,
    Counter,
    Launch,
    Record,
    Ring,
    WriterKind,
    fingerprint_keys,
    pack_word0_tensor,
    pack_word3_tensor,
    sample_place,
)
from kv_canary.state_rows import loads_of
from kv_canary.view import NO_MANAGER

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.layout import Fingerprint
    from kv_canary.state import CanaryState
    from kv_canary.state_rows import StateRows


def check_states(
    state: CanaryState,
    rows: StateRows,
    source: Fingerprint,
    launch: Launch = Launch.VERIFY,
) -> None:
    """See `launches.check_states`, and `launches.sweep_states` for `Launch.SWEEP`."""
    sweep = launch == Launch.SWEEP
    report = Report(state, launch, NO_MANAGER)
    live = rows.req_rows != 0
    slot = rows.slots
    in_range = (slot > 0) & (slot < state.num_slots)
    reads = live & (rows.lengths > 0) & in_range
    _report_marks(state, rows, reads, launch)
    record = state.tail[slot * reads] * reads[:, None]
    freed = reads & (record[:, Record.WORD0] == POISON_WORD)
    sound = reads & ~freed
    due = rows.lineages[rows.lineage_index]
    kind = record[:, Record.WORD3] >> SERIAL_BITS & KIND_MASK
    is_other = (record[:, Record.WORD3] ^ rows.serials) & SERIAL_MASK != 0
    computed = fingerprint(source, slot * sound, record[:, Record.LINEAGE])
    position = rows.lengths - 1
    reasons = flag(Reason.READ_SET, live & ((slot != rows.due_slots) | ~in_range))
    reasons |= flag(Reason.VERIFY_FREED, freed)
    for reason, unlike in (
        (Reason.VERIFY_POSITION, record[:, Record.WORD0] >> 32 != position),
        (Reason.VERIFY_LINEAGE, record[:, Record.LINEAGE] != due),
        (Reason.ROW_OWNER, is_other & (kind != WriterKind.MOVE) & (not sweep)),
        (Reason.VERIFY_REAL_KV, computed != record[:, Record.FINGERPRINT]),
    ):
        reasons |= flag(reason, sound & unlike)
    report.add(
        {
            Ring.REASONS: reasons,
            Ring.REQ_ROW: rows.req_rows * (not sweep),
            Ring.SERIAL: rows.serials,
            Ring.SLOT: slot,
            Ring.POSITION: position,
            Ring.EXPECTED_WORD0: pack_word0_tensor(torch.full_like(slot, -1), position),
            Ring.FOUND_WORD0: record[:, Record.WORD0],
            Ring.EXPECTED_LINEAGE: due,
            Ring.FOUND_LINEAGE: record[:, Record.LINEAGE],
            Ring.FOUND_WORD3: record[:, Record.WORD3],
            Ring.BATCH_ROW: torch.arange(len(slot), device=slot.device),
            Ring.EXPECTED_SLOT: rows.due_slots,
            Ring.FOUND_FINGERPRINT: record[:, Record.FINGERPRINT],
            Ring.COMPUTED_FINGERPRINT: computed,
        }
    )
    launches, visited = (
        (Counter.SWEEP_LAUNCHES, Counter.SWEPT_SLOTS)
        if sweep
        else (Counter.VERIFY_LAUNCHES, Counter.VERIFIED_SLOTS)
    )
    state.counters[launches] += 1
    state.counters[visited] += reads.sum()


def note_states(
    state: CanaryState,
    rows: StateRows,
    source: Fingerprint,
    kind: WriterKind,
    ends_forward: bool,
) -> None:
    """See `launches.note_states`."""
    writes = (rows.req_rows != 0) & (rows.lengths > 0)
    writes &= (rows.slots > 0) & (rows.slots < state.num_slots)
    if rows.folded is not None:
        _check_folded(state, rows, rows.folded, writes)
    _report_marks(state, rows, writes, Launch.TAIL)
    slot = rows.slots[writes]
    lineage = rows.lineages[rows.lineage_index[writes]]
    position = rows.lengths[writes] - 1
    record = torch.stack(
        (
            pack_word0_tensor(torch.full_like(slot, -1), position),
            lineage,
            fingerprint(source, slot, lineage),
            pack_word3_tensor(state.clock, kind, rows.serials[writes]),
        ),
        dim=1,
    )
    state.head[slot] = state.tail[slot] = record
    state.counters[Counter.TAIL_SLOTS] += len(slot)
    if ends_forward:
        state.counters[Counter.TAIL_LAUNCHES] += 1
        state.clock.add_(1)


def _check_folded(
    state: CanaryState, rows: StateRows, folded: Tensor, writes: Tensor
) -> None:
    counts = folded[rows.slots * writes].to(torch.int64)
    unlike = counts != rows.lengths[:, None]
    # The first layer of those that differ.
    layer = unlike.to(torch.int32).argmax(dim=1)
    found = counts.gather(1, layer[:, None])[:, 0]
    unknown = torch.full_like(rows.slots, -1)
    Report(state, Launch.TAIL, NO_MANAGER).add(
        {
            Ring.REASONS: flag(Reason.STATE_FOLDS, writes & unlike.any(dim=1)),
            Ring.REQ_ROW: rows.req_rows,
            Ring.SERIAL: rows.serials,
            Ring.SLOT: rows.slots,
            Ring.POSITION: rows.lengths - 1,
            Ring.EXPECTED_WORD0: pack_word0_tensor(unknown, rows.lengths - 1),
            Ring.FOUND_WORD0: pack_word0_tensor(unknown, found - 1),
            Ring.EXPECTED_LINEAGE: rows.lineages[rows.lineage_index],
            Ring.BATCH_ROW: torch.arange(len(unknown), device=unknown.device),
            Ring.EXPECTED_SLOT: rows.due_slots,
            Ring.FOUND_FINGERPRINT: layer,
        }
    )


def _report_marks(
    state: CanaryState, rows: StateRows, live: Tensor, launch: Launch
) -> None:
    """Report the first layer that loaded other bytes than were stored last, and clear
    the marks of `live` rows."""
    if rows.marks is None:
        return
    slot = rows.slots * live
    is_marked = (rows.marks[slot] != 0) & live[:, None]
    rows.marks.index_fill_(0, slot, 0)
    record = state.tail[slot]
    position = record[:, Record.WORD0] >> 32
    found = is_marked.any(dim=1) & (record[:, Record.WORD0] != POISON_WORD)
    layer = is_marked.to(torch.int32).argmax(dim=1)
    place = (layer << PLACE_LAYER_SHIFT | NO_HEAD) << HALF_BITS
    Report(state, loads_of(launch), NO_MANAGER).add(
        {
            Ring.REASONS: flag(Reason.VERIFY_REAL_KV, found),
            Ring.REQ_ROW: rows.req_rows * (launch is not Launch.SWEEP),
            Ring.SERIAL: rows.serials,
            Ring.SLOT: rows.slots,
            Ring.POSITION: position,
            Ring.EXPECTED_WORD0: pack_word0_tensor(torch.full_like(slot, -1), position),
            Ring.FOUND_WORD0: record[:, Record.WORD0],
            Ring.EXPECTED_LINEAGE: record[:, Record.LINEAGE],
            Ring.FOUND_LINEAGE: record[:, Record.LINEAGE],
            Ring.FOUND_WORD3: record[:, Record.WORD3],
            Ring.BATCH_ROW: torch.arange(len(slot), device=slot.device),
            Ring.EXPECTED_SLOT: rows.due_slots,
            Ring.FOUND_FINGERPRINT: place,
            Ring.COMPUTED_FINGERPRINT: place,
        }
    )


def fingerprint(source: Fingerprint, slots: Tensor, lineages: Tensor) -> Tensor:
    """Return the fingerprints [n] of state slots, of the convolution's inputs and of
    the matrices: of 16 bytes of every layer. The lineage chooses where, so that every
    place gets its turn.

    Raises:
        ValueError: a mode for all bytes, which the operations of the layers compare.
    """
    if source.mode is FingerprintMode.NONE:
        return torch.zeros_like(slots)
    require_samples(source)
    k_words, v_words = source.strided_words()
    assert k_words is not None and v_words is not None
    low = _sum_samples(k_words, slots, lineages)
    high = _sum_samples(v_words, slots, lineages)
    return (low & TOKEN_MASK) | (high << 32)


def _sum_samples(words: Tensor, slots: Tensor, lineages: Tensor) -> Tensor:
    layers, _, count = words.shape
    layer = torch.arange(layers, device=slots.device)[None, :]
    _, chunk = sample_place(
        mix64(lineages[:, None] + layer), layers=1, chunks=count // 2
    )
    index = 2 * chunk[..., None] + torch.arange(2, device=slots.device)
    found = words[layer[..., None], slots[:, None, None], index]
    return mix64(found ^ fingerprint_keys(layer[..., None], index)).sum((1, 2))
