"""The canary's launches as native CPU ops. Only packs arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.carried import CarriedRows
from kv_canary.pool_checks import PoolChecks, check_numbers_of
from kv_canary.view import READ_FIELDS, ForwardView, KVReadView
from sglang_kernels import ops

if TYPE_CHECKING:
    from kv_canary.accepted import AcceptedPath, AcceptedWords, SampledTokens
    from kv_canary.carried import CarriedState
    from kv_canary.drawn import DrawnTokens
    from kv_canary.layout import Fingerprint
    from kv_canary.state import CanaryState

_INDPTR = [f.name for f in READ_FIELDS].index("indptr")


def _with_long_indptr(table: KVReadView) -> list[Tensor | None]:
    """Return the tensors of a table that has an indptr, which may be int32."""
    tensors = table.tensors.copy()
    indptr = tensors[_INDPTR]
    tensors[_INDPTR] = None if indptr is None else indptr.long()
    return tensors


def _hashed(checks: PoolChecks) -> Fingerprint:
    """Return the fingerprint to hash.

    Raises:
        ValueError: attention should compare the bytes, but no CPU attention does.
    """
    if checks.fingerprint.sums is not None or not checks.compares_bytes:
        raise ValueError("the native ops compare bytes themselves and keep no sums")
    return checks.fingerprint


# Arguments are positional, and numbers go as one list: torch takes 75 ns for each
# separate number, 0.5 us for an enumeration's, and more for a keyword.


def verify(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    table: KVReadView,
    steps_phase: bool = True,
) -> None:
    fingerprint = _hashed(checks)
    ops.canary_verify(
        state.arena,
        view.tensors,
        table.tensors if table.indptr is None else _with_long_indptr(table),
        *fingerprint.strided_words(),
        checks.req_to_token,
        checks.tokens,
        [*view.numbers, *check_numbers_of(checks), *table.numbers],
        steps_phase,
    )


def before_model(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    table, fingerprint = view.reads[0], _hashed(checks)
    oracle_tokens, oracle_positions = view.oracle or (None, None)
    ops.canary_before_model(
        state.arena,
        view.tensors,
        table.tensors if table.indptr is None else _with_long_indptr(table),
        *fingerprint.strided_words(),
        checks.req_to_token,
        checks.tokens,
        checks.published,
        view.tree_mask,
        oracle_tokens,
        oracle_positions,
        [*view.numbers, *check_numbers_of(checks), *table.numbers],
    )


def write_head(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    oracle_tokens, oracle_positions = view.oracle or (None, None)
    ops.canary_write_head(
        state.arena,
        view.tensors,
        *checks.fingerprint.strided_words(),
        checks.req_to_token,
        checks.published,
        view.tree_mask,
        oracle_tokens,
        oracle_positions,
        [*view.numbers, *check_numbers_of(checks)],
    )


def write_tail(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    advance: bool,
    findings: Tensor | None,
) -> None:
    fingerprint = _hashed(checks)
    ops.canary_write_tail(
        state.arena,
        view.tensors,
        *fingerprint.strided_words(),
        findings,
        [*view.numbers, *check_numbers_of(checks)],
        advance,
    )


def poison(state: CanaryState, slots: Tensor, n_live: Tensor | None) -> None:
    ops.canary_poison(state.arena, slots, n_live)


def finish_step(state: CanaryState, view: ForwardView, findings: Tensor) -> None:
    ops.canary_finish_step(state.arena, view.tensors, findings, view.max_depth)


def gather_findings(state: CanaryState, req_rows: Tensor, findings: Tensor) -> None:
    ops.canary_gather_findings(state.arena, req_rows, findings)


def expect_rows(
    state: CanaryState, rows: Tensor, values: Tensor, seeds: Tensor | None
) -> None:
    ops.canary_expect_rows(state.arena, rows, values, seeds)


def note_tokens(state: CanaryState, sampled: SampledTokens, marks: Tensor) -> None:
    ops.canary_note_tokens(state.arena, *sampled, marks)


def sum_slots(
    values: Tensor,
    bases: Tensor,
    offsets: Tensor,
    keys: Tensor,
    slots: Tensor,
    page_stride: int,
    sums: Tensor,
) -> None:
    ops.canary_sum_slots(values, bases, offsets, keys, slots, page_stride, sums)


def carry(state: CanaryState, carried: CarriedState) -> None:
    carried.check_layout()
    if (checked := carried.checked) is not None:
        if checked.source is not None:
            checked = _with_sums(state, carried, checked)
        _carry(state, carried, checked, checks=True)
    if carried.noted is not None:
        _carry(state, carried, carried.noted, checks=False)


def _with_sums(
    state: CanaryState, carried: CarriedState, rows: CarriedRows
) -> CarriedRows:
    """Return the rows with sums of their sources; 0 if there is no such source."""
    assert rows.source is not None
    given = rows.find_places()
    inside = given.clamp(0, rows.num_places - 1)
    own = torch.arange(len(given)).view_as(rows.places)
    sums = torch.zeros_like(given)
    copied = CarriedRows(places=own, hidden=rows.source[inside], sums=sums)
    _carry(state, carried, copied, checks=False)
    sums.masked_fill_(inside != given, 0)
    places = own.where(rows.places >= 0, -1)
    return CarriedRows(places=places, hidden=rows.hidden, sums=sums)


def _carry(
    state: CanaryState, carried: CarriedState, rows: CarriedRows, *, checks: bool
) -> None:
    assert rows.sums is not None
    words = rows.words
    given = [
        rows.find_places(),
        carried.req_rows,
        carried.serials,
        carried.positions,
        words,
        rows.ids,
        rows.bits,
    ]
    stride = 0 if words is None else words.stride(0)
    numbers = [rows.group, rows.known, rows.width, stride, carried.clock_offset]
    ops.canary_carry(state.arena, given, rows.sums, numbers, checks)


def check_drawn(
    state: CanaryState, drawn: DrawnTokens, findings: Tensor | None
) -> None:
    ops.canary_check_drawn(state.arena, drawn.tensors, findings, drawn.draws)


def finish_accepted(
    state: CanaryState,
    draft: CanaryState | None,
    path: AcceptedPath,
    salts: Tensor,
    checks: bool,
    words: AcceptedWords,
) -> None:
    words.gained.copy_(path.gained)
    words.accept_lens.copy_(path.accept_lens)
    if checks:
        ops.canary_note_accepted(state.arena, path.tensors, words.marks)
    else:
        note_tokens(state, path.last(), words.marks)
    finish_step(state, path.rows(salts), words.findings)
    if draft is not None:
        gather_findings(draft, path.req_rows, words.draft_findings)
