"""Launches the canary's Triton kernels; same functions as the references."""

from __future__ import annotations

import triton
from torch import Tensor

from sglang.srt.kv_canary.kernels.records import Launch, WriterKind
from sglang.srt.kv_canary.kernels.state import (
    NO_FINGERPRINT,
    CanaryRows,
    CanaryState,
    Fingerprint,
    FingerprintMode,
    ReadTable,
)
from sglang.srt.kv_canary.kernels.triton_books import (
    advance_lineage_kernel,
    gather_verdicts_kernel,
    move_kernel,
    poison_kernel,
)
from sglang.srt.kv_canary.kernels.triton_verify import verify_kernel
from sglang.srt.kv_canary.kernels.triton_write import write_kernel

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


def _fingerprint_constants(source: Fingerprint, chunk: int) -> dict[str, int]:
    if source.k_words is None or source.v_words is None:
        sizes = {"LAYERS": 1, "K_WORDS": 2, "V_WORDS": 2}
    else:
        layers, _, words = source.k_words.shape
        sizes = {"LAYERS": layers, "K_WORDS": words, "V_WORDS": source.v_words.shape[2]}
    return {"MODE": int(source.mode), "CHUNK": chunk, **sizes}


def _word_strides(source: Fingerprint) -> tuple[int, int, int, int]:
    if source.k_words is None or source.v_words is None:
        return 0, 0, 0, 0
    k, v = source.k_words, source.v_words
    return k.stride(0), k.stride(1), v.stride(0), v.stride(1)


def _tag(state: CanaryState, launch: Launch, manager: int) -> int:
    return launch | (manager & 255) << 8 | state.pool << 16


def verify(
    state: CanaryState,
    rows: CanaryRows,
    table: ReadTable,
    fingerprint: Fingerprint,
    *,
    req_to_token: Tensor | None,
    tokens: Tensor | None,
    token_offset: int,
    manager: int,
) -> None:
    rows.check_layout()
    table.check_layout()
    paged = table.page_table is not None
    entries = table.entries
    block, chunk = verify_block(fingerprint.mode)
    n_rows, columns = rows.num_rows, entries.shape[-1]
    splits = splits_for(n_rows, triton.cdiv(columns * table.entry_size, block))
    sweep = req_to_token is None
    # Absent tensors are replaced by some pointer of their dtype that is never read.
    longs, ints = rows.req_rows, state.verdict
    verify_kernel[(max(n_rows, 1), splits)](
        state.head,
        state.tail,
        state.expected_lineage,
        state.verdict,
        state.ring,
        state.ring_count,
        state.counters,
        state.clock,
        state.phase,
        rows.req_rows,
        rows.prefix_lens,
        rows.extend_lens,
        _or(rows.qo_indptr, longs),
        rows.out_cache_loc,
        rows.serials,
        rows.salts,
        _or(rows.seeds, longs),
        _or(rows.lineage_rows, longs),
        _or(rows.shift_from, longs),
        _or(rows.column_shift, longs),
        table.read_lens,
        entries,
        _or(table.row_index, longs),
        _or(table.indptr, longs),
        _or(table.first_position, longs),
        _or(table.prev_slots, longs),
        _or(fingerprint.k_words, longs),
        _or(fingerprint.v_words, longs),
        _or(req_to_token, ints),
        _or(tokens, ints),
        n_rows,
        state.num_slots,
        rows.num_tokens,
        state.ring.shape[0],
        entries.shape[0] if paged else 1,
        columns,
        entries.stride(0) if paged else 0,
        entries.stride(-1),
        req_to_token.stride(0) if req_to_token is not None else 0,
        req_to_token.shape[1] if req_to_token is not None else 0,
        tokens.stride(0) if tokens is not None else 0,
        tokens.shape[1] if tokens is not None else 0,
        token_offset,
        *_word_strides(fingerprint),
        fingerprint.rotation_period,
        manager,
        _tag(state, Launch.SWEEP if sweep else Launch.VERIFY, manager),
        PAGED=paged,
        PAGE_SIZE=table.page_size,
        ENTRY_SIZE=table.entry_size,
        HAS_QO_INDPTR=rows.qo_indptr is not None,
        HAS_SEEDS=rows.seeds is not None,
        HAS_LINEAGE_ROWS=rows.lineage_rows is not None,
        HAS_SHIFT=rows.shift_from is not None and n_rows > 0,
        HAS_ROW_INDEX=table.row_index is not None,
        HAS_FIRST=table.first_position is not None,
        HAS_PREV=table.prev_slots is not None,
        HAS_TOKENS=tokens is not None,
        SWEEP=sweep,
        BLOCK=block,
        num_warps=4,
        **_fingerprint_constants(fingerprint, chunk),
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
) -> None:
    _write(
        state,
        rows,
        NO_FINGERPRINT,
        is_tail=False,
        req_to_token=req_to_token,
        page_size=page_size,
        writer_kind=writer_kind,
        manager=manager,
        oracle=oracle,
        findings=None,
    )


def write_tail(
    state: CanaryState,
    rows: CanaryRows,
    fingerprint: Fingerprint,
    *,
    page_size: int,
    writer_kind: WriterKind,
    manager: int,
    findings: Tensor | None,
) -> None:
    _write(
        state,
        rows,
        fingerprint,
        is_tail=True,
        req_to_token=None,
        page_size=page_size,
        writer_kind=writer_kind,
        manager=manager,
        oracle=None,
        findings=findings,
    )


def _write(
    state: CanaryState,
    rows: CanaryRows,
    fingerprint: Fingerprint,
    *,
    is_tail: bool,
    req_to_token: Tensor | None,
    page_size: int,
    writer_kind: WriterKind,
    manager: int,
    oracle: tuple[Tensor, Tensor] | None,
    findings: Tensor | None,
) -> None:
    rows.check_layout()
    n_rows = rows.num_rows
    if findings is not None and n_rows > state.next_lineage.shape[0]:
        raise ValueError(f"write_tail: {n_rows} rows, and scratch for fewer")
    one_token = rows.qo_indptr is None
    block, chunk = write_block(fingerprint.mode, one_token=one_token)
    blocks = 1 if one_token else triton.cdiv(rows.num_tokens, block)
    longs = rows.req_rows
    oracle_tokens, oracle_positions = oracle if oracle is not None else (longs, longs)
    write_kernel[(max(n_rows, 1), splits_for(n_rows, blocks))](
        state.head,
        state.tail,
        state.expected_lineage,
        state.verdict,
        state.ring,
        state.ring_count,
        state.counters,
        state.clock,
        state.phase,
        state.ticket,
        state.next_lineage,
        _or(findings, longs),
        rows.req_rows,
        rows.prefix_lens,
        rows.extend_lens,
        rows.input_ids,
        rows.positions,
        rows.out_cache_loc,
        rows.serials,
        rows.salts,
        _or(rows.qo_indptr, longs),
        _or(rows.parent_index, longs),
        _or(rows.seeds, longs),
        _or(rows.lineage_rows, longs),
        _or(rows.shift_from, longs),
        _or(rows.column_shift, longs),
        _or(req_to_token, state.verdict),
        oracle_tokens,
        oracle_positions,
        _or(fingerprint.k_words, longs),
        _or(fingerprint.v_words, longs),
        n_rows,
        state.num_slots,
        rows.num_tokens,
        state.ring.shape[0],
        req_to_token.stride(0) if req_to_token is not None else 0,
        req_to_token.shape[1] if req_to_token is not None else 0,
        *_word_strides(fingerprint),
        page_size,
        rows.max_depth,
        int(writer_kind),
        manager,
        _tag(state, Launch.TAIL if is_tail else Launch.HEAD, manager),
        IS_TAIL=is_tail,
        HAS_FINDINGS=findings is not None,
        HAS_QO_INDPTR=not one_token,
        IS_TREE=rows.parent_index is not None,
        HAS_SEEDS=rows.seeds is not None,
        HAS_LINEAGE_ROWS=rows.lineage_rows is not None,
        HAS_SHIFT=rows.shift_from is not None and n_rows > 0,
        HAS_COLUMNS=req_to_token is not None,
        HAS_ORACLE=oracle is not None,
        BLOCK=block,
        num_warps=1 if one_token and chunk == 1 else 4,
        **_fingerprint_constants(fingerprint, chunk),
    )


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


def gather_verdicts(state: CanaryState, req_rows: Tensor, out: Tensor) -> None:
    count = req_rows.numel()
    block = 256
    gather_verdicts_kernel[(triton.cdiv(count, block),)](
        state.verdict, req_rows, out, count, BLOCK=block
    )


def advance_lineage(state: CanaryState, rows: CanaryRows) -> None:
    rows.check_layout()
    if rows.num_rows == 0:
        return
    longs = rows.req_rows
    advance_lineage_kernel[(rows.num_rows,)](
        state.expected_lineage,
        rows.req_rows,
        rows.prefix_lens,
        rows.extend_lens,
        rows.input_ids,
        rows.positions,
        rows.salts,
        _or(rows.qo_indptr, longs),
        _or(rows.seeds, longs),
        _or(rows.lineage_rows, longs),
        rows.num_tokens,
        HAS_QO_INDPTR=rows.qo_indptr is not None,
        HAS_SEEDS=rows.seeds is not None,
        HAS_LINEAGE_ROWS=rows.lineage_rows is not None,
    )


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if tensor is None else tensor
