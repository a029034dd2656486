"""The canary's record writes in torch: the oracle of the native and Triton versions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kv_canary.carried import FACTOR, KEY, CarriedRows
from kv_canary.checks import Reason
from kv_canary.findings import RING, STATUS_WORDS
from kv_canary.hashing import MASK64, to_signed64
from kv_canary.kernels.reference import (
    Report,
    columns_of,
    fingerprints,
    look_up,
    row_starts,
    seeds_of,
    sums_of,
    verify,
)
from kv_canary.layout import FingerprintMode
from kv_canary.records import (
    CLOCK_MASK,
    CLOCK_SHIFT,
    POISON_WORD,
    SENTINEL,
    SERIAL_MASK,
    TOKEN_MASK,
    UNKNOWN,
    Counter,
    Expected,
    Launch,
    Phase,
    Request,
    Ring,
    WriterKind,
    lineage_terms,
    pack_word0_tensor,
    pack_word3_tensor,
)
from kv_canary.view import NO_MANAGER

if TYPE_CHECKING:
    from kv_canary.accepted import AcceptedPath, AcceptedWords, SampledTokens
    from kv_canary.layout import Fingerprint
    from kv_canary.pool_checks import PoolChecks
    from kv_canary.state import CanaryState
    from kv_canary.view import ForwardView


class _NewTokens(NamedTuple):
    """The live new tokens, row after row; all [n]."""

    place: Tensor
    row: Tensor
    number: Tensor
    word0: Tensor
    lineage: Tensor
    word3: Tensor


def _base_lineages(state: CanaryState, rows: ForwardView) -> Tensor:
    lineage_rows = rows.req_rows if rows.lineage_rows is None else rows.lineage_rows
    known = state.expected_lineage[lineage_rows]
    return torch.where(rows.prefix_lens > 0, known, seeds_of(rows))


def _new_tokens(state: CanaryState, rows: ForwardView, kind: int) -> _NewTokens:
    starts, counts = row_starts(rows)
    row = torch.repeat_interleave(counts)
    ends = counts.cumsum(0)
    number = torch.arange(len(row), device=row.device) - (ends - counts)[row]
    index = starts[row] + number
    tokens, positions = rows.input_ids[index], rows.positions[index]
    terms = lineage_terms(tokens, positions, rows.salts[row])
    base = _base_lineages(state, rows)[row]
    if rows.parent_index is None:
        sums = terms.cumsum(0)
        lineage = base + sums - (sums - terms)[(ends - counts)[row]]
    else:
        lineage = base + _ancestor_sums(rows, starts[row], counts[row], index, terms)
    word3 = pack_word3_tensor(state.clock, kind, rows.serials[row])
    return _NewTokens(
        index, row, number, pack_word0_tensor(tokens, positions), lineage, word3
    )


def _depths(rows: ForwardView, new: _NewTokens) -> tuple[Tensor, Tensor]:
    """(ancestors within the row, whether all of them precede their children and the
    walk ends at -1) of the new tokens of trees."""
    assert rows.parent_index is not None
    starts, _ = row_starts(rows)
    first = starts[new.row]
    child, node = new.place, rows.parent_index[new.place]
    depth = torch.zeros_like(node)
    for _ in range(rows.max_depth):
        active = (node >= first) & (node < child)
        depth += active
        child = torch.where(active, node, child)
        node = torch.where(active, rows.parent_index[node * active], node)
    return depth, node == -1


def _check_shape(rows: ForwardView, new: _NewTokens) -> tuple[Tensor, Tensor]:
    """(reasons, positions that are due) of the new tokens, from their places: in a
    tree the depth counts, and a token attends to what its parent does and itself; only
    the first of a row has no parent."""
    number = new.number
    if rows.parent_index is None:
        due = rows.prefix_lens[new.row] + number
        wrong = due != rows.positions[new.place]
        return torch.where(wrong, int(Reason.WRITE_POSITION), 0), due
    depth, is_sound = _depths(rows, new)
    position = rows.positions[new.place]
    parent = rows.parent_index[new.place]
    due = rows.prefix_lens[new.row] + depth
    is_orphan = (parent == -1) & (number > 0)
    due = torch.where(is_orphan, position, due)
    reasons = torch.where(due != position, int(Reason.WRITE_POSITION), 0)
    wrong = ~is_sound | is_orphan
    if rows.tree_mask is not None:
        column = torch.arange(rows.tree_mask.shape[1], device=number.device)
        has_parent = (parent >= 0) & (parent < new.place)
        wanted = rows.tree_mask[parent * has_parent] & has_parent[:, None]
        wanted |= column == number[:, None]
        wrong |= (rows.tree_mask[new.place] != wanted).any(dim=1)
    return reasons | torch.where(wrong, int(Reason.TREE_SHAPE), 0), due


def _check_request(
    state: CanaryState, rows: ForwardView, new: _NewTokens
) -> tuple[Tensor, Tensor]:
    """(reasons, word 0 that is due) of the first new token of each row, from what is
    known of its request; branches have no request of their own."""
    none = torch.zeros_like(new.number)
    if rows.lineage_rows is not None:
        return none, new.word0
    known = state.requests[rows.req_rows[new.row]]
    serial, due = known[:, Request.SERIAL], known[:, Request.NEXT_WORD0]
    is_first = new.number == 0
    is_other = is_first & (serial != UNKNOWN) & (serial != rows.serials[new.row])
    unlike = torch.where(is_first & (due != UNKNOWN), due ^ new.word0, 0)
    reasons = torch.where(is_other, int(Reason.ROW_OWNER), 0)
    reasons |= torch.where(unlike & TOKEN_MASK != 0, int(Reason.WRITE_TOKEN), 0)
    reasons |= torch.where(unlike >> 32 != 0, int(Reason.WRITE_POSITION), 0)
    return reasons, torch.where(unlike != 0, due, new.word0)


def _ancestor_sums(
    rows: ForwardView, starts: Tensor, counts: Tensor, index: Tensor, terms: Tensor
) -> Tensor:
    assert rows.parent_index is not None
    of_token = terms.new_zeros(rows.num_tokens)
    of_token[index] = terms
    total, node = terms.clone(), rows.parent_index[index]
    active = torch.ones_like(node, dtype=torch.bool)
    for _ in range(rows.max_depth):
        active &= (node >= starts) & (node < starts + counts)
        total += torch.where(active, of_token[node * active], 0)
        node = rows.parent_index[node * active]
    return total


def _padded_writes(rows: ForwardView, page_size: int) -> dict[Ring, Tensor]:
    """Writes of padded rows: all they may write is scratch."""
    place = torch.arange(rows.num_tokens, device=rows.positions.device)
    row = place
    if rows.qo_indptr is not None:
        row = torch.searchsorted(rows.qo_indptr, place, right=True) - 1
        is_inside = row < rows.num_rows
        place, row = place[is_inside], row[is_inside]
    slot, position = rows.out_cache_loc[place], rows.positions[place]
    is_padded = rows.req_rows[row] == 0
    stray = is_padded & ((slot < 0) | (slot >= page_size))
    return {
        Ring.REASONS: torch.where(stray, int(Reason.WRITE_FOREIGN), 0),
        Ring.SLOT: slot,
        Ring.POSITION: position,
        Ring.EXPECTED_WORD0: pack_word0_tensor(rows.input_ids[place], position),
        Ring.BATCH_ROW: row,
    }


def _is_own_prefix(
    rows: ForwardView, new: _NewTokens, req_to_token: Tensor, slot: Tensor, old: Tensor
) -> Tensor:
    """Whether the row reads the slots [n] as part of its prefix, by their records."""
    position = old[:, 0] >> 32
    column = columns_of(rows, new.row, position)
    held = look_up(req_to_token, rows.req_rows[new.row], column)
    return (position < rows.prefix_lens[new.row]) & (held == slot)


def _check_published(
    rows: ForwardView, new: _NewTokens, published: Tensor, offset: int
) -> tuple[Tensor, Tensor]:
    """(reasons, word 0 that was due) of the new tokens that have been published; a
    draft step, and a verification after its roots, read proposals."""
    due = rows.prefix_lens[new.row] + new.number
    token = look_up(published, rows.req_rows[new.row], due + offset)
    is_known = token >= 0
    if rows.writer_kind is WriterKind.VERIFY:
        is_known &= new.number == 0
    is_known &= rows.writer_kind is not WriterKind.DRAFT
    wrong = is_known & (token != rows.input_ids[new.place])
    reasons = torch.where(wrong, int(Reason.WRITE_TOKEN), 0)
    return reasons, torch.where(wrong, pack_word0_tensor(token, due), new.word0)


def before_model(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    """`verify` of the first of `view.reads`, then `write_head`: on the CPU one after
    the other, in Triton at once (`triton_before.py`)."""
    verify(state, view, checks, view.reads[0])
    write_head(state, view, checks)


def write_head(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    """Check where the new tokens will be written and write their head records.

    Lineages start from `expected_lineage`, or from the seed where the prefix is empty.
    Without `checks.req_to_token` slots are not compared with columns; the j-th new
    token of a row belongs in column `prefix_lens` + j. The phase AFTER_VERIFY becomes
    AFTER_HEAD.
    """
    rows, manager, writer_kind = view, view.manager, view.writer_kind
    page_size, req_to_token = checks.page_size, checks.req_to_token
    published, oracle = checks.published, view.oracle
    report = Report(state, Launch.HEAD, manager)
    report.step_phase(manager, Phase.AFTER_VERIFY, Phase.AFTER_HEAD)
    state.counters[Counter.HEAD_LAUNCHES] += 1
    new = _new_tokens(state, rows, writer_kind)
    slot, serial = rows.out_cache_loc[new.place], rows.serials[new.row]
    position = rows.positions[new.place]
    scratch = (slot >= 0) & (slot < page_size)
    writable = (slot >= page_size) & (slot < state.num_slots)
    old = state.head[slot * writable] * writable[:, None]
    is_now = (old[:, 3] >> CLOCK_SHIFT) & CLOCK_MASK == state.clock & CLOCK_MASK
    is_taken = (old[:, 3] ^ serial) & SERIAL_MASK != 0
    expected_slot = torch.full_like(slot, -1)
    foreign = ~writable & ~scratch
    if req_to_token is not None:
        column = columns_of(rows, new.row, rows.prefix_lens[new.row] + new.number)
        expected_slot = look_up(req_to_token, rows.req_rows[new.row], column)
        foreign |= ~scratch & (slot != expected_slot)
        is_taken |= _is_own_prefix(rows, new, req_to_token, slot, old)
    foreign |= writable & (old[:, 0] != POISON_WORD) & ~is_now & is_taken
    reasons = torch.where(scratch, int(Reason.WRITE_SCRATCH), 0)
    reasons |= torch.where(foreign, int(Reason.WRITE_FOREIGN), 0)
    wrong, due = _check_shape(rows, new)
    reasons |= wrong
    input_due = pack_word0_tensor(rows.input_ids[new.place], due)
    expected0, found0 = torch.where(wrong != 0, input_due, new.word0), old[:, 0]
    found0 = torch.where(wrong != 0, new.word0, found0)
    inputs = [_check_request(state, rows, new)]
    if published is not None:
        inputs.append(_check_published(rows, new, published, checks.token_offset))
    for unlike, due0 in inputs:
        reasons |= unlike
        expected0 = torch.where(due0 != new.word0, due0, expected0)
        found0 = torch.where(due0 != new.word0, new.word0, found0)
    if oracle is not None:
        tokens, positions = (part[new.place] for part in oracle)
        wrong = (tokens >= 0) & (tokens != rows.input_ids[new.place])
        reasons |= torch.where(wrong, int(Reason.WRITE_TOKEN), 0)
        misplaced = (positions >= 0) & (positions != position)
        reasons |= torch.where(misplaced, int(Reason.WRITE_POSITION), 0)
        expected0 = pack_word0_tensor(tokens, positions)
        found0 = torch.where(wrong | misplaced, new.word0, found0)
    report.add(
        {
            Ring.REASONS: reasons,
            Ring.REQ_ROW: rows.req_rows[new.row],
            Ring.SERIAL: serial,
            Ring.SLOT: slot,
            Ring.POSITION: position,
            Ring.EXPECTED_WORD0: expected0,
            Ring.FOUND_WORD0: found0,
            Ring.EXPECTED_LINEAGE: new.lineage,
            Ring.FOUND_LINEAGE: old[:, 1],
            Ring.FOUND_WORD3: old[:, 3],
            Ring.BATCH_ROW: new.row,
            Ring.EXPECTED_SLOT: expected_slot,
        }
    )
    report.add(_padded_writes(rows, page_size))
    zeros = torch.zeros_like(slot)
    record = torch.stack((new.word0, new.lineage, zeros, new.word3), dim=1)
    state.head[slot[writable]] = record[writable]
    _fill_sentinel(checks.fingerprint, slot[writable])
    state.counters[Counter.HEAD_SLOTS] += writable.sum()


def _fill_sentinel(fingerprint: Fingerprint, slot: Tensor) -> None:
    """Where all bytes are covered, make a store that does not happen show."""
    if fingerprint.mode is not FingerprintMode.ALL:
        return
    for words in fingerprint.strided_words():
        assert words is not None
        words[:, slot] = SENTINEL


def _is_missing(fingerprint: Fingerprint, slot: Tensor) -> Tensor:
    """Whether the first or the last word of a slot, of K or of V in some layer, still
    is the sentinel."""
    found = torch.zeros_like(slot, dtype=torch.bool)
    if fingerprint.mode is FingerprintMode.ALL:
        for words in fingerprint.strided_words():
            assert words is not None
            ends = words[:, slot][..., [0, -1]]
            found |= (ends == SENTINEL).any(dim=2).any(dim=0)
    return found


def _keep_bytes(fingerprint: Fingerprint, slot: Tensor, lineage: Tensor) -> Tensor:
    """Fingerprints for the records of slots; 0 where sums are kept instead."""
    if fingerprint.sums is None:
        return fingerprints(fingerprint, slot, lineage)
    fingerprint.sums[slot] = sums_of(fingerprint, slot)
    return torch.zeros_like(slot)


def write_tail(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    advance: bool,
    findings: Tensor | None,
) -> None:
    rows, manager, page_size = view, view.manager, checks.page_size
    writer_kind, fingerprint = view.writer_kind, checks.fingerprint
    report = Report(state, Launch.TAIL, manager)
    report.step_phase(manager, Phase.AFTER_HEAD, Phase.IDLE)
    state.counters[Counter.TAIL_LAUNCHES] += 1
    new = _new_tokens(state, rows, writer_kind)
    slot = rows.out_cache_loc[new.place]
    writable = (slot >= page_size) & (slot < state.num_slots)
    head = state.head[slot * writable]
    own = torch.stack((new.word0, new.lineage, new.word3), dim=1)
    alias = writable & (head[:, [0, 1, 3]] != own).any(dim=1)
    missing = writable & _is_missing(fingerprint, slot * writable)
    reasons = torch.where(alias, int(Reason.WRITE_ALIAS), 0)
    reasons |= torch.where(missing, int(Reason.WRITE_MISSING), 0)
    report.add(
        {
            Ring.REASONS: reasons,
            Ring.REQ_ROW: rows.req_rows[new.row],
            Ring.SERIAL: rows.serials[new.row],
            Ring.SLOT: slot,
            Ring.POSITION: rows.positions[new.place],
            Ring.EXPECTED_WORD0: new.word0,
            Ring.FOUND_WORD0: head[:, 0],
            Ring.EXPECTED_LINEAGE: new.lineage,
            Ring.FOUND_LINEAGE: head[:, 1],
            Ring.FOUND_WORD3: head[:, 3],
            Ring.BATCH_ROW: new.row,
        }
    )
    slot, lineage = slot[writable], new.lineage[writable]
    state.tail[slot] = torch.stack(
        (
            new.word0[writable],
            lineage,
            _keep_bytes(fingerprint, slot, lineage),
            new.word3[writable],
        ),
        dim=1,
    )
    state.counters[Counter.TAIL_SLOTS] += len(slot)
    state.clock.add_(1)
    if advance:
        _advance_lineage(state, rows)
    if findings is not None:
        gather_findings(state, rows.req_rows, findings)


def poison(state: CanaryState, slots: Tensor, n_live: Tensor | None) -> None:
    if n_live is not None:
        slots = slots[: int(n_live)]
    slots = slots[(slots >= 0) & (slots < state.num_slots)]
    for records in (state.head, state.tail):
        known = slots[records[slots, 0] != POISON_WORD]
        word3 = pack_word3_tensor(state.clock, WriterKind.POISON, records[known, 3])
        records[known, 0] = POISON_WORD
        records[known, 3] = word3


def move_records(state: CanaryState, dst: Tensor, src: Tensor) -> None:
    for records in (state.head, state.tail):
        records.index_copy_(0, dst, records.index_select(0, src))


def gather_findings(state: CanaryState, req_rows: Tensor, findings: Tensor) -> None:
    findings[:RING] = state.counters
    findings[RING] = state.ring_count[0]
    live = req_rows != 0
    verdicts = state.verdict[req_rows] * live
    findings[STATUS_WORDS:][: len(req_rows)] = verdicts
    state.verdict[req_rows[live]] = 0


def _advance_lineage(state: CanaryState, rows: ForwardView) -> None:
    if rows.stay_lens is not None:
        _, counts = row_starts(rows)
        staying = torch.minimum(rows.stay_lens, counts)
        rows = dataclasses.replace(rows, extend_lens=staying, stay_lens=None)
    _, counts = row_starts(rows)
    new = _new_tokens(state, rows, WriterKind.NONE)
    values = _base_lineages(state, rows)
    ends = counts.cumsum(0) - 1
    some = counts > 0
    values[some] = new.lineage[ends[some]]
    published = next(
        part
        for part in (rows.publish_rows, rows.lineage_rows, rows.req_rows)
        if part is not None
    )
    live = rows.req_rows != 0
    state.expected_lineage[published[live]] = values[live]


def finish_step(state: CanaryState, view: ForwardView, findings: Tensor) -> None:
    _advance_lineage(state, view)
    gather_findings(state, view.req_rows, findings)


def expect_rows(
    state: CanaryState, rows: Tensor, values: Tensor, seeds: Tensor | None
) -> None:
    state.expected_lineage[rows] = values[Expected.LINEAGE]
    state.requests[rows, Request.SERIAL] = values[Expected.SERIAL]
    state.requests[rows, Request.NEXT_WORD0] = UNKNOWN
    if seeds is not None:
        seeds[rows] = values[Expected.SEED]


def note_tokens(state: CanaryState, sampled: SampledTokens, marks: Tensor) -> None:
    req_rows, serials, tokens, prefix_lens, extend_lens = sampled
    words = pack_word0_tensor(tokens, prefix_lens + extend_lens)
    word0 = torch.where(tokens >= 0, words, UNKNOWN)
    live = req_rows != 0
    state.requests[req_rows[live], Request.NEXT_WORD0] = word0[live]
    marks[0], marks[1] = serials, word0


def send_tokens(
    state: CanaryState,
    sampled: SampledTokens,
    findings: Tensor,
    other_findings: Tensor | None,
    words: Tensor,
) -> None:
    rows = len(sampled.tokens)
    sizes = [rows, len(findings), 2 * rows]
    tokens, found, marks = words.split_with_sizes(sizes)
    tokens.copy_(sampled.tokens)
    found.copy_(findings)
    if other_findings is not None:
        found[RING:] |= other_findings[RING:]
    note_tokens(state, sampled, marks.view(2, rows))


def carry(state: CanaryState, rows: CarriedRows, checks: bool) -> None:
    live, found = _is_carried(rows), _carried_sums(rows)
    if not checks:
        rows.sums[rows.places[live]] = found[live]
        return
    due = rows.sums[rows.places.clamp(min=0)]
    request = torch.arange(len(rows.places), device=rows.places.device) // rows.group
    bad = live & (due != found)
    Report(state, Launch.CARRIED, NO_MANAGER).add(
        {
            Ring.REASONS: torch.where(bad, int(Reason.CARRIED_STATE), 0),
            Ring.REQ_ROW: rows.req_rows[request],
            Ring.SERIAL: rows.serials[request],
            Ring.POSITION: rows.positions[request],
            Ring.EXPECTED_LINEAGE: due,
            Ring.FOUND_LINEAGE: found,
            Ring.BATCH_ROW: request,
        }
    )


def _is_carried(rows: CarriedRows) -> Tensor:
    return (rows.req_rows != 0).repeat_interleave(rows.group) & (rows.places >= 0)


def _carried_sums(rows: CarriedRows) -> Tensor:
    _, known, *_ = rows.numbers
    sums = _carried_term(rows.serials.repeat_interleave(rows.group), -1)
    words: list[Tensor] = []
    if rows.words is not None:
        words += rows.words.long().unbind(1)
    if rows.ids is not None and rows.bits is not None:
        for k in range(known):
            words += [rows.ids[:, k], rows.bits[:, k].long()]
    for j, word in enumerate(words):
        sums = sums + _carried_term(word, j)
    return sums


def _carried_term(words: Tensor, place: int) -> Tensor:
    mixed = (words + to_signed64((place + 1) * KEY & MASK64)) * FACTOR
    return mixed ^ (mixed >> 32)


def _is_missed(path: AcceptedPath, last: Tensor) -> Tensor:
    """Whether a child of the last node of each row's path is the target's choice."""
    assert path.choices is not None
    choice = path.choices.view(-1)[last][:, None]
    is_child = path.parent_index == last[:, None]
    return (is_child & (path.tokens == choice)).any(dim=1)


def finish_accepted(
    state: CanaryState,
    draft: CanaryState,
    path: AcceptedPath,
    salts: Tensor,
    checks: bool,
    words: AcceptedWords,
) -> None:
    words.gained.copy_(path.gained)
    words.accept_lens.copy_(path.accept_lens)
    if checks:
        _check_accepted(state, path)
    note_tokens(state, path.last(), words.marks)
    finish_step(state, path.rows(salts), words.findings)
    gather_findings(draft, path.req_rows, words.draft_findings)


def _check_accepted(state: CanaryState, path: AcceptedPath) -> None:
    # The verification's own tail has advanced the clock.
    report = Report(state, Launch.ACCEPT, NO_MANAGER, clock_offset=-1)
    row = torch.arange(path.num_rows, device=path.req_rows.device)
    root = row * path.nodes
    length = path.accept_lens.clamp(1, path.width)
    bad = length != path.accept_lens
    place, wanted, found = torch.zeros_like(row), root * 0 - 1, path.accept_lens
    before, due = root, root
    for i in range(path.width):
        node = path.accept_index[:, i]
        inside = (node >= root) & (node < root + path.nodes)
        at = torch.where(inside, node, root)
        follows = path.predict.view(-1)[at]
        if i == 0:
            wrong = node != root
        else:
            wrong = ~inside | (path.parent_index.view(-1)[at] != before)
            wrong |= path.tokens.view(-1)[at] != due
        choice = follows if path.choices is None else path.choices.view(-1)[at]
        wrong |= (path.gained[:, i] != follows) | (choice != follows)
        is_first = wrong & (i < length) & ~bad
        place = torch.where(is_first, i, place)
        wanted = torch.where(is_first, choice, wanted)
        found = torch.where(is_first, path.gained[:, i], found)
        bad |= is_first
        before, due = torch.where(i < length, at, before), follows
    if path.choices is not None:
        missed = _is_missed(path, before) & (length < path.width) & ~bad
        place = torch.where(missed, length - 1, place)
        wanted = torch.where(missed, path.choices.view(-1)[before], wanted)
        found = torch.where(missed, -1, found)
        bad |= missed
    position = path.prefix_lens + place
    live = path.req_rows != 0
    report.add(
        {
            Ring.REASONS: torch.where(bad & live, int(Reason.ACCEPT_PATH), 0),
            Ring.REQ_ROW: path.req_rows,
            Ring.SERIAL: path.serials,
            Ring.POSITION: position,
            Ring.EXPECTED_WORD0: pack_word0_tensor(wanted, position + 1),
            Ring.FOUND_WORD0: pack_word0_tensor(found, position + 1),
            Ring.BATCH_ROW: row,
        }
    )
