"""Launches the canary's Triton kernels; same functions as the references."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from sglang.srt.kv_canary.kernels.records import Launch, WriterKind
from sglang.srt.kv_canary.kernels.state import (
    NO_FINGERPRINT,
    CanaryRows,
    CanaryState,
    Fingerprint,
    FingerprintMode,
    check_view_layout,
)
from sglang.srt.kv_canary.kernels.triton_before import before_kernel
from sglang.srt.kv_canary.kernels.triton_books import (
    finish_kernel,
    move_kernel,
    poison_kernel,
)
from sglang.srt.kv_canary.kernels.triton_verify import verify_kernel
from sglang.srt.kv_canary.kernels.triton_write import write_kernel
from sglang.srt.model_executor.forward_batch_info import KVReadView

MAX_MOVES = 1024
"""Moves that one program can hold in registers."""

_BLOCK = 128
# A tile of words that are hashed whole has this many elements.
_HASH_TILE = 1024
_HASH_SLOTS = 8
_PROGRAMS = 2048
_POISON_BLOCK = 128


def verify_block(mode: FingerprintMode) -> tuple[int, int]:
    """(elements, words of each that are hashed at a time) of a verify program."""
    if mode is FingerprintMode.ALL:
        return _HASH_SLOTS, _HASH_TILE // _HASH_SLOTS
    return _BLOCK, _HASH_TILE


def write_block(mode: FingerprintMode, *, one_token: bool) -> tuple[int, int]:
    """(tokens, words of each that are hashed at a time) of a write program."""
    if mode in (FingerprintMode.ALL, FingerprintMode.ROTATE):
        block = 1 if one_token else _HASH_SLOTS
        return block, _HASH_TILE // block
    return (1 if one_token else _BLOCK), 1


def splits_for(rows: int, blocks: int) -> int:
    """Programs per row, at most `blocks`, so that about `_PROGRAMS` run in all."""
    wanted = triton.cdiv(_PROGRAMS, max(rows, 1))
    return int(max(1, min(triton.next_power_of_2(wanted), blocks)))


def _fingerprint_arguments(
    source: Fingerprint, stand_in: Tensor, chunk: int
) -> dict[str, object]:
    k, v = source.k_words, source.v_words
    return {
        "k_words": _or(k, stand_in),
        "v_words": _or(v, stand_in),
        "k_layer_stride": k.stride(0) if k is not None else 0,
        "k_slot_stride": k.stride(1) if k is not None else 0,
        "v_layer_stride": v.stride(0) if v is not None else 0,
        "v_slot_stride": v.stride(1) if v is not None else 0,
        "MODE": int(source.mode),
        "CHUNK": chunk,
        "LAYERS": k.shape[0] if k is not None else 1,
        "K_WORDS": k.shape[2] if k is not None else 2,
        "V_WORDS": v.shape[2] if v is not None else 2,
    }


def _tag(state: CanaryState, launch: Launch, manager: int) -> int:
    return launch | (manager & 255) << 8 | state.pool << 16


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
    reads = _Reads(table, fingerprint, req_to_token, tokens, token_offset)
    verify_kernel[(max(rows.num_rows, 1), reads.splits(rows))](
        **_shared_arguments(state, rows, req_to_token, manager),
        **reads.arguments(state, rows, manager),
        num_warps=4,
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
) -> None:
    """Both checks in one launch: the first programs of a row verify, the rest write."""
    reads = _Reads(table, fingerprint, req_to_token, tokens, token_offset)
    verify_splits = reads.splits(rows)
    block, _, write_splits = _write_shape(rows, FingerprintMode.NONE)
    before_kernel[(max(rows.num_rows, 1), verify_splits + write_splits)](
        **_shared_arguments(state, rows, req_to_token, manager),
        **reads.arguments(state, rows, manager),
        **_new_arguments(rows, req_to_token, page_size, writer_kind, oracle),
        head_tag=_tag(state, Launch.HEAD, manager),
        verify_splits=verify_splits,
        HEAD_BLOCK=block,
        num_warps=4,
    )


@dataclass(frozen=True, slots=True)
class _Reads:
    """What verify is told of a forward's reads."""

    table: KVReadView
    fingerprint: Fingerprint
    req_to_token: Tensor | None
    tokens: Tensor | None
    token_offset: int

    def splits(self, rows: CanaryRows) -> int:
        block, _ = verify_block(self.fingerprint.mode)
        elements = self.table.entries.shape[-1] * self.table.entry_size
        return splits_for(rows.num_rows, triton.cdiv(elements, block))

    def arguments(
        self, state: CanaryState, rows: CanaryRows, manager: int
    ) -> dict[str, object]:
        table, tokens = self.table, self.tokens
        check_view_layout(table)
        paged, entries = table.page_table is not None, table.entries
        sweep = self.req_to_token is None
        block, chunk = verify_block(self.fingerprint.mode)
        longs = rows.req_rows
        return {
            "read_lens": table.read_lens,
            "entries": entries,
            "row_index": _or(table.row_index, longs),
            "indptr": _or(table.indptr, longs),
            "first_position": _or(table.first_position, longs),
            "prev_slots": _or(table.prev_slots, longs),
            "tokens": _or(tokens, state.verdict),
            "table_rows": entries.shape[0] if paged else 1,
            "table_columns": entries.shape[-1],
            "table_row_stride": entries.stride(0) if paged else 0,
            "table_column_stride": entries.stride(-1),
            "tokens_stride": tokens.stride(0) if tokens is not None else 0,
            "tokens_width": tokens.shape[1] if tokens is not None else 0,
            "token_offset": self.token_offset,
            "period": self.fingerprint.rotation_period,
            "tag": _tag(state, Launch.SWEEP if sweep else Launch.VERIFY, manager),
            "PAGED": paged,
            "PAGE_SIZE": table.page_size,
            "ENTRY_SIZE": table.entry_size,
            "HAS_ROW_INDEX": table.row_index is not None,
            "HAS_FIRST": table.first_position is not None,
            "HAS_PREV": table.prev_slots is not None,
            "HAS_TOKENS": tokens is not None,
            "SWEEP": sweep,
            "BLOCK": block,
            **_fingerprint_arguments(self.fingerprint, longs, chunk),
        }


def write_head(
    state: CanaryState,
    rows: CanaryRows,
    *,
    req_to_token: Tensor | None,
    page_size: int,
    writer_kind: WriterKind,
    manager: int,
    oracle: tuple[Tensor, Tensor] | None,
) -> None:
    _write(
        state,
        rows,
        NO_FINGERPRINT,
        launch=Launch.HEAD,
        manager=manager,
        advance=False,
        findings=None,
        req_to_token=req_to_token,
        new=_new_arguments(rows, req_to_token, page_size, writer_kind, oracle),
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
    if advance and rows.num_rows > state.next_lineage.shape[0]:
        raise ValueError(f"write_tail: {rows.num_rows} rows, and scratch for fewer")
    _write(
        state,
        rows,
        fingerprint,
        launch=Launch.TAIL,
        manager=manager,
        advance=advance,
        findings=findings,
        req_to_token=None,
        new=_new_arguments(rows, None, page_size, writer_kind, None),
    )


def _write(
    state: CanaryState,
    rows: CanaryRows,
    fingerprint: Fingerprint,
    *,
    launch: Launch,
    manager: int,
    advance: bool,
    findings: Tensor | None,
    req_to_token: Tensor | None,
    new: dict[str, object],
) -> None:
    block, chunk, splits = _write_shape(rows, fingerprint.mode)
    write_kernel[(max(rows.num_rows, 1), splits)](
        **_shared_arguments(state, rows, req_to_token, manager),
        **new,
        **_fingerprint_arguments(fingerprint, rows.req_rows, chunk),
        ticket=state.ticket,
        next_lineage=state.next_lineage,
        findings=_or(findings, rows.req_rows),
        tag=_tag(state, launch, manager),
        IS_TAIL=launch is Launch.TAIL,
        ADVANCES=advance,
        **_publish_arguments(rows),
        HAS_FINDINGS=findings is not None,
        BLOCK=block,
        num_warps=1 if rows.qo_indptr is None and chunk == 1 else 4,
    )


def _write_shape(rows: CanaryRows, mode: FingerprintMode) -> tuple[int, int, int]:
    """(tokens of a program, words hashed at a time, programs of a row)."""
    one_token = rows.qo_indptr is None
    block, chunk = write_block(mode, one_token=one_token)
    blocks = 1 if one_token else triton.cdiv(rows.num_tokens, block)
    return block, chunk, splits_for(rows.num_rows, blocks)


# Absent tensors are replaced by some pointer of their dtype that is never read.


def _shared_arguments(
    state: CanaryState, rows: CanaryRows, req_to_token: Tensor | None, manager: int
) -> dict[str, object]:
    """What every launch is told: the state, the rows, their columns."""
    rows.check_layout()
    longs = rows.req_rows
    return {
        "head": state.head,
        "tail": state.tail,
        "expected_lineage": state.expected_lineage,
        "verdict": state.verdict,
        "ring": state.ring,
        "ring_count": state.ring_count,
        "counters": state.counters,
        "clock": state.clock,
        "phase": state.phase,
        "req_rows": rows.req_rows,
        "prefix_lens": rows.prefix_lens,
        "extend_lens": rows.extend_lens,
        "qo_indptr": _or(rows.qo_indptr, longs),
        "out_cache_loc": rows.out_cache_loc,
        "serials": rows.serials,
        "salts": rows.salts,
        **_seed_arguments(rows),
        "lineage_rows": _or(rows.lineage_rows, longs),
        "shift_from": _or(rows.shift_from, longs),
        "column_shift": _or(rows.column_shift, longs),
        "req_to_token": _or(req_to_token, state.verdict),
        "num_rows": rows.num_rows,
        "num_slots": state.num_slots,
        "num_tokens": rows.num_tokens,
        "capacity": state.ring.shape[0],
        "columns_stride": req_to_token.stride(0) if req_to_token is not None else 0,
        "columns_width": req_to_token.shape[1] if req_to_token is not None else 0,
        "manager": manager,
        "HAS_QO_INDPTR": rows.qo_indptr is not None,
        "HAS_LINEAGE_ROWS": rows.lineage_rows is not None,
        "HAS_SHIFT": rows.shift_from is not None and rows.num_rows > 0,
    }


def _seed_arguments(rows: CanaryRows) -> dict[str, object]:
    given = rows.seeds if rows.seed_table is None else rows.seed_table
    return {
        "seeds": _or(given, rows.req_rows),
        "HAS_SEEDS": given is not None,
        "HAS_SEED_TABLE": rows.seed_table is not None,
    }


def _publish_arguments(rows: CanaryRows) -> dict[str, object]:
    """Where lineages go, and over which new tokens."""
    return {
        "publish_rows": _or(rows.publish_rows, rows.req_rows),
        "stay_lens": _or(rows.stay_lens, rows.req_rows),
        "HAS_PUBLISH_ROWS": rows.publish_rows is not None,
        "HAS_STAY_LENS": rows.stay_lens is not None,
    }


def _new_arguments(
    rows: CanaryRows,
    req_to_token: Tensor | None,
    page_size: int,
    writer_kind: WriterKind,
    oracle: tuple[Tensor, Tensor] | None,
) -> dict[str, object]:
    """What writes are told of the new tokens."""
    longs = rows.req_rows
    oracle_tokens, oracle_positions = oracle if oracle is not None else (longs, longs)
    return {
        "input_ids": rows.input_ids,
        "positions": rows.positions,
        "parent_index": _or(rows.parent_index, longs),
        "oracle_tokens": oracle_tokens,
        "oracle_positions": oracle_positions,
        "page_size": page_size,
        "max_depth": rows.max_depth,
        "kind": int(writer_kind),
        "IS_TREE": rows.parent_index is not None,
        "HAS_COLUMNS": req_to_token is not None,
        "HAS_ORACLE": oracle is not None,
    }


def poison(state: CanaryState, slots: Tensor, n_live: Tensor | None) -> None:
    count = slots.numel()
    poison_kernel[(triton.cdiv(count, _POISON_BLOCK), 2)](
        state.head,
        state.tail,
        state.clock,
        slots,
        _or(n_live, slots),
        state.num_slots,
        count,
        HAS_LIVE=n_live is not None,
        BLOCK=_POISON_BLOCK,
    )


def move_records(state: CanaryState, *, dst: Tensor, src: Tensor) -> None:
    """More than `MAX_MOVES` go through a copy in torch, which allocates."""
    count = dst.numel()
    if count > MAX_MOVES:
        for records in (state.head, state.tail):
            records.index_copy_(0, dst, records.index_select(0, src))
        return
    move_kernel[(2,)](
        state.head, state.tail, dst, src, count, MOVES=triton.next_power_of_2(count)
    )


def finish_step(state: CanaryState, rows: CanaryRows, findings: Tensor) -> None:
    rows.check_layout()
    _finish(state, rows, findings, advance=True)


def gather_findings(state: CanaryState, req_rows: Tensor, findings: Tensor) -> None:
    # Nothing is read of the rows but `req_rows`.
    rows = CanaryRows(
        req_rows=req_rows,
        prefix_lens=req_rows,
        extend_lens=req_rows,
        input_ids=req_rows,
        positions=req_rows,
        out_cache_loc=req_rows,
        serials=req_rows,
        salts=req_rows,
    )
    _finish(state, rows, findings, advance=False)


def _finish(
    state: CanaryState, rows: CanaryRows, findings: Tensor, *, advance: bool
) -> None:
    longs = rows.req_rows
    finish_kernel[(max(rows.num_rows, 1),)](
        verdict=state.verdict,
        ring_count=state.ring_count,
        counters=state.counters,
        findings=findings,
        expected_lineage=state.expected_lineage,
        req_rows=rows.req_rows,
        prefix_lens=rows.prefix_lens,
        extend_lens=rows.extend_lens,
        input_ids=rows.input_ids,
        positions=rows.positions,
        salts=rows.salts,
        qo_indptr=_or(rows.qo_indptr, longs),
        lineage_rows=_or(rows.lineage_rows, longs),
        num_rows=rows.num_rows,
        num_tokens=rows.num_tokens,
        ADVANCES=advance,
        HAS_QO_INDPTR=rows.qo_indptr is not None,
        HAS_LINEAGE_ROWS=rows.lineage_rows is not None,
        **_seed_arguments(rows),
        **_publish_arguments(rows),
        num_warps=1,
    )


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if tensor is None else tensor
