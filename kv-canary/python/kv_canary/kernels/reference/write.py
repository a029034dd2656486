"""The canary's record writes in torch: the oracle of the native and Triton versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kv_canary.checks import Reason
from kv_canary.kernels.reference.ends import advance_lineages, gather_findings
from kv_canary.kernels.reference.hash import fill_sentinel, has_sentinel, keep_bytes
from kv_canary.kernels.reference.report import Report, flag
from kv_canary.kernels.reference.rows import (
    NewTokens,
    count_ancestors,
    load_columns,
    load_tokens,
    shift_columns,
)
from kv_canary.records import (
    CLOCK_MASK,
    CLOCK_SHIFT,
    POISON_WORD,
    SERIAL_MASK,
    TOKEN_MASK,
    UNKNOWN,
    Counter,
    Launch,
    Phase,
    Request,
    Ring,
    WriterKind,
    pack_word0_tensor,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.pool_checks import PoolChecks
    from kv_canary.state import CanaryState
    from kv_canary.view import ForwardView


class _Inputs(NamedTuple):
    """The result of a check of inputs; all [n].

    Fields:
        reasons: bits. due, found: word 0 for the entry, where `is_wrong`.
    """

    reasons: Tensor
    is_wrong: Tensor
    due: Tensor
    found: Tensor


def write_head(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    """Check where the new tokens will be written and write their head records.

    Lineages start from `expected_lineage`, or from the seed if the prefix is empty.
    Without `checks.req_to_token` slots are not compared with columns. The j-th new
    token of a row belongs in column `prefix_lens` + j. The phase changes from
    AFTER_VERIFY to AFTER_HEAD.
    """
    rows, manager, page_size = view, view.manager, checks.page_size
    report = Report(state, Launch.HEAD, manager)
    report.step_phase(manager, Phase.AFTER_VERIFY, Phase.AFTER_HEAD)
    state.counters[Counter.HEAD_LAUNCHES] += 1
    new = load_tokens(state, rows, view.writer_kind)
    slot = rows.out_cache_loc[new.place]
    writable = (slot >= page_size) & (slot < state.num_slots)
    old = state.head[slot * writable] * writable[:, None]
    reasons, expected_slot = _check_slots(state, rows, checks, new, slot, old)
    expected0, found0 = new.word0, old[:, 0]
    for inputs in _check_inputs(state, rows, checks, new):
        reasons |= inputs.reasons
        expected0 = torch.where(inputs.is_wrong, inputs.due, expected0)
        found0 = torch.where(inputs.is_wrong, inputs.found, found0)
    if rows.oracle is not None:
        # It expects something of every token.
        inputs = _check_oracle(rows, rows.oracle, new)
        reasons |= inputs.reasons
        expected0 = inputs.due
        found0 = torch.where(inputs.is_wrong, inputs.found, found0)
    report.add(
        {
            Ring.REASONS: reasons,
            Ring.REQ_ROW: rows.req_rows[new.row],
            Ring.SERIAL: rows.serials[new.row],
            Ring.SLOT: slot,
            Ring.POSITION: rows.positions[new.place],
            Ring.EXPECTED_WORD0: expected0,
            Ring.FOUND_WORD0: found0,
            Ring.EXPECTED_LINEAGE: new.lineage,
            Ring.FOUND_LINEAGE: old[:, 1],
            Ring.FOUND_WORD3: old[:, 3],
            Ring.BATCH_ROW: new.row,
            Ring.EXPECTED_SLOT: expected_slot,
        }
    )
    report.add(_check_padded_rows(rows, page_size))
    zeros = torch.zeros_like(slot)
    record = torch.stack((new.word0, new.lineage, zeros, new.word3), dim=1)
    state.head[slot[writable]] = record[writable]
    fill_sentinel(checks.fingerprint, slot[writable])
    state.counters[Counter.HEAD_SLOTS] += writable.sum()


def write_tail(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    advance: bool,
    findings: Tensor | None,
) -> None:
    """Check the head records, write the tail records; see `launches.write_tail`."""
    rows, manager, source = view, view.manager, checks.fingerprint
    report = Report(state, Launch.TAIL, manager)
    report.step_phase(manager, Phase.AFTER_HEAD, Phase.IDLE)
    state.counters[Counter.TAIL_LAUNCHES] += 1
    new = load_tokens(state, rows, view.writer_kind)
    slot = rows.out_cache_loc[new.place]
    writable = (slot >= checks.page_size) & (slot < state.num_slots)
    head = state.head[slot * writable]
    own = torch.stack((new.word0, new.lineage, new.word3), dim=1)
    alias = writable & (head[:, [0, 1, 3]] != own).any(dim=1)
    missing = writable & has_sentinel(source, slot * writable)
    reasons = flag(Reason.WRITE_ALIAS, alias) | flag(Reason.WRITE_MISSING, missing)
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
    fingerprints = keep_bytes(source, slot, lineage)
    state.tail[slot] = torch.stack(
        (new.word0[writable], lineage, fingerprints, new.word3[writable]), dim=1
    )
    state.counters[Counter.TAIL_SLOTS] += len(slot)
    state.clock.add_(1)
    if advance:
        advance_lineages(state, rows)
    if findings is not None:
        gather_findings(state, rows.req_rows, findings)


def _check_slots(
    state: CanaryState,
    rows: ForwardView,
    checks: PoolChecks,
    new: NewTokens,
    slot: Tensor,
    old: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return WRITE_SCRATCH and WRITE_FOREIGN for the slots [n] of new tokens, and the
    slots that the rows' columns name, or -1.

    Args:
        old: head records of the slots, int64 [n, 4].
    """
    scratch = (slot >= 0) & (slot < checks.page_size)
    writable = (slot >= checks.page_size) & (slot < state.num_slots)
    # A record of this same forward is an alias, which the tail write reports.
    is_now = (old[:, 3] >> CLOCK_SHIFT) & CLOCK_MASK == state.clock & CLOCK_MASK
    is_taken = (old[:, 3] ^ rows.serials[new.row]) & SERIAL_MASK != 0
    foreign = ~writable & ~scratch
    expected_slot = torch.full_like(slot, -1)
    if checks.req_to_token is not None:
        column = shift_columns(rows, new.row, rows.prefix_lens[new.row] + new.number)
        req = rows.req_rows[new.row]
        expected_slot = load_columns(checks.req_to_token, req, column)
        foreign |= ~scratch & (slot != expected_slot)
        is_taken |= _is_own_prefix(rows, new, checks.req_to_token, slot, old)
    foreign |= writable & (old[:, 0] != POISON_WORD) & ~is_now & is_taken
    reasons = flag(Reason.WRITE_SCRATCH, scratch) | flag(Reason.WRITE_FOREIGN, foreign)
    return reasons, expected_slot


def _is_own_prefix(
    rows: ForwardView, new: NewTokens, req_to_token: Tensor, slot: Tensor, old: Tensor
) -> Tensor:
    """Return whether the row reads the slots [n] as its prefix, by their records."""
    position = old[:, 0] >> 32
    column = shift_columns(rows, new.row, position)
    held = load_columns(req_to_token, rows.req_rows[new.row], column)
    return (position < rows.prefix_lens[new.row]) & (held == slot)


def _check_inputs(
    state: CanaryState, rows: ForwardView, checks: PoolChecks, new: NewTokens
) -> list[_Inputs]:
    """Compare the inputs with what was due. If several differ, the last is reported."""
    found = [_check_shape(rows, new), _check_request(state, rows, new)]
    if checks.published is not None:
        found.append(_check_published(rows, new, checks.published, checks.token_offset))
    return found


def _check_shape(rows: ForwardView, new: NewTokens) -> _Inputs:
    """Compare positions with the places of the new tokens.

    In a tree the depth counts, only the first token of a row has no parent, and a token
    attends to itself and to whatever its parent attends to.
    """
    number, position = new.number, rows.positions[new.place]
    due = rows.prefix_lens[new.row] + number
    reasons = torch.zeros_like(number)
    if rows.parent_index is not None:
        parent = rows.parent_index[new.place]
        is_orphan = (parent == -1) & (number > 0)
        depth, is_sound = count_ancestors(rows, new)
        due = torch.where(is_orphan, position, rows.prefix_lens[new.row] + depth)
        wrong = ~is_sound | is_orphan
        if rows.tree_mask is not None:
            wrong |= _find_wrong_masks(rows.tree_mask, new, parent)
        reasons = flag(Reason.TREE_SHAPE, wrong)
    reasons |= flag(Reason.WRITE_POSITION, due != position)
    due0 = pack_word0_tensor(rows.input_ids[new.place], due)
    return _Inputs(reasons, reasons != 0, due0, new.word0)


def _find_wrong_masks(mask: Tensor, new: NewTokens, parent: Tensor) -> Tensor:
    """Return whether tokens attend to anything other than themselves and whatever their
    parents attend to."""
    column = torch.arange(mask.shape[1], device=parent.device)
    has_parent = (parent >= 0) & (parent < new.place)
    wanted = mask[parent * has_parent] & has_parent[:, None]
    wanted |= column == new.number[:, None]
    return (mask[new.place] != wanted).any(dim=1)


def _check_request(state: CanaryState, rows: ForwardView, new: NewTokens) -> _Inputs:
    """Compare the first new token of each row with the known state of its request. A
    branch belongs to no request."""
    none = torch.zeros_like(new.number)
    if rows.lineage_rows is not None:
        return _Inputs(none, none != 0, new.word0, new.word0)
    known = state.requests[rows.req_rows[new.row]]
    serial, due = known[:, Request.SERIAL], known[:, Request.NEXT_WORD0]
    is_first = new.number == 0
    is_other = is_first & (serial != UNKNOWN) & (serial != rows.serials[new.row])
    unlike = torch.where(is_first & (due != UNKNOWN), due ^ new.word0, 0)
    reasons = flag(Reason.ROW_OWNER, is_other)
    reasons |= flag(Reason.WRITE_TOKEN, unlike & TOKEN_MASK != 0)
    reasons |= flag(Reason.WRITE_POSITION, unlike >> 32 != 0)
    return _Inputs(reasons, unlike != 0, due, new.word0)


def _check_published(
    rows: ForwardView, new: NewTokens, published: Tensor, offset: int
) -> _Inputs:
    """Compare new tokens with published ones. A draft step, and a verification after
    its roots, read proposals, which are not published."""
    due = rows.prefix_lens[new.row] + new.number
    token = load_columns(published, rows.req_rows[new.row], due + offset)
    is_known = token >= 0
    if rows.writer_kind is WriterKind.VERIFY:
        is_known &= new.number == 0
    is_known &= rows.writer_kind is not WriterKind.DRAFT
    wrong = is_known & (token != rows.input_ids[new.place])
    due0 = pack_word0_tensor(token, due)
    return _Inputs(flag(Reason.WRITE_TOKEN, wrong), wrong, due0, new.word0)


def _check_oracle(
    rows: ForwardView, oracle: tuple[Tensor, Tensor], new: NewTokens
) -> _Inputs:
    """Compare new tokens with the oracle, which knows some of them."""
    tokens, positions = (part[new.place] for part in oracle)
    wrong = (tokens >= 0) & (tokens != rows.input_ids[new.place])
    misplaced = (positions >= 0) & (positions != rows.positions[new.place])
    reasons = flag(Reason.WRITE_TOKEN, wrong) | flag(Reason.WRITE_POSITION, misplaced)
    due0 = pack_word0_tensor(tokens, positions)
    return _Inputs(reasons, wrong | misplaced, due0, new.word0)


def _check_padded_rows(rows: ForwardView, page_size: int) -> dict[Ring, Tensor]:
    """Return a WRITE_FOREIGN for each write of a padded row outside the scratch
    page."""
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
        Ring.REASONS: flag(Reason.WRITE_FOREIGN, stray),
        Ring.SLOT: slot,
        Ring.POSITION: position,
        Ring.EXPECTED_WORD0: pack_word0_tensor(rows.input_ids[place], position),
        Ring.BATCH_ROW: row,
    }
