"""The canary's launches as native CPU ops: packs arguments, nothing else."""

from __future__ import annotations

from torch import Tensor

from kv_canary.checks import PoolChecks
from kv_canary.state import CanaryState
from kv_canary.view import NO_MANAGER, ForwardView, KVReadView
from sglang_kernels import ops


def _entries_of(table: KVReadView) -> list[Tensor | None]:
    """The tensors of a table, with an indptr (the fourth) of int64."""
    indptr = table.indptr
    if indptr is None:
        return table.tensors
    return [*table.tensors[:3], indptr.long(), *table.tensors[4:]]


def verify(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    table: KVReadView,
    steps_phase: bool = True,
) -> None:
    fingerprint = checks.fingerprint
    ops.canary_verify(
        state.arena,
        view.tensors,
        _entries_of(table),
        fingerprint.k_words,
        fingerprint.v_words,
        checks.req_to_token,
        checks.tokens,
        [
            table.page_size,
            checks.token_offset,
            fingerprint.mode,
            fingerprint.rotation_period,
            view.max_depth,
            view.manager if steps_phase else NO_MANAGER,
            table.entry_size,
        ],
    )


def before_model(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    table, fingerprint = view.reads[0], checks.fingerprint
    oracle_tokens, oracle_positions = view.oracle or (None, None)
    ops.canary_before_model(
        state.arena,
        view.tensors,
        table.tensors if table.indptr is None else _entries_of(table),
        fingerprint.k_words,
        fingerprint.v_words,
        checks.req_to_token,
        checks.tokens,
        checks.published,
        oracle_tokens,
        oracle_positions,
        [
            table.page_size,
            checks.token_offset,
            fingerprint.mode,
            fingerprint.rotation_period,
            view.max_depth,
            view.manager,
            table.entry_size,
            view.writer_kind,
            checks.page_size,
        ],
    )


def write_head(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    tokens, positions = view.oracle or (None, None)
    ops.canary_write_head(
        state.arena,
        view.tensors,
        checks.req_to_token,
        checks.published,
        tokens,
        positions,
        [checks.page_size, view.writer_kind, 0, 1, view.max_depth, view.manager],
    )


def write_tail(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    advance: bool,
    findings: Tensor | None,
) -> None:
    fingerprint = checks.fingerprint
    ops.canary_write_tail(
        state.arena,
        view.tensors,
        fingerprint.k_words,
        fingerprint.v_words,
        findings,
        [
            checks.page_size,
            view.writer_kind,
            fingerprint.mode,
            fingerprint.rotation_period,
            view.max_depth,
            view.manager,
            advance,
        ],
    )


def poison(state: CanaryState, slots: Tensor, n_live: Tensor | None) -> None:
    ops.canary_poison(state.arena, slots, n_live)


def finish_step(state: CanaryState, view: ForwardView, findings: Tensor) -> None:
    ops.canary_finish_step(state.arena, view.tensors, findings, view.max_depth)


def gather_findings(state: CanaryState, req_rows: Tensor, findings: Tensor) -> None:
    ops.canary_gather_findings(state.arena, req_rows, findings)
