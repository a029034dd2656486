"""Launches the canary's Triton kernels; same functions as the references."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
from torch import Tensor

from kv_canary.kernels.triton_args import (
    NO_CHECKS,
    Checks,
    byte_args,
    check_args,
    end_args,
    hashing_args,
    page_args,
    path_args,
    read_args,
    row_args,
    state_args,
)
from kv_canary.kernels.triton_before import before_kernel
from kv_canary.kernels.triton_ends import finish_kernel
from kv_canary.kernels.triton_notes import (
    accepted_kernel,
    carried_kernel,
    expect_kernel,
    note_kernel,
)
from kv_canary.kernels.triton_records import move_kernel, poison_kernel
from kv_canary.kernels.triton_verify import verify_kernel
from kv_canary.kernels.triton_write import write_kernel
from kv_canary.layout import NO_FINGERPRINT, Fingerprint, FingerprintMode
from kv_canary.records import Launch, ring_tag
from kv_canary.view import NO_MANAGER, ForwardView, KVReadView, require_vector

if TYPE_CHECKING:
    from kv_canary.accepted import AcceptedPath, AcceptedWords, SampledTokens
    from kv_canary.carried import CarriedRows
    from kv_canary.pool_checks import PoolChecks
    from kv_canary.state import CanaryState

MOVE_SIZES = (64, 512, 1024)
"""Moves that the kernel is compiled for."""
MAX_MOVES = MOVE_SIZES[-1]
"""Moves that one program can hold in registers."""

BLOCK_TOKENS = 128
"""Elements, or new tokens, of a program that hashes no whole slots."""

# A tile of words that are hashed whole has this many elements.
_HASH_TILE = 1024
_HASH_SLOTS = 8
TARGET_PROGRAMS = 2048
"""About how many programs a launch has in all."""

_POISON_BLOCK = 128
_NOTE_BLOCK = 128
_CARRIED_BLOCK = 512


def verify_block(mode: FingerprintMode) -> tuple[int, int]:
    """(elements, words of each that are hashed at a time) of a verify program."""
    if mode is FingerprintMode.ALL:
        return _HASH_SLOTS, _HASH_TILE // _HASH_SLOTS
    return BLOCK_TOKENS, _HASH_TILE


def write_block(mode: FingerprintMode, *, one_token: bool) -> tuple[int, int]:
    """(tokens, words of each that are hashed at a time) of a write program."""
    if mode in (FingerprintMode.ALL, FingerprintMode.ROTATE):
        block = 1 if one_token else _HASH_SLOTS
        return block, _HASH_TILE // block
    return (1 if one_token else BLOCK_TOKENS), 1


def splits_for(rows: int, blocks: int) -> int:
    """Programs per row, at most `blocks`, so that about `TARGET_PROGRAMS` run."""
    wanted = _cdiv(TARGET_PROGRAMS, max(rows, 1))
    return max(1, min(1 << (wanted - 1).bit_length(), blocks))


def _cdiv(size: int, each: int) -> int:
    """`triton.cdiv` on the host, where each call of that takes 2 us."""
    return -(-size // each)


def verify(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    table: KVReadView,
    steps_phase: bool = True,
) -> None:
    manager = view.manager if steps_phase else NO_MANAGER
    verify_kernel[(max(view.num_rows, 1), _read_splits(view, table, checks))](
        state=state_args(state),
        rows=row_args(view),
        checks=check_args(checks, reads=True),
        **_reads(state, view, checks, table, manager),
        num_warps=4,
    )


def before_model(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    """Both checks in one launch: the first programs of a row verify, the rest write."""
    table, manager = view.reads[0], view.manager
    verify_splits = _read_splits(view, table, checks)
    block, _, write_splits = _write_shape(view, FingerprintMode.NONE)
    before_kernel[(max(view.num_rows, 1), verify_splits + write_splits)](
        state=state_args(state),
        rows=row_args(view),
        checks=check_args(checks, reads=True, writes=view),
        **_reads(state, view, checks, table, manager),
        page_size=checks.page_size,
        kind=int(view.writer_kind),
        head_tag=ring_tag(Launch.HEAD, manager, state.pool),
        verify_splits=verify_splits,
        HEAD_BLOCK=block,
        num_warps=4,
    )


def _read_splits(rows: ForwardView, table: KVReadView, checks: PoolChecks) -> int:
    """Programs of a row that verify."""
    block, _ = _read_block(checks)
    elements = table.entries.shape[-1] * table.entry_size
    return splits_for(rows.num_rows, _cdiv(elements, block))


def _read_block(checks: PoolChecks) -> tuple[int, int]:
    """`verify_block` of the bytes that verify compares."""
    source = checks.fingerprint if checks.compares_bytes else NO_FINGERPRINT
    return verify_block(source.mode)


def _reads(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    table: KVReadView,
    manager: int,
) -> dict[str, object]:
    """Arguments of verify about the reads, and the tiles in which it looks at them."""
    block, chunk = _read_block(checks)
    launch = Launch.SWEEP if checks.req_to_token is None else Launch.VERIFY
    return {
        "reads": read_args(table),
        "data": byte_args(checks.fingerprint),
        "num_rows": view.num_rows,
        "num_tokens": view.num_tokens,
        "table_rows": table.entries.shape[0],
        "table_columns": table.entries.shape[-1],
        "max_depth": view.max_depth,
        "manager": manager,
        "tag": ring_tag(launch, manager, state.pool),
        "PAGES": page_args(table),
        "HASHING": hashing_args(
            # Where slots have turns, they are hashed one by one.
            checks.fingerprint,
            chunk=chunk,
            slots=block if block == _HASH_SLOTS else 1,
        )._replace(compares=checks.compares_bytes),
        "BLOCK": block,
    }


def write_head(state: CanaryState, view: ForwardView, checks: PoolChecks) -> None:
    # Before the model bytes only matter where all of them are filled.
    fills = checks.fingerprint.mode is FingerprintMode.ALL
    _write(
        state,
        view,
        checks.fingerprint if fills else NO_FINGERPRINT,
        Launch.HEAD,
        checks=check_args(checks, writes=view),
        ends=None,
        page_size=checks.page_size,
    )


def write_tail(
    state: CanaryState,
    view: ForwardView,
    checks: PoolChecks,
    advance: bool,
    findings: Tensor | None,
) -> None:
    if advance and view.num_rows > state.next_lineage.shape[0]:
        raise ValueError(f"write_tail: {view.num_rows} rows, and scratch for fewer")
    _write(
        state,
        view,
        checks.fingerprint,
        Launch.TAIL,
        checks=NO_CHECKS,
        ends=end_args(view, findings) if advance else None,
        page_size=checks.page_size,
    )


def _write(
    state: CanaryState,
    view: ForwardView,
    source: Fingerprint,
    launch: Launch,
    *,
    checks: Checks,
    ends: Any,
    page_size: int,
) -> None:
    block, chunk, splits = _write_shape(view, source.mode)
    hashing = hashing_args(source, chunk=chunk, slots=block)
    if launch is Launch.TAIL and hashing.heads and view.qo_indptr is None:
        cells = hashing.layers * hashing.heads
        splits = splits_for(view.num_rows, _cdiv(cells, hashing.cells))
    write_kernel[(max(view.num_rows, 1), splits)](
        state=state_args(state),
        rows=row_args(view),
        checks=checks,
        data=byte_args(source),
        ends=ends,
        num_rows=view.num_rows,
        num_tokens=view.num_tokens,
        page_size=page_size,
        max_depth=view.max_depth,
        kind=int(view.writer_kind),
        manager=view.manager,
        tag=ring_tag(launch, view.manager, state.pool),
        IS_TAIL=launch is Launch.TAIL,
        ADVANCES=ends is not None,
        HASHING=hashing,
        BLOCK=block,
        num_warps=1 if view.qo_indptr is None and chunk == 1 else 4,
    )


def _write_shape(rows: ForwardView, mode: FingerprintMode) -> tuple[int, int, int]:
    """(tokens of a program, words hashed at a time, programs of a row)."""
    one_token = rows.qo_indptr is None
    block, chunk = write_block(mode, one_token=one_token)
    blocks = 1 if one_token else _cdiv(rows.num_tokens, block)
    return block, chunk, splits_for(rows.num_rows, blocks)


def poison(state: CanaryState, slots: Tensor, n_live: Tensor | None) -> None:
    count = slots.numel()
    poison_kernel[(_cdiv(count, _POISON_BLOCK), 2)](
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


def move_records(state: CanaryState, dst: Tensor, src: Tensor) -> None:
    """More than `MAX_MOVES` go through a copy in torch, which allocates."""
    count = dst.numel()
    if count > MAX_MOVES:
        for records in (state.head, state.tail):
            records.index_copy_(0, dst, records.index_select(0, src))
        return
    size = next(size for size in MOVE_SIZES if count <= size)
    move_kernel[(2,)](state.head, state.tail, dst, src, count, MOVES=size)


def finish_step(state: CanaryState, view: ForwardView, findings: Tensor) -> None:
    _finish(state, view, findings, advance=True)


def gather_findings(state: CanaryState, req_rows: Tensor, findings: Tensor) -> None:
    # Nothing is read of the rows but `req_rows`.
    rows = ForwardView(
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
    state: CanaryState, rows: ForwardView, findings: Tensor, *, advance: bool
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


def expect_rows(
    state: CanaryState, rows: Tensor, values: Tensor, seeds: Tensor | None
) -> None:
    count = len(rows)
    expect_kernel[(_cdiv(count, _NOTE_BLOCK),)](
        state.expected_lineage,
        state.requests,
        seeds,
        rows,
        values,
        count,
        BLOCK=_NOTE_BLOCK,
        num_warps=1,
    )


def note_tokens(state: CanaryState, sampled: SampledTokens, marks: Tensor) -> None:
    send_tokens(state, sampled, None, None, marks)


def send_tokens(
    state: CanaryState,
    sampled: SampledTokens,
    findings: Tensor | None,
    other_findings: Tensor | None,
    words: Tensor,
) -> None:
    count = len(sampled.req_rows)
    note_kernel[(_cdiv(max(count, 1), _NOTE_BLOCK),)](
        state.requests,
        *sampled,
        findings,
        other_findings,
        words,
        count,
        0 if findings is None else len(findings),
        BLOCK=_NOTE_BLOCK,
        num_warps=1,
    )


def carry(state: CanaryState, rows: CarriedRows, checks: bool) -> None:
    rows.check_layout()
    count = len(rows.places)
    group, known, width, row_stride = rows.numbers
    carried_kernel[(max(count, 1),)](
        state=state_args(state),
        places=rows.places,
        req_rows=rows.req_rows,
        serials=rows.serials,
        positions=rows.positions,
        words=rows.words,
        ids=rows.ids,
        bits=rows.bits,
        sums=rows.sums,
        num_rows=count,
        tag=ring_tag(Launch.CARRIED, NO_MANAGER, state.pool),
        group=group,
        row_stride=row_stride,
        WIDTH=width,
        KNOWN=known,
        KNOWN_BLOCK=triton.next_power_of_2(max(known, 1)),
        CHECKS=checks,
        BLOCK=min(_CARRIED_BLOCK, triton.next_power_of_2(max(width, 1))),
        num_warps=1,
    )


def finish_accepted(
    state: CanaryState,
    draft: CanaryState,
    path: AcceptedPath,
    salts: Tensor,
    checks: bool,
    words: AcceptedWords,
) -> None:
    path.check_layout()
    require_vector("finish_accepted: salts", salts)
    accepted_kernel[(max(path.num_rows, 1),)](
        state=state_args(state),
        draft=state_args(draft),
        path=path_args(path),
        salts=salts,
        words=words.words,
        num_rows=path.num_rows,
        tag=ring_tag(Launch.ACCEPT, NO_MANAGER, state.pool),
        CHECKS=checks,
        BLOCK=triton.next_power_of_2(path.width),
        num_warps=1,
    )
