"""Launches of the kernels of `mem_cache/ops/branch_slots/op.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from sglang.srt.mem_cache.ops.branch_slots.triton_kernels import (
    accepted_moves_kernel,
    ancestors_kernel,
    branch_indices_kernel,
    branch_table_kernel,
    draft_kernel,
    shifts_kernel,
    tail_copies_kernel,
    tail_kernel,
)
from sglang.srt.utils.triton_launch import block_of, launch_options, require

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import BranchLayout
    from sglang.srt.mem_cache.ops.branch_slots.op import BranchPaths, SlotRows

_BLOCK = 1024


def _table(op: str, rows: SlotRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of `rows`; ValueError for a layout that would be misread."""
    table, indices, lens = rows
    if table.dtype is not torch.int32 or table.stride(1) != 1:
        raise ValueError(
            f"{op}: req_to_token is {table.dtype} with strides {list(table.stride())}; "
            "expected int32 with contiguous rows"
        )
    n = lens.numel()
    require(op, n, torch.int64, req_pool_indices=indices, seq_lens=lens)
    return table, indices, lens


def _row_numbers(table: Tensor) -> tuple[int, int]:
    return table.stride(0), table.shape[1]


def _numbers(layout: BranchLayout) -> dict[str, Any]:
    region = layout.region
    return {
        "region": 0 if region is None else region,
        "PAGE": layout.page_size,
        "K": layout.topk,
        "STEPS": layout.num_steps,
        "HAS_REGION": region is not None,
    }


def tail_cache_loc(rows: SlotRows, *, out: Tensor) -> None:
    """See `mem_cache/ops/branch_slots/op.py`."""
    table, indices, lens = _table("tail_cache_loc", rows)
    n, width = out.shape
    require("tail_cache_loc", lens.numel() * width, torch.int64, out=out)
    if n:
        tail_kernel[(n,)](
            table,
            indices,
            lens,
            out,
            *_row_numbers(table),
            WIDTH=width,
            BLOCK=block_of(width),
            num_warps=1,
            **launch_options(out.device),
        )


def draft_out_cache_loc(rows: SlotRows, *, layout: BranchLayout, out: Tensor) -> None:
    """See `mem_cache/ops/branch_slots/op.py`."""
    table, indices, lens = _table("draft_out_cache_loc", rows)
    n, size = lens.numel(), layout.topk * layout.num_steps
    require("draft_out_cache_loc", n * size, torch.int64, out=out)
    if n:
        draft_kernel[(n,)](
            table,
            indices,
            lens,
            out,
            *_row_numbers(table),
            **_numbers(layout),
            BLOCK=block_of(size),
            num_warps=1,
            **launch_options(out.device),
        )


def branch_shifts(
    rows: SlotRows,
    *,
    layout: BranchLayout,
    paged: bool,
    shift_from: Tensor,
    column_shift: Tensor,
) -> None:
    """See `mem_cache/ops/branch_slots/op.py`."""
    _, _, lens = _table("branch_shifts", rows)
    n = lens.numel()
    require(
        "branch_shifts",
        n * layout.topk,
        torch.int64,
        shift_from=shift_from,
        column_shift=column_shift,
    )
    if n:
        shifts_kernel[(n,)](
            lens,
            shift_from,
            column_shift,
            **_numbers(layout),
            BLOCK=block_of(layout.topk),
            IS_PAGED=paged,
            num_warps=1,
            **launch_options(lens.device),
        )


def duplicate_prefix_tail(
    rows: SlotRows, *, layout: BranchLayout, src: Tensor, dst: Tensor
) -> None:
    """See `mem_cache/ops/branch_slots/op.py`."""
    table, indices, lens = _table("duplicate_prefix_tail", rows)
    n, copies = lens.numel(), layout.topk - 1
    size = n * layout.tail_moves
    require("duplicate_prefix_tail", size, torch.int64, src=src, dst=dst)
    if size:
        tail_copies_kernel[(n, copies)](
            table,
            indices,
            lens,
            src,
            dst,
            *_row_numbers(table),
            **_numbers(layout),
            BLOCK=block_of(layout.max_tail),
            num_warps=1,
            **launch_options(src.device),
        )


def accepted_moves(
    accept_index: Tensor, *, out_cache_loc: Tensor, src: Tensor, dst: Tensor
) -> None:
    """See `mem_cache/ops/branch_slots/op.py`."""
    n, path = accept_index.shape
    require(
        "accepted_moves",
        n * path,
        torch.int64,
        accept_index=accept_index,
        src=src,
        dst=dst,
    )
    places = out_cache_loc.numel()
    require("accepted_moves", places, torch.int64, out_cache_loc=out_cache_loc)
    if n:
        accepted_moves_kernel[(n,)](
            accept_index,
            out_cache_loc,
            src,
            dst,
            NODES=places // n,
            PATH=path,
            BLOCK=block_of(path),
            num_warps=1,
            **launch_options(src.device),
        )


def branch_table(
    rows: SlotRows,
    *,
    layout: BranchLayout,
    paged: bool,
    skip_prefix: bool = False,
    out: Tensor,
) -> None:
    """See `mem_cache/ops/branch_slots/op.py`."""
    table, indices, lens = _table("branch_table", rows)
    branches, columns = out.shape
    if out.dtype is not torch.int32 or out.stride(1) != 1 and columns > 1:
        raise ValueError(
            f"branch_table: out is {out.dtype} with strides {list(out.stride())}; "
            "expected int32 with contiguous rows"
        )
    if branches != lens.numel() * layout.topk:
        raise ValueError(
            f"branch_table: out has {branches} rows for {lens.numel()} requests with "
            f"{layout.topk} branches"
        )
    if out.numel():
        block = min(block_of(columns), _BLOCK)
        branch_table_kernel[(branches, triton.cdiv(columns, block))](
            table,
            indices,
            lens,
            out,
            *_row_numbers(table),
            columns,
            out.stride(0),
            **_numbers(layout),
            BLOCK=block,
            IS_PAGED=paged,
            SKIP_PREFIX=skip_prefix,
            num_warps=4,
            **launch_options(out.device),
        )


def branch_token_indices(
    rows: SlotRows, *, layout: BranchLayout, indptr: Tensor, indices: Tensor
) -> None:
    """See `mem_cache/ops/branch_slots/op.py`."""
    table, req_indices, lens = _table("branch_token_indices", rows)
    n, (steps, capacity) = lens.numel(), indices.shape
    op = "branch_token_indices"
    require(op, steps * (n * layout.topk + 1), torch.int32, indptr=indptr)
    require(op, steps * capacity, torch.int32, indices=indices)
    if n == 0:
        indptr.zero_()
        return
    if steps == 0:
        return
    blocks = triton.cdiv(table.shape[1], _BLOCK)
    branch_indices_kernel[(n * layout.topk, blocks, steps)](
        table,
        req_indices,
        lens,
        indptr,
        indices,
        n,
        *_row_numbers(table),
        capacity,
        **_numbers(layout),
        ROWS_BLOCK=block_of(n),
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(indices.device),
    )


def branch_ancestors(
    step: int, paths: BranchPaths, *, begins: Tensor, out: Tensor
) -> None:
    """See `mem_cache/ops/branch_slots/op.py`."""
    parents, draft_slots, seq_lens = paths
    op, n, (steps, branches) = "branch_ancestors", seq_lens.numel(), draft_slots.shape
    topk = branches // max(n, 1)
    groups = 1 + topk * (steps - 1)
    require(op, n, torch.int64, seq_lens=seq_lens)
    require(op, n * groups, torch.int64, parents=parents)
    require(op, steps * n * topk, torch.int64, draft_slots=draft_slots)
    require(op, n * topk, torch.int64, begins=begins)
    require(op, out.numel(), torch.int32, out=out)
    if n and step:
        ancestors_kernel[(n,)](
            parents,
            draft_slots,
            seq_lens,
            begins,
            out,
            step,
            n,
            out.numel(),
            K=topk,
            GROUPS=groups,
            BLOCK=block_of(topk),
            num_warps=1,
            **launch_options(out.device),
        )
