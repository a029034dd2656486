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
)
from sglang.srt.kv_canary.kernels.triton_args import (
    Ends,
    Oracle,
    Table,
    byte_args,
    end_args,
    hashing_of,
    oracle_args,
    read_args,
    row_args,
    state_args,
    table_args,
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
    reads = _reads(state, rows, table, fingerprint, req_to_token, manager)
    verify_kernel[(max(rows.num_rows, 1), _read_splits(rows, table, fingerprint))](
        state=state_args(state),
        rows=row_args(rows),
        columns=table_args(req_to_token),
        tokens=table_args(tokens, offset=token_offset),
        **reads,
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
    published: Tensor | None,
) -> None:
    """Both checks in one launch: the first programs of a row verify, the rest write."""
    verify_splits = _read_splits(rows, table, fingerprint)
    block, _, write_splits = _write_shape(rows, FingerprintMode.NONE)
    reads = _reads(state, rows, table, fingerprint, req_to_token, manager)
    before_kernel[(max(rows.num_rows, 1), verify_splits + write_splits)](
        state=state_args(state),
        rows=row_args(rows),
        columns=table_args(req_to_token),
        tokens=table_args(tokens, offset=token_offset),
        oracle=oracle_args(oracle),
        published=table_args(published),
        **reads,
        page_size=page_size,
        kind=int(writer_kind),
        head_tag=_tag(state, Launch.HEAD, manager),
        verify_splits=verify_splits,
        HEAD_BLOCK=block,
        num_warps=4,
    )


def _read_splits(rows: CanaryRows, table: KVReadView, source: Fingerprint) -> int:
    """Programs of a row that verify."""
    block, _ = verify_block(source.mode)
    elements = table.entries.shape[-1] * table.entry_size
    return splits_for(rows.num_rows, triton.cdiv(elements, block))


def _reads(
    state: CanaryState,
    rows: CanaryRows,
    table: KVReadView,
    source: Fingerprint,
    req_to_token: Tensor | None,
    manager: int,
) -> dict[str, object]:
    """What verify is told of the reads, and in which tiles it looks at them."""
    block, chunk = verify_block(source.mode)
    launch = Launch.SWEEP if req_to_token is None else Launch.VERIFY
    return {
        "reads": read_args(table),
        "data": byte_args(source),
        "num_rows": rows.num_rows,
        "num_tokens": rows.num_tokens,
        "table_rows": table.entries.shape[0],
        "table_columns": table.entries.shape[-1],
        "max_depth": rows.max_depth,
        "manager": manager,
        "tag": _tag(state, launch, manager),
        "PAGE_SIZE": table.page_size,
        "ENTRY_SIZE": table.entry_size,
        "HASHING": hashing_of(source, chunk=chunk),
        "BLOCK": block,
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
    published: Tensor | None,
) -> None:
    _write(
        state,
        rows,
        NO_FINGERPRINT,
        Launch.HEAD,
        columns=table_args(req_to_token),
        oracle=oracle_args(oracle),
        published=table_args(published),
        ends=None,
        page_size=page_size,
        writer_kind=writer_kind,
        manager=manager,
        advance=False,
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
        Launch.TAIL,
        columns=None,
        oracle=None,
        published=None,
        ends=end_args(rows, findings) if advance else None,
        page_size=page_size,
        writer_kind=writer_kind,
        manager=manager,
        advance=advance,
    )


def _write(
    state: CanaryState,
    rows: CanaryRows,
    source: Fingerprint,
    launch: Launch,
    *,
    columns: Table | None,
    oracle: Oracle | None,
    published: Table | None,
    ends: Ends | None,
    page_size: int,
    writer_kind: WriterKind,
    manager: int,
    advance: bool,
) -> None:
    block, chunk, splits = _write_shape(rows, source.mode)
    write_kernel[(max(rows.num_rows, 1), splits)](
        state=state_args(state),
        rows=row_args(rows),
        columns=columns,
        data=byte_args(source),
        oracle=oracle,
        published=published,
        ends=ends,
        num_rows=rows.num_rows,
        num_tokens=rows.num_tokens,
        page_size=page_size,
        max_depth=rows.max_depth,
        kind=int(writer_kind),
        manager=manager,
        tag=_tag(state, launch, manager),
        IS_TAIL=launch is Launch.TAIL,
        ADVANCES=advance,
        HASHING=hashing_of(source, chunk=chunk),
        BLOCK=block,
        num_warps=1 if rows.qo_indptr is None and chunk == 1 else 4,
    )


def _write_shape(rows: CanaryRows, mode: FingerprintMode) -> tuple[int, int, int]:
    """(tokens of a program, words hashed at a time, programs of a row)."""
    one_token = rows.qo_indptr is None
    block, chunk = write_block(mode, one_token=one_token)
    blocks = 1 if one_token else triton.cdiv(rows.num_tokens, block)
    return block, chunk, splits_for(rows.num_rows, blocks)


def poison(state: CanaryState, slots: Tensor, n_live: Tensor | None) -> None:
    count = slots.numel()
    poison_kernel[(triton.cdiv(count, _POISON_BLOCK), 2)](
        state.head,
        state.tail,
        state.clock,
        slots,
        slots if n_live is None else n_live,
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
    finish_kernel[(max(rows.num_rows, 1),)](
        state=state_args(state),
        rows=row_args(rows),
        ends=end_args(rows, findings),
        num_rows=rows.num_rows,
        num_tokens=rows.num_tokens,
        ADVANCES=advance,
        num_warps=1,
    )
