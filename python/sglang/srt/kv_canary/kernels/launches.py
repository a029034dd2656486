"""The canary's launches: each runs natively, as a Triton kernel, or in torch.

Per forward: `before_model` (verify and head write), the model, `write_tail`; `verify`
alone serves sweeps. None allocates memory that outlives it or waits for the device,
except in torch. Knows no requests and no pools.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang.srt.kv_canary.kernels import native, reference, reference_write
from sglang.srt.kv_canary.kernels.finish import STATUS_WORDS
from sglang.srt.kv_canary.kernels.records import WriterKind
from sglang.srt.kv_canary.kernels.state import (
    NO_FINGERPRINT,
    NO_MANAGER,
    CanaryRows,
    CanaryState,
    Fingerprint,
)
from sglang.srt.layers.ops.dispatch import triton_ops, use_native, use_triton
from sglang.srt.model_executor.forward_batch_info import KVReadView


def _import_triton() -> Any:
    if triton_ops is None:
        return None
    from sglang.srt.kv_canary.kernels import triton_launch

    return triton_launch


_triton = _import_triton()


def verify(
    state: CanaryState,
    rows: CanaryRows,
    table: KVReadView,
    *,
    fingerprint: Fingerprint = NO_FINGERPRINT,
    req_to_token: Tensor | None,
    tokens: Tensor | None = None,
    token_offset: int = 0,
    manager: int = NO_MANAGER,
) -> None:
    """Check every slot that is about to be read; each finding is a ring entry and bits
    in the verdict of its request row.

    Elements below `prefix_lens` are compared with their records, the others with
    `out_cache_loc`. A row whose elements end before its prefix, or among its new
    tokens, is a READ_SET at the position where they end, with slot -1.

    Args:
        req_to_token: int32 [req_rows, W], what READ_SET expects. None: a sweep; its
            rows (any `req_rows` but 0) belong to no request, so that columns and
            `expected_lineage` are not compared and findings go to verdict 0.
        tokens: int32 [req_rows, W'] | None, tokens by position; negative: not known.
        token_offset: the slot of position p holds token p + offset.
        manager: whose phase must be IDLE and becomes AFTER_VERIFY; NO_MANAGER: none.
    """
    _of(state, native, reference).verify(
        state,
        rows,
        table,
        fingerprint,
        req_to_token=req_to_token,
        tokens=tokens,
        token_offset=token_offset,
        manager=manager,
    )


def before_model(
    state: CanaryState,
    rows: CanaryRows,
    table: KVReadView,
    *,
    fingerprint: Fingerprint = NO_FINGERPRINT,
    req_to_token: Tensor,
    tokens: Tensor | None = None,
    token_offset: int = 0,
    page_size: int,
    writer_kind: WriterKind,
    manager: int = NO_MANAGER,
    oracle: tuple[Tensor, Tensor] | None = None,
    published: Tensor | None = None,
) -> None:
    """`verify`, then `write_head`, with their arguments, in one launch: on the CPU one
    after the other, in Triton at once (`triton_before.py`)."""
    # Every forward comes by here and by `write_tail`: one call less where it counts.
    module: Any = native if use_native(state.head) else _of(state, native, None)
    if module is not None:
        module.before_model(
            state,
            rows,
            table,
            fingerprint,
            req_to_token=req_to_token,
            tokens=tokens,
            token_offset=token_offset,
            page_size=page_size,
            writer_kind=writer_kind,
            manager=manager,
            oracle=oracle,
            published=published,
        )
        return
    verify(
        state,
        rows,
        table,
        fingerprint=fingerprint,
        req_to_token=req_to_token,
        tokens=tokens,
        token_offset=token_offset,
        manager=manager,
    )
    write_head(
        state,
        rows,
        req_to_token=req_to_token,
        page_size=page_size,
        writer_kind=writer_kind,
        manager=manager,
        oracle=oracle,
        published=published,
    )


def write_head(
    state: CanaryState,
    rows: CanaryRows,
    *,
    req_to_token: Tensor | None,
    page_size: int,
    writer_kind: WriterKind,
    manager: int = NO_MANAGER,
    oracle: tuple[Tensor, Tensor] | None = None,
    published: Tensor | None = None,
) -> None:
    """Check where the new tokens will be written and write their head records.

    Lineages start from `expected_lineage`, or from the seed where the prefix is empty.

    Args:
        req_to_token: int32 [req_rows, W] | None: slots are not compared with columns;
            the j-th new token of a row stands in column `prefix_lens` + j.
        page_size: slots below it are scratch; padded rows write nothing else.
        oracle: (tokens, positions), int64 [T] each, that the inputs must equal;
            negative: not known.
        published: int32 [req_rows, W'] | None, tokens by position, which the inputs
            must be (of a verification the roots); negative: not known.
        manager: phase AFTER_VERIFY becomes AFTER_HEAD.
    """
    _of(state, native, reference_write).write_head(
        state,
        rows,
        req_to_token=req_to_token,
        page_size=page_size,
        writer_kind=writer_kind,
        manager=manager,
        oracle=oracle,
        published=published,
    )


def write_tail(
    state: CanaryState,
    rows: CanaryRows,
    *,
    fingerprint: Fingerprint = NO_FINGERPRINT,
    page_size: int,
    writer_kind: WriterKind,
    manager: int = NO_MANAGER,
    advance: bool = False,
    findings: Tensor | None = None,
) -> None:
    """After the model: check that the head records are still this forward's, write the
    tail records with fingerprints of the bytes, advance the clock.

    `rows`, `page_size` and `writer_kind` must be those of `write_head`, and
    `expected_lineage` unchanged since. `manager`: phase AFTER_HEAD becomes IDLE.

    Args:
        advance: as its last deed the launch also advances the rows' lineages, as
            `finish_step` does.
        findings: int64 [>= STATUS_WORDS + R], filled by `gather_findings` after that;
            the rows must differ. None: `finish_step` does both, as for trees.

    Raises:
        ValueError: `advance` with a tree, whose accepted path is not known yet, or
            findings without `advance`.
    """
    if advance and rows.parent_index is not None:
        raise ValueError("write_tail: lineages of a tree; use finish_step")
    if findings is not None and not advance:
        raise ValueError("write_tail: findings are those of a forward that advances")
    is_native = use_native(state.head)
    module: Any = native if is_native else _of(state, native, reference_write)
    module.write_tail(
        state,
        rows,
        fingerprint,
        page_size=page_size,
        writer_kind=writer_kind,
        manager=manager,
        advance=advance,
        findings=findings,
    )


def poison(state: CanaryState, slots: Tensor, *, n_live: Tensor | None = None) -> None:
    """Poison slots [n] int64, or the first `n_live` [1] int64 of them. What is poisoned
    already keeps its first freeing step; ids outside the pool are skipped."""
    if slots.numel():
        _of(state, native, reference_write).poison(state, slots, n_live)


def move_records(state: CanaryState, *, dst: Tensor, src: Tensor) -> None:
    """records[dst] = records[src], int64 [n] each, as if all was read first. dst may
    repeat only with equal sources; ids must lie in the pool."""
    if dst.numel():
        _of(state, reference_write, reference_write).move_records(
            state, dst=dst, src=src
        )


def set_lineage(state: CanaryState, rows: Tensor, values: Tensor) -> None:
    """expected_lineage[rows] = values, int64 [n] each, from the host's tokens."""
    state.expected_lineage.index_copy_(0, rows, values)


def finish_step(state: CanaryState, rows: CanaryRows) -> Tensor:
    """What `write_tail` leaves to do for a forward whose tail was written without: the
    rows' lineages advance over their new tokens, or those that stay (from the seed
    where the prefix is empty), then `gather_findings` of the rows. For who publishes
    tokens. No row may read a lineage that another one writes.

    Raises:
        ValueError: `rows` has a tree; only an accepted path has a lineage.
    """
    if rows.parent_index is not None:
        raise ValueError("finish_step: rows.parent_index must be None")
    findings = _new_findings(state, rows.num_rows)
    _of(state, native, reference_write).finish_step(state, rows, findings)
    return findings


def gather_findings(state: CanaryState, req_rows: Tensor) -> Tensor:
    """Findings about request rows [R] int64, whose verdicts are cleared. Row 0 may
    repeat: it yields 0 and keeps its verdict. Other rows must differ.

    Returns:
        int64 [STATUS_WORDS + R] on the device; ring and counters stay.
    """
    findings = _new_findings(state, len(req_rows))
    _of(state, native, reference_write).gather_findings(state, req_rows, findings)
    return findings


def _new_findings(state: CanaryState, rows: int) -> Tensor:
    return state.counters.new_empty(STATUS_WORDS + rows)


def _of(state: CanaryState, native_module: Any, reference_module: Any) -> Any:
    if use_native(state.head):
        return native_module
    return _triton if use_triton(state.head) else reference_module
