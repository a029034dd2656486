"""KV slots of draft branches, of verification and of the accepted path, read from
`req_to_token` by the rules of `draft_layout.py`. Knows slots and lengths, but no pools
or requests.

Each op writes into tensors of the caller, has fixed shapes and does not wait for the
device; only the reference of `branch_token_indices` reads lengths on the host. Columns
past the end of a row, which the host's width check excludes, yield slot 0 of the
scratch page instead of foreign memory. So do padding rows (row 0).

In all ops: req_to_token [rows, width] int32, rows contiguous, with the columns of the
draft region if there is one; req_pool_indices and seq_lens [b] int64, where seq_lens
are the KV lengths before drafting; K branches, S steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sglang.srt.utils.dispatch import Op

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import BranchLayout

_NATIVE = "sglang.srt.mem_cache.ops.branch_slots.native:"
_TRITON = "sglang.srt.mem_cache.ops.branch_slots.triton:"


class SlotRows(NamedTuple):
    """Where the requests of a batch keep their slots: req_to_token, req_pool_indices,
    seq_lens."""

    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor


class BranchPaths(NamedTuple):
    """How the branches of a draft phase descend from each other.

    Fields:
        parents: [b, 1 + K * (S - 1)] int64, the candidates that branches follow
            (`DraftLevels`), recorded up to the step in question.
        draft_slots: [S, b * K] int64, from `draft_out_cache_loc`.
        seq_lens: [b] int64.
    """

    parents: Tensor
    draft_slots: Tensor
    seq_lens: Tensor


def tail_cache_loc_ref(rows: SlotRows, *, out: Tensor) -> None:
    """out[q, j] = slot of column seq_lens[q] + j: where verification (W = D) and draft
    extend (W = S + 1) write. out: [b, W] int64."""
    columns = rows.seq_lens[:, None] + torch.arange(out.shape[1], device=out.device)
    out.copy_(_slots(rows, columns))


tail_cache_loc = Op(
    reference=tail_cache_loc_ref,
    native=_NATIVE + "tail_cache_loc",
    triton=_TRITON + "tail_cache_loc",
    place="rows.seq_lens",
)


def draft_out_cache_loc_ref(
    rows: SlotRows, *, layout: BranchLayout, out: Tensor
) -> None:
    """out[s, q * K + t] = slot that branch t of request q writes in draft step s.

    out: [S, b * K] int64; a step's slots are contiguous, as kernels that store K and V
    want them.
    """
    step = torch.arange(layout.num_steps, device=out.device)
    first = rows.seq_lens[:, None] + _shifts(rows.seq_lens, layout)
    columns = first[:, :, None] + step
    slots = _slots(rows, columns.flatten(1))
    out.copy_(slots.view(-1, layout.num_steps).t())


draft_out_cache_loc = Op(
    reference=draft_out_cache_loc_ref,
    native=_NATIVE + "draft_out_cache_loc",
    triton=_TRITON + "draft_out_cache_loc",
    place="rows.seq_lens",
)


def branch_shifts_ref(
    rows: SlotRows,
    *,
    layout: BranchLayout,
    paged: bool,
    shift_from: Tensor,
    column_shift: Tensor,
) -> None:
    """Compute the columns of each branch's KV elements: element e lies in column e
    below `shift_from`, else in column e + `column_shift`.

    Args:
        paged: whether the branch reads whole pages, including its copy of the prefix's
            tail, or reads the tail itself. Unsupported with a region, here and below,
            unless the page size is 1.
        shift_from, column_shift: [b * K] int64, written.
    """
    shift_from.copy_(_first_own(rows, layout, paged).repeat_interleave(layout.topk))
    column_shift.copy_(_shifts(rows.seq_lens, layout).reshape(-1))


branch_shifts = Op(
    reference=branch_shifts_ref,
    native=_NATIVE + "branch_shifts",
    triton=_TRITON + "branch_shifts",
    place="rows.seq_lens",
)


def duplicate_prefix_tail_ref(
    rows: SlotRows, *, layout: BranchLayout, src: Tensor, dst: Tensor
) -> None:
    """Compute moves that give branches a copy of the prefix's last partial page, for
    attention that reads whole pages per branch. Do them in the draft pool. Branch 0 has
    the page itself.

    src, dst: [b * `layout.tail_moves`] int64, written; pairs past the tail's length are
    (0, 0). Nothing to do (size 0) with page size 1, K = 1 or a region.
    """
    tails = rows.seq_lens % layout.page_size
    offset = torch.arange(layout.max_tail, device=src.device)
    source = (rows.seq_lens - tails)[:, None, None] + offset
    source = source.expand(-1, layout.topk - 1, -1)
    target = source + _shifts(rows.seq_lens, layout)[:, 1:, None]
    is_copied = (offset < tails[:, None, None]).expand_as(target).flatten(1)
    for moves, columns in ((src, source), (dst, target)):
        slots = _slots(rows, columns.flatten(1))
        moves.copy_(slots.where(is_copied, 0).view(-1))


duplicate_prefix_tail = Op(
    reference=duplicate_prefix_tail_ref,
    native=_NATIVE + "duplicate_prefix_tail",
    triton=_TRITON + "duplicate_prefix_tail",
    place="rows.seq_lens",
)


def accepted_moves_ref(
    accept_index: Tensor, *, out_cache_loc: Tensor, src: Tensor, dst: Tensor
) -> None:
    """Compute moves in the target pool that make the accepted path contiguous.

    Args:
        accept_index: [b, S + 1] int64, from verification.
        out_cache_loc: [b * D] int64, slots that the nodes were written to.
        src, dst: [b * (S + 1)] int64, written: the k-th accepted node of request q goes
            to the slot of its node k. Padding gives the pair (0, 0). A request's
            targets never lie after its sources, but the lists overlap, so all must be
            read before any is written.
    """
    rows, width = accept_index.shape
    is_accepted = accept_index >= 0
    sources = out_cache_loc[accept_index.clamp(min=0)]
    targets = out_cache_loc.view(rows, -1)[:, :width]
    src.copy_(sources.where(is_accepted, 0).view(-1))
    dst.copy_(targets.where(is_accepted, 0).reshape(-1))


accepted_moves = Op(
    reference=accepted_moves_ref,
    native=_NATIVE + "accepted_moves",
    triton=_TRITON + "accepted_moves",
)


def branch_table_ref(
    rows: SlotRows,
    *,
    layout: BranchLayout,
    paged: bool,
    skip_prefix: bool = False,
    out: Tensor,
) -> None:
    """Fill the page table of every branch, as if it had no ancestors but its own.

    It is valid for all draft steps without a region, and for step 0 with one; later
    steps need `branch_ancestors`. Row q * K + t lists the slots of the prefix and then
    of branch t: first slots of pages or, if not `paged`, one slot per KV element. At
    draft step i the branch reads its first seq_lens[q] + i + 1 elements. They follow
    the prefix without a gap, because a paged branch has a copy of the prefix's tail.

    Args:
        skip_prefix: leave out what all branches share: the pages below the boundary
            (the branch then reads seq_lens[q] % P + i + 1 elements) or, if not `paged`,
            the whole prefix (i + 1 elements).
        out: [b * K, columns] int32, rows contiguous, written. Entries past the branch's
            end are 0, and entries that do not fit are left out.
    """
    entry = torch.arange(out.shape[1], device=out.device)
    element = (entry * (layout.page_size if paged else 1)).expand(len(rows[1]), -1)
    own = _first_own(rows, layout, paged)[:, None]
    if skip_prefix:
        element = element + own
    shifts = _shifts(rows.seq_lens, layout)
    own_len = _branch_ends(rows.seq_lens, layout, paged)[:, None] - own
    for branch in range(layout.topk):
        shift = shifts[:, branch, None]
        columns = element + shift.where(element >= own, 0)
        slots = _slots(rows, columns).where(element < own + own_len, 0)
        out.view(len(own), layout.topk, -1)[:, branch] = slots


branch_table = Op(
    reference=branch_table_ref,
    native=_NATIVE + "branch_table",
    triton=_TRITON + "branch_table",
    place="rows.seq_lens",
)


def branch_token_indices_ref(
    rows: SlotRows, *, layout: BranchLayout, indptr: Tensor, indices: Tensor
) -> None:
    """List the slots that each branch reads in each of the first draft steps, as if it
    had no ancestors but its own (see `branch_table`).

    Row i of `indices` holds, for z = q * K + t in order, the slots of the prefix of
    request q and the i + 1 slots that branch t has by then. They start at indptr[i, z].

    Args:
        indptr: [steps, b * K + 1] int32, contiguous, written; steps <= S.
        indices: [steps, capacity] int32, contiguous, written up to the list's end. A
            step needs K * (sum(seq_lens) + b * (i + 1)); entries that do not fit are
            left out.
    """
    table = torch.zeros(
        len(rows.seq_lens) * layout.topk,
        int(rows.seq_lens.max()) + layout.num_steps,
        dtype=torch.int32,
        device=indices.device,
    )
    branch_table_ref(rows, layout=layout, paged=False, out=table)
    lens = rows.seq_lens.repeat_interleave(layout.topk)
    for step in range(indptr.shape[0]):
        counts = (lens + step + 1).tolist()
        parts = [table[z, :count] for z, count in enumerate(counts)]
        flat = torch.cat(parts)[: indices.shape[1]]
        indices[step, : len(flat)] = flat
        indptr[step, 0] = 0
        indptr[step, 1:] = torch.tensor(counts).cumsum(dim=0)


branch_token_indices = Op(
    reference=branch_token_indices_ref,
    native=_NATIVE + "branch_token_indices",
    triton=_TRITON + "branch_token_indices",
    place="rows.seq_lens",
)


def branch_ancestors_ref(
    step: int, paths: BranchPaths, *, begins: Tensor, out: Tensor
) -> None:
    """Let each branch of draft step `step` read its ancestors.

    A branch continues some branch of the step before. In its list, element
    seq_lens[q] + s becomes the slot that its ancestor in step s wrote to, for each s
    below `step`. The element after them stays: it is the slot it writes itself.

    Args:
        begins: [b * K] int64, place of each branch's element 0 in `out`.
        out: [n] int32, contiguous, written; places past its end are left out.
    """
    parents, draft_slots, seq_lens = paths
    branches = draft_slots.shape[1]
    topk = branches // max(len(seq_lens), 1)
    row = torch.arange(branches, device=out.device)
    request, branch = row // topk, row % topk
    for s in range(step, 0, -1):
        candidate = parents[request, 1 + topk * s + branch]
        branch = (candidate - topk - topk**2 * (s - 1)) // topk
        place = begins + seq_lens[request] + s - 1
        slots = draft_slots[s - 1, request * topk + branch].int()
        fits = place < len(out)
        out[place[fits]] = slots[fits]


branch_ancestors = Op(
    reference=branch_ancestors_ref,
    native=_NATIVE + "branch_ancestors",
    triton=_TRITON + "branch_ancestors",
    place="paths.seq_lens",
)


def _first_own(rows: SlotRows, layout: BranchLayout, paged: bool) -> Tensor:
    """Return [b]: the first KV element that a branch does not share with the others."""
    tails = rows.seq_lens % layout.page_size
    return rows.seq_lens - tails if paged else rows.seq_lens


def _branch_ends(seq_lens: Tensor, layout: BranchLayout, paged: bool) -> Tensor:
    """Return [b]: KV elements of a branch, with its padding if it reads whole pages."""
    if not paged:
        return seq_lens + layout.num_steps
    tails = seq_lens % layout.page_size
    return seq_lens - tails + _pages(seq_lens, layout) * layout.page_size


def _pages(seq_lens: Tensor, layout: BranchLayout) -> Tensor:
    size = layout.page_size
    return (seq_lens % size + layout.num_steps + size - 1) // size


def _shifts(seq_lens: Tensor, layout: BranchLayout) -> Tensor:
    """[b, K]: `BranchLayout.branch_shift`."""
    branch = torch.arange(layout.topk, device=seq_lens.device)
    region = layout.region
    if region is None:
        return _pages(seq_lens, layout)[:, None] * layout.page_size * branch
    return region + branch * layout.num_steps - seq_lens[:, None]


def _slots(rows: SlotRows, columns: Tensor) -> Tensor:
    """Return [b, n] int64: slots of columns [b, n] of each request; 0 past the row."""
    width = rows.req_to_token.shape[1]
    table = rows.req_to_token[rows.req_pool_indices]
    slots = table.gather(1, columns.clamp(max=width - 1)).long()
    return slots.where(columns < width, 0)
