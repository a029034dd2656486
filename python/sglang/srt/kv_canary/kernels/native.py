"""The canary's launches as native CPU ops: packs arguments, nothing else."""

from __future__ import annotations

from torch import Tensor

from sglang.srt.kv_canary.kernels.records import WriterKind
from sglang.srt.kv_canary.kernels.state import (
    CanaryRows,
    CanaryState,
    Fingerprint,
)
from sglang.srt.layers.ops.dispatch import native
from sglang.srt.model_executor.forward_batch_info import KVReadView


def _flat(table: list[Tensor | None]) -> list[Tensor | None]:
    """A table without pages, its indptr (the fourth) as the ops want it."""
    indptr = table[3]
    assert indptr is not None
    return [*table[:3], indptr.long(), *table[4:]]


def verify(
    state: CanaryState,
    rows: CanaryRows,
    table: KVReadView,
    fingerprint: Fingerprint,
    *,
    req_to_token: Tensor | None,
    tokens: Tensor | None,
    token_offset: int,
    manager: int,
) -> None:
    native.canary_verify(
        state.arena,
        rows.tensors,
        table.tensors if table.indptr is None else _flat(table.tensors),
        fingerprint.k_words,
        fingerprint.v_words,
        req_to_token,
        tokens,
        [
            table.page_size,
            token_offset,
            fingerprint.mode,
            fingerprint.rotation_period,
            rows.max_depth,
            manager,
            table.entry_size,
        ],
    )


def before_model(
    state: CanaryState,
    rows: CanaryRows,
    table: KVReadView,
    fingerprint: Fingerprint,
    *,
    req_to_token: Tensor,
    tokens: Tensor | None,
    token_offset: int,
    page_size: int,
    writer_kind: WriterKind,
    manager: int,
    oracle: tuple[Tensor, Tensor] | None,
    published: Tensor | None,
) -> None:
    oracle_tokens, oracle_positions = oracle if oracle is not None else (None, None)
    native.canary_before_model(
        state.arena,
        rows.tensors,
        table.tensors if table.indptr is None else _flat(table.tensors),
        fingerprint.k_words,
        fingerprint.v_words,
        req_to_token,
        tokens,
        published,
        oracle_tokens,
        oracle_positions,
        [
            table.page_size,
            token_offset,
            fingerprint.mode,
            fingerprint.rotation_period,
            rows.max_depth,
            manager,
            table.entry_size,
            writer_kind,
            page_size,
        ],
    )


def write_head(
    state: CanaryState,
    rows: CanaryRows,
    *,
    req_to_token: Tensor | None,
    page_size: int,
    writer_kind: WriterKind,
    manager: int,
    oracle: tuple[Tensor, Tensor] | None,
    published: Tensor | None,
) -> None:
    tokens, positions = oracle if oracle is not None else (None, None)
    native.canary_write_head(
        state.arena,
        rows.tensors,
        req_to_token,
        published,
        tokens,
        positions,
        [page_size, writer_kind, 0, 1, rows.max_depth, manager],
    )


def write_tail(
    state: CanaryState,
    rows: CanaryRows,
    fingerprint: Fingerprint,
    *,
    page_size: int,
    writer_kind: WriterKind,
    manager: int,
    advance: bool,
    findings: Tensor | None,
) -> None:
    native.canary_write_tail(
        state.arena,
        rows.tensors,
        fingerprint.k_words,
        fingerprint.v_words,
        findings,
        [
            page_size,
            writer_kind,
            fingerprint.mode,
            fingerprint.rotation_period,
            rows.max_depth,
            manager,
            advance,
        ],
    )


def poison(state: CanaryState, slots: Tensor, n_live: Tensor | None) -> None:
    native.canary_poison(state.arena, slots, n_live)


def finish_step(state: CanaryState, rows: CanaryRows, findings: Tensor) -> None:
    native.canary_finish_step(state.arena, rows.tensors, findings, rows.max_depth)


def gather_findings(state: CanaryState, req_rows: Tensor, findings: Tensor) -> None:
    native.canary_gather_findings(state.arena, req_rows, findings)
