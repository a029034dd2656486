"""The canary's read check in torch: the oracle of the native and Triton versions.

Vectorised over all elements of all rows; allocates and synchronises as it likes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.checks import Reason
from kv_canary.hashing import mix64
from kv_canary.head_sums import head_sums, whole_sums
from kv_canary.layout import NO_FINGERPRINT, Fingerprint, FingerprintMode
from kv_canary.records import (
    POISON_WORD,
    RING_WORDS,
    TOKEN_MASK,
    Counter,
    Launch,
    Phase,
    Record,
    Ring,
    fingerprint_keys,
    lineage_terms,
    pack_word0_tensor,
    ring_tag,
    sample_place,
)
from kv_canary.view import ANY_REACH, NO_MANAGER, ForwardView, KVReadView

if TYPE_CHECKING:
    from kv_canary.pool_checks import PoolChecks
    from kv_canary.state import CanaryState


def seeds_of(rows: ForwardView) -> Tensor:
    """Lineages before position 0 of rows [R]."""
    if rows.seed_table is not None:
        return rows.seed_table[rows.req_rows]
    return torch.zeros_like(rows.salts) if rows.seeds is None else rows.seeds


class Report:
    """Appends ring entries of one launch and sets the verdicts of their rows."""

    def __init__(
        self, state: CanaryState, launch: Launch, manager: int, *, clock_offset: int = 0
    ) -> None:
        """`clock_offset`: of the forward that the entries are about, to the clock."""
        self._clock_offset = clock_offset
        self._state = state
        self._tag = ring_tag(launch, manager, state.pool)

    def add(self, columns: dict[Ring, Tensor]) -> None:
        """`columns` of [n]; what is missing is 0, a slot -1. Entries without a reason
        are dropped."""
        state = self._state
        bad = columns[Ring.REASONS] != 0
        n = int(bad.sum())
        entries = state.ring.new_zeros(n, RING_WORDS)
        entries[:, [Ring.SLOT, Ring.EXPECTED_SLOT]] = -1
        entries[:, Ring.CLOCK] = state.clock + self._clock_offset
        entries[:, Ring.TAG] = self._tag
        for column, values in columns.items():
            entries[:, column] = values[bad]
        start = int(state.ring_count)
        free = state.ring[start:]
        free[:n] = entries[: free.shape[0]]
        state.ring_count.add_(n)
        for reason in Reason:
            has = (entries[:, Ring.REASONS] & reason) != 0
            hit = entries[has, Ring.REQ_ROW]
            state.verdict[hit] |= reason

    def step_phase(self, manager: int, due: Phase, following: Phase) -> None:
        if manager == NO_MANAGER:
            return
        found = self._state.phase[manager : manager + 1].to(torch.int64)
        one = torch.ones_like(found)
        self.add(
            {
                Ring.REASONS: torch.where(found != due, int(Reason.PHASE), 0),
                Ring.POSITION: -one,
                Ring.BATCH_ROW: -one,
                Ring.EXPECTED_WORD0: one * due,
                Ring.FOUND_WORD0: found,
            }
        )
        self._state.phase[manager] = following


def fingerprints(source: Fingerprint, slots: Tensor, lineages: Tensor) -> Tensor:
    """Fingerprints [n] of slots [n] whose records have these lineages."""
    if source.mode is FingerprintMode.NONE:
        return torch.zeros_like(slots)
    if source.sums is not None:
        return whole_sums(sums_of(source, slots))
    k_words, v_words = source.strided_words()
    assert k_words is not None and v_words is not None
    low = _word_sums(source.mode, k_words, slots, lineages)
    high = _word_sums(source.mode, v_words, slots, lineages)
    return (low & TOKEN_MASK) | (high << 32)


def sums_of(source: Fingerprint, slots: Tensor) -> Tensor:
    """`head_sums` of what lies in slots [n], int32 [n, layers, heads]."""
    assert source.sums is not None
    heads = source.sums.shape[2]
    k, v = (
        words[:, slots].unflatten(2, (heads, -1)).transpose(0, 1)
        for words in source.strided_words()
        if words is not None
    )
    return head_sums(k, v)


def _word_sums(
    mode: FingerprintMode, words: Tensor, slots: Tensor, lineages: Tensor
) -> Tensor:
    n_layers, _, n_words = words.shape
    if mode is FingerprintMode.PARTIAL:
        layer, chunk = sample_place(lineages, layers=n_layers, chunks=n_words // 2)
        layer = layer[:, None]
        index = 2 * chunk[:, None] + torch.arange(2, device=slots.device)
        return mix64(
            words[layer, slots[:, None], index] ^ fingerprint_keys(layer, index)
        ).sum(dim=1)
    layers = torch.arange(n_layers, device=slots.device)[:, None]
    keys = fingerprint_keys(layers, torch.arange(n_words, device=slots.device))
    return mix64(words[:, slots] ^ keys[:, None]).sum(dim=(0, 2))


def columns_of(rows: ForwardView, row: Tensor, positions: Tensor) -> Tensor:
    """Columns of `req_to_token` that hold positions of batch rows."""
    if rows.shift_from is None or rows.column_shift is None:
        return positions
    shift = torch.where(positions >= rows.shift_from[row], rows.column_shift[row], 0)
    return positions + shift


def look_up(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """int64 entries, -1 where a column is outside."""
    if matrix.shape[1] == 0:
        return torch.full_like(columns, -1)
    inside = (columns >= 0) & (columns < matrix.shape[1])
    return torch.where(inside, matrix[rows, columns * inside].to(torch.int64), -1)


def row_starts(rows: ForwardView) -> tuple[Tensor, Tensor]:
    """(first new token, number of new tokens) of each row, cut where [T] ends."""
    if rows.qo_indptr is None:
        starts = torch.arange(rows.num_rows, device=rows.req_rows.device)
    else:
        starts = rows.qo_indptr[:-1]
    live = rows.req_rows != 0
    counts = torch.minimum(rows.extend_lens, rows.num_tokens - starts)
    return starts, counts.clamp(min=0) * live


def slots_of(table: KVReadView, row: Tensor, element: Tensor) -> Tensor:
    """Slots [N] of elements of batch rows, as in `KVReadView`; -1 where unreadable."""
    if table.page_table is not None:
        at = row if table.row_index is None else table.row_index[row]
        inside = (at >= 0) & (at < table.page_table.shape[0])
        entry = look_up(table.page_table, at * inside, element // table.page_size)
        slot = entry + element % table.page_size
        return torch.where(inside & (entry >= 0), slot, -1)
    assert table.indptr is not None
    size = table.entry_size
    at = table.indptr.to(torch.int64)[row] + element // size
    entry = look_up(table.entries[None], row * 0, at)
    return torch.where(entry >= 0, entry * size + element % size, -1)


def verify(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    table: KVReadView,
    steps_phase: bool = True,
) -> None:
    """Check every slot that is about to be read; each finding is a ring entry and bits
    in the verdict of its request row.

    Elements below `prefix_lens` are compared with their records, the others with
    `out_cache_loc`. A row whose elements end before its prefix, or before its last
    new token, is a READ_SET at the position where they end, with slot -1; they may end
    with the prefix where the view does not take new tokens. One whose elements begin
    later than the reach of the view demands is one at the position where it demands it.

    Args:
        table: one of `view.reads`.
        steps_phase: whether the phase of `view.manager` must be IDLE and becomes
            AFTER_VERIFY.
    """
    rows, req_to_token = view, checks.req_to_token
    compared = checks.fingerprint if checks.compares_bytes else NO_FINGERPRINT
    tokens, token_offset = checks.tokens, checks.token_offset
    manager = view.manager if steps_phase else NO_MANAGER
    sweep = req_to_token is None
    report = Report(state, Launch.SWEEP if sweep else Launch.VERIFY, manager)
    report.step_phase(manager, Phase.IDLE, Phase.AFTER_VERIFY)
    state.counters[Counter.SWEEP_LAUNCHES if sweep else Counter.VERIFY_LAUNCHES] += 1
    live = rows.req_rows != 0
    lens = table.read_lens.clamp(min=0) * live
    row = torch.repeat_interleave(lens)
    element = torch.arange(len(row), device=row.device) - (lens.cumsum(0) - lens)[row]
    first = torch.zeros_like(lens)
    if table.first_position is not None:
        first = table.first_position
    position = first[row] + element
    slot = slots_of(table, row, element)
    req = rows.req_rows[row]
    in_range = (slot >= 0) & (slot < state.num_slots)
    is_prefix = position < rows.prefix_lens[row]

    starts, extends = row_starts(rows)
    new = position - rows.prefix_lens[row]
    is_new = ~is_prefix & (new < extends[row])
    new_slot = look_up(rows.out_cache_loc[None], row * 0, (starts[row] + new) * is_new)
    expected_slot = torch.where(is_new, new_slot, -1)
    if req_to_token is not None:
        column = look_up(req_to_token, req, columns_of(rows, row, position))
        expected_slot = torch.where(is_prefix, column, expected_slot)
    is_checked = ~is_prefix if sweep else torch.ones_like(is_prefix)
    wrong = ~in_range | (is_checked & (slot != expected_slot))
    reasons = torch.where(wrong, int(Reason.READ_SET), 0)
    scratch = is_prefix & in_range & (slot < table.page_size)
    reasons |= torch.where(scratch, int(Reason.READ_SCRATCH), 0)

    columns = {
        Ring.REASONS: reasons,
        Ring.REQ_ROW: req * (not sweep),
        Ring.SERIAL: rows.serials[row],
        Ring.SLOT: slot,
        Ring.POSITION: position,
        Ring.EXPECTED_WORD0: pack_word0_tensor(torch.full_like(slot, -1), position),
        Ring.BATCH_ROW: row,
        Ring.EXPECTED_SLOT: expected_slot,
    }
    reads = is_prefix & in_range & ~scratch
    previous = torch.where(element > 0, slot.roll(1), -1)
    if table.prev_slots is not None:
        previous = torch.where(element == 0, table.prev_slots[row], previous)
    elif req_to_token is not None:
        column = look_up(req_to_token, req, columns_of(rows, row, position - 1))
        previous = torch.where(element == 0, column, previous)
    _check_records(
        state, rows, table, compared, columns, reads, previous, sweep, tokens,
        token_offset,
    )  # fmt: skip
    report.add(columns)

    end = first + lens
    short = end < rows.prefix_lens + extends
    if not table.takes_new:
        short &= end > rows.prefix_lens
    short = live & (short | (end < rows.prefix_lens))
    due = (rows.prefix_lens - table.reach).clamp(min=0)
    late = live & (first > due) & (table.reach != ANY_REACH)
    missing = torch.where(late, due, end)
    report.add(
        {
            Ring.REASONS: torch.where(short | late, int(Reason.READ_SET), 0),
            Ring.REQ_ROW: rows.req_rows * (not sweep),
            Ring.SERIAL: rows.serials,
            Ring.POSITION: missing,
            Ring.EXPECTED_WORD0: pack_word0_tensor(-torch.ones_like(end), missing),
            Ring.BATCH_ROW: torch.arange(len(end), device=end.device),
        }
    )
    visited = Counter.SWEPT_SLOTS if sweep else Counter.VERIFIED_SLOTS
    state.counters[visited] += is_prefix.sum()


def _check_records(
    state: CanaryState,
    rows: ForwardView,
    table: KVReadView,
    fingerprint: Fingerprint,
    columns: dict[Ring, Tensor],
    reads: Tensor,
    previous: Tensor,
    sweep: bool,
    tokens: Tensor | None,
    token_offset: int,
) -> None:
    """Add the findings about the records of the elements in `reads` to `columns`."""
    reasons, slot = columns[Ring.REASONS], columns[Ring.SLOT] * reads
    position, row = columns[Ring.POSITION], columns[Ring.BATCH_ROW]
    head, tail = state.head[slot], state.tail[slot] * reads[:, None]

    def flag(reason: Reason, where: Tensor) -> None:
        reasons.bitwise_or_(torch.where(where & reads, int(reason), 0))

    poisoned = [(part[:, 0] == POISON_WORD) for part in (head, tail)]
    freed, halved = poisoned[0] & poisoned[1], poisoned[0] ^ poisoned[1]
    flag(Reason.VERIFY_FREED, freed)
    differ = (head[:, [0, 1, 3]] != tail[:, [0, 1, 3]]).any(dim=1)
    flag(Reason.VERIFY_TORN, halved | (differ & ~freed))
    sound = reads & ~freed & ~halved
    token, found = tail[:, 0] & TOKEN_MASK, tail[:, 1]
    flag(Reason.VERIFY_POSITION, sound & (tail[:, 0] >> 32 != position))

    readable = (previous >= table.page_size) & (previous < state.num_slots)
    before = state.tail[previous * readable]
    known = readable & (before[:, 0] != POISON_WORD)
    seed = seeds_of(rows)[row]
    parent = torch.where(position == 0, seed, before[:, 1])
    known = sound & (known | (position == 0))
    own = lineage_terms(token, tail[:, 0] >> 32, rows.salts[row])
    expected = torch.where(known, parent + own, 0)
    flag(Reason.VERIFY_LINEAGE, known & (expected != found))
    if not sweep:
        lineage_rows = rows.req_rows if rows.lineage_rows is None else rows.lineage_rows
        last = sound & (position == rows.prefix_lens[row] - 1)
        expected = torch.where(
            last, state.expected_lineage[lineage_rows[row]], expected
        )
        flag(Reason.VERIFY_TOKEN, last & (expected != found))
    if tokens is not None:
        truth = look_up(tokens, rows.req_rows[row], position + token_offset)
        is_known = sound & (truth >= 0)
        flag(Reason.VERIFY_TOKEN, is_known & (truth != token))
        packed = pack_word0_tensor(truth, position)
        word0 = columns[Ring.EXPECTED_WORD0]
        columns[Ring.EXPECTED_WORD0] = torch.where(is_known, packed, word0)
    due = sound & (fingerprint.mode is not FingerprintMode.NONE)
    if fingerprint.mode is FingerprintMode.ROTATE:
        period = fingerprint.rotation_period
        ahead = -(slot + rows.prefix_lens[row]) % period
        due = due & (ahead < rows.max_advance(row_starts(rows)[1])[row])
    computed = torch.zeros_like(found)
    computed[due] = fingerprints(fingerprint, slot[due], found[due])
    kept = tail[:, Record.FINGERPRINT]
    if fingerprint.sums is not None:
        kept = torch.where(due, whole_sums(fingerprint.sums[slot]), 0)
    flag(Reason.VERIFY_REAL_KV, due & (computed != kept))
    if fingerprint.mode in (FingerprintMode.ROTATE, FingerprintMode.ALL):
        state.counters[Counter.REHASHED_SLOTS] += due.sum()
    columns[Ring.FOUND_WORD0] = tail[:, 0]
    columns[Ring.EXPECTED_LINEAGE] = expected
    columns[Ring.FOUND_LINEAGE] = found
    columns[Ring.FOUND_WORD3] = tail[:, 3]
    columns[Ring.FOUND_FINGERPRINT] = kept
    columns[Ring.COMPUTED_FINGERPRINT] = computed
