"""The canary's read check in torch: the oracle of the native and Triton versions.

Works on all elements of all rows at once. Allocates and synchronises freely.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kv_canary.checks import Reason
from kv_canary.head_sums import whole_sums
from kv_canary.kernels.reference.hash import fingerprint
from kv_canary.kernels.reference.report import Report, flag
from kv_canary.kernels.reference.rows import (
    load_columns,
    load_seeds,
    load_slots,
    load_starts,
    shift_columns,
)
from kv_canary.layout import NO_FINGERPRINT, FingerprintMode
from kv_canary.records import (
    CLOCK_MASK,
    CLOCK_SHIFT,
    POISON_WORD,
    TOKEN_MASK,
    Counter,
    Launch,
    Phase,
    Record,
    Ring,
    lineage_terms,
    pack_word0_tensor,
)
from kv_canary.view import ANY_REACH, NO_MANAGER

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.pool_checks import PoolChecks
    from kv_canary.state import CanaryState
    from kv_canary.view import ForwardView, KVReadView


class _Elements(NamedTuple):
    """The elements that the rows read, row after row; all [n].

    Fields:
        row: row of the batch. element: number in the row. slot: -1 if unreadable.
        expected_slot: slot by the table of requests, or where the forward writes.
        is_prefix: whether the token was in KV before this forward.
        in_range: whether the slot is in the pool.
    """

    row: Tensor
    element: Tensor
    position: Tensor
    slot: Tensor
    expected_slot: Tensor
    is_prefix: Tensor
    in_range: Tensor


class _Records(NamedTuple):
    """The records of elements; all [n].

    Fields:
        reads: elements whose records are compared; the others read record 0.
        head, tail: int64 [n, 4]. freed, halved: whether both halves are poison, or only
            one.
    """

    reads: Tensor
    head: Tensor
    tail: Tensor
    freed: Tensor
    halved: Tensor

    @property
    def sound(self) -> Tensor:
        return self.reads & ~self.freed & ~self.halved


def verify(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    table: KVReadView,
    steps_phase: bool = True,
) -> None:
    """Check every slot that is about to be read. A finding adds a ring entry, and bits
    to the verdict of its request row.

    Elements below `prefix_lens` are compared with their records, the others with
    `out_cache_loc`.

    Args:
        table: one of `view.reads`.
        steps_phase: check that the phase of `view.manager` is IDLE, and set it to
            AFTER_VERIFY.
    """
    sweep = checks.req_to_token is None
    manager = view.manager if steps_phase else NO_MANAGER
    report = Report(state, Launch.SWEEP if sweep else Launch.VERIFY, manager)
    report.step_phase(manager, Phase.IDLE, Phase.AFTER_VERIFY)
    state.counters[Counter.SWEEP_LAUNCHES if sweep else Counter.VERIFY_LAUNCHES] += 1
    lens = table.read_lens.clamp(min=0) * (view.req_rows != 0)
    first = torch.zeros_like(lens)
    if table.first_position is not None:
        first = table.first_position
    at = _find_elements(state, view, checks, table, lens, first)
    columns = {
        Ring.REASONS: _check_slots(at, table, sweep=sweep),
        Ring.REQ_ROW: view.req_rows[at.row] * (not sweep),
        Ring.SERIAL: view.serials[at.row],
        Ring.SLOT: at.slot,
        Ring.POSITION: at.position,
        Ring.EXPECTED_WORD0: pack_word0_tensor(
            torch.full_like(at.slot, -1), at.position
        ),
        Ring.BATCH_ROW: at.row,
        Ring.EXPECTED_SLOT: at.expected_slot,
    }
    _check_records(state, view, checks, table, at, columns)
    report.add(columns)
    report.add(_check_length(view, table, first, lens, sweep=sweep))
    report.add(_check_counting(view, table, first, sweep=sweep))
    visited = Counter.SWEPT_SLOTS if sweep else Counter.VERIFIED_SLOTS
    state.counters[visited] += at.is_prefix.sum()


def _find_elements(
    state: CanaryState,
    rows: ForwardView,
    checks: PoolChecks,
    table: KVReadView,
    lens: Tensor,
    first: Tensor,
) -> _Elements:
    row = torch.repeat_interleave(lens)
    element = torch.arange(len(row), device=row.device) - (lens.cumsum(0) - lens)[row]
    position = first[row] + element
    slot = load_slots(table, row, element)
    is_prefix = position < rows.prefix_lens[row]
    starts, extends = load_starts(rows)
    new = position - rows.prefix_lens[row]
    is_new = ~is_prefix & (new < extends[row])
    place = (starts[row] + new) * is_new
    new_slot = load_columns(rows.out_cache_loc[None], row * 0, place)
    expected_slot = torch.where(is_new, new_slot, -1)
    if checks.req_to_token is not None:
        column = shift_columns(rows, row, position)
        held = load_columns(checks.req_to_token, rows.req_rows[row], column)
        expected_slot = torch.where(is_prefix, held, expected_slot)
    in_range = (slot >= 0) & (slot < state.num_slots)
    return _Elements(row, element, position, slot, expected_slot, is_prefix, in_range)


def _check_slots(at: _Elements, table: KVReadView, *, sweep: bool) -> Tensor:
    """Return READ_SET and READ_SCRATCH for each element."""
    is_checked = ~at.is_prefix if sweep else torch.ones_like(at.is_prefix)
    wrong = ~at.in_range | (is_checked & (at.slot != at.expected_slot))
    return flag(Reason.READ_SET, wrong) | flag(
        Reason.READ_SCRATCH, _is_scratch(at, table)
    )


def _is_scratch(at: _Elements, table: KVReadView) -> Tensor:
    return at.is_prefix & at.in_range & (at.slot < table.page_size)


def _check_length(
    rows: ForwardView, table: KVReadView, first: Tensor, lens: Tensor, *, sweep: bool
) -> dict[Ring, Tensor]:
    """Return entries for rows whose elements end or begin wrongly: a READ_SET with slot
    -1 at the missing position.

    A row must reach its last new token, or the end of its prefix if the view excludes
    new tokens, and begin where the reach of the view demands.
    """
    live = rows.req_rows != 0
    _, extends = load_starts(rows)
    end = first + lens
    short = end < rows.prefix_lens + extends
    if not table.takes_new:
        short &= end > rows.prefix_lens
    short = live & (short | (end < rows.prefix_lens))
    due = (rows.prefix_lens - table.reach).clamp(min=0)
    late = live & (first > due) & (table.reach != ANY_REACH)
    missing = torch.where(late, due, end)
    return _row_entries(rows, short | late, missing, sweep=sweep)


def _check_counting(
    rows: ForwardView, table: KVReadView, first: Tensor, *, sweep: bool
) -> dict[Ring, Tensor]:
    """Return entries for rows whose prefix or new tokens attention counts differently
    from the forward: a READ_SET with slot -1 at the first due position that differs."""
    live, nowhere = rows.req_rows != 0, torch.iinfo(torch.int64).max
    differs = torch.full_like(first, nowhere)
    if table.prefix_lens is not None:
        is_wrong = first + table.prefix_lens != rows.prefix_lens
        differs = torch.where(live & is_wrong, rows.prefix_lens, differs)
    if table.positions is not None:
        starts, counts = load_starts(rows)
        row = torch.repeat_interleave(counts)
        number = torch.arange(len(row), device=row.device)
        place = starts[row] + number - (counts.cumsum(0) - counts)[row]
        due = rows.positions[place]
        is_wrong = first[row] + table.positions[place] != due
        due = torch.where(is_wrong, due, nowhere)
        differs = differs.scatter_reduce(0, row, due, "amin")
    return _row_entries(rows, differs != nowhere, differs, sweep=sweep)


def _row_entries(
    rows: ForwardView, is_wrong: Tensor, position: Tensor, *, sweep: bool
) -> dict[Ring, Tensor]:
    """Return a READ_SET with slot -1 for each wrong row, at a position [R]."""
    return {
        Ring.REASONS: flag(Reason.READ_SET, is_wrong),
        Ring.REQ_ROW: rows.req_rows * (not sweep),
        Ring.SERIAL: rows.serials,
        Ring.POSITION: position,
        Ring.EXPECTED_WORD0: pack_word0_tensor(-torch.ones_like(position), position),
        Ring.BATCH_ROW: torch.arange(len(position), device=position.device),
    }


def _check_records(
    state: CanaryState,
    rows: ForwardView,
    checks: PoolChecks,
    table: KVReadView,
    at: _Elements,
    columns: dict[Ring, Tensor],
) -> None:
    """Add findings about the prefix's records to `columns`."""
    reads = at.is_prefix & at.in_range & ~_is_scratch(at, table)
    slot = at.slot * reads
    head, tail = state.head[slot], state.tail[slot] * reads[:, None]
    halves = head[:, 0] == POISON_WORD, tail[:, 0] == POISON_WORD
    records = _Records(
        reads, head, tail, freed=halves[0] & halves[1], halved=halves[0] ^ halves[1]
    )
    reasons = _check_halves(records)
    is_moved = records.sound & (tail[:, 0] >> 32 != at.position)
    reasons |= flag(Reason.VERIFY_POSITION, is_moved)
    unlike, expected = _check_lineages(state, rows, checks, table, at, records)
    reasons |= unlike
    if checks.tokens is not None:
        reasons |= _check_tokens(rows, checks, checks.tokens, at, records, columns)
    reasons |= _check_bytes(state, rows, checks, at, records, columns)
    columns[Ring.REASONS] |= reasons * reads
    columns[Ring.FOUND_WORD0] = tail[:, 0]
    columns[Ring.EXPECTED_LINEAGE] = expected
    columns[Ring.FOUND_LINEAGE] = tail[:, 1]
    columns[Ring.FOUND_WORD3] = tail[:, 3]


def _check_halves(records: _Records) -> Tensor:
    """Return VERIFY_FREED and VERIFY_TORN for each record."""
    head, tail = records.head, records.tail
    differ = (head[:, [0, 1, 3]] != tail[:, [0, 1, 3]]).any(dim=1)
    torn = records.halved | (differ & ~records.freed)
    return flag(Reason.VERIFY_FREED, records.freed) | flag(Reason.VERIFY_TORN, torn)


def _check_lineages(
    state: CanaryState,
    rows: ForwardView,
    checks: PoolChecks,
    table: KVReadView,
    at: _Elements,
    records: _Records,
) -> tuple[Tensor, Tensor]:
    """Return reasons and the expected lineages, or 0 if unknown: VERIFY_LINEAGE by the
    preceding record, VERIFY_TOKEN by the row, for the last element of a prefix."""
    previous = _find_previous(rows, checks, table, at)
    readable = (previous >= table.page_size) & (previous < state.num_slots)
    before = state.tail[previous * readable]
    is_first = at.position == 0
    known = (readable & (before[:, 0] != POISON_WORD)) | is_first
    known &= records.sound
    parent = torch.where(is_first, load_seeds(rows)[at.row], before[:, 1])
    token, position = records.tail[:, 0] & TOKEN_MASK, records.tail[:, 0] >> 32
    own = lineage_terms(token, position, rows.salts[at.row])
    expected = torch.where(known, parent + own, 0)
    found = records.tail[:, 1]
    reasons = flag(Reason.VERIFY_LINEAGE, known & (expected != found))
    if checks.req_to_token is not None:
        lineage_rows = rows.req_rows if rows.lineage_rows is None else rows.lineage_rows
        last = records.sound & (at.position == rows.prefix_lens[at.row] - 1)
        due = state.expected_lineage[lineage_rows[at.row]]
        expected = torch.where(last, due, expected)
        reasons |= flag(Reason.VERIFY_TOKEN, last & (expected != found))
    return reasons, expected


def _find_previous(
    rows: ForwardView, checks: PoolChecks, table: KVReadView, at: _Elements
) -> Tensor:
    """Return the slot of the element before each one, or -1."""
    is_first = at.element == 0
    previous = torch.where(is_first, -1, at.slot.roll(1))
    if table.prev_slots is not None:
        previous = torch.where(is_first, table.prev_slots[at.row], previous)
    elif checks.req_to_token is not None:
        column = shift_columns(rows, at.row, at.position - 1)
        held = load_columns(checks.req_to_token, rows.req_rows[at.row], column)
        previous = torch.where(is_first, held, previous)
    return previous


def _check_tokens(
    rows: ForwardView,
    checks: PoolChecks,
    tokens: Tensor,
    at: _Elements,
    records: _Records,
    columns: dict[Ring, Tensor],
) -> Tensor:
    """Return VERIFY_TOKEN for each token that the host knows."""
    truth = load_columns(
        tokens, rows.req_rows[at.row], at.position + checks.token_offset
    )
    is_known = records.sound & (truth >= 0)
    columns[Ring.EXPECTED_WORD0] = torch.where(
        is_known,
        pack_word0_tensor(truth, at.position),
        columns[Ring.EXPECTED_WORD0],
    )
    token = records.tail[:, 0] & TOKEN_MASK
    return flag(Reason.VERIFY_TOKEN, is_known & (truth != token))


def _check_bytes(
    state: CanaryState,
    rows: ForwardView,
    checks: PoolChecks,
    at: _Elements,
    records: _Records,
    columns: dict[Ring, Tensor],
) -> Tensor:
    """Return VERIFY_REAL_KV for the slots whose turn it is."""
    source = checks.fingerprint if checks.compares_bytes else NO_FINGERPRINT
    slot, found = at.slot * records.reads, records.tail[:, 1]
    due = records.sound & (source.mode is not FingerprintMode.NONE)
    if checks.skips_new:
        written = (records.tail[:, Record.WORD3] >> CLOCK_SHIFT) & CLOCK_MASK
        due = due & (written != (state.clock & CLOCK_MASK))
    if source.mode is FingerprintMode.ROTATE:
        ahead = -(slot + rows.prefix_lens[at.row]) % source.rotation_period
        due = due & (ahead < rows.max_advance(load_starts(rows)[1])[at.row])
    computed = torch.zeros_like(found)
    computed[due] = fingerprint(source, slot[due], found[due])
    kept = records.tail[:, Record.FINGERPRINT]
    if source.sums is not None:
        kept = torch.where(due, whole_sums(source.sums[slot]), 0)
    if source.mode in (FingerprintMode.ROTATE, FingerprintMode.ALL):
        state.counters[Counter.REHASHED_SLOTS] += due.sum()
    columns[Ring.FOUND_FINGERPRINT] = kept
    columns[Ring.COMPUTED_FINGERPRINT] = computed
    return flag(Reason.VERIFY_REAL_KV, due & (computed != kept))
