"""Native implementations of the slot ops, which unpack layouts and rows.

Each has the parameters of its torch reference and is imported at its first call,
because the kernels may not be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_kernels import ops

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.configs.draft_layout import BranchLayout
    from sglang.srt.mem_cache.ops.branch_slots.op import BranchPaths, SlotRows


def _numbers(layout: BranchLayout) -> list[int]:
    region = -1 if layout.region is None else layout.region
    return [layout.page_size, layout.topk, layout.num_steps, region]


def tail_cache_loc(rows: SlotRows, *, out: Tensor) -> None:
    ops.slots_tail(*rows, out)


def draft_out_cache_loc(rows: SlotRows, *, layout: BranchLayout, out: Tensor) -> None:
    ops.slots_draft(*rows, _numbers(layout), out)


def branch_shifts(
    rows: SlotRows,
    *,
    layout: BranchLayout,
    paged: bool,
    shift_from: Tensor,
    column_shift: Tensor,
) -> None:
    ops.slots_shifts(*rows, _numbers(layout), paged, shift_from, column_shift)


def duplicate_prefix_tail(
    rows: SlotRows, *, layout: BranchLayout, src: Tensor, dst: Tensor
) -> None:
    ops.slots_tail_copies(*rows, _numbers(layout), src, dst)


def accepted_moves(
    accept_index: Tensor, *, out_cache_loc: Tensor, src: Tensor, dst: Tensor
) -> None:
    ops.slots_accepted_moves(accept_index, out_cache_loc, src, dst)


def branch_table(
    rows: SlotRows,
    *,
    layout: BranchLayout,
    paged: bool,
    skip_prefix: bool = False,
    out: Tensor,
) -> None:
    ops.slots_branch_table(*rows, _numbers(layout), paged, skip_prefix, out)


def branch_token_indices(
    rows: SlotRows, *, layout: BranchLayout, indptr: Tensor, indices: Tensor
) -> None:
    ops.slots_branch_indices(*rows, _numbers(layout), indptr, indices)


def branch_ancestors(
    step: int, paths: BranchPaths, *, begins: Tensor, out: Tensor
) -> None:
    ops.slots_ancestors(*paths, begins, step, out)
