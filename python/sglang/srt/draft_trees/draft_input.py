"""The draft's side of an iteration: its input, host-side slots and prefix tails.

Knows rows, lengths and slots. Knows no scheduler and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from sglang.srt.mem_cache.common import extend_rows
from sglang.srt.mem_cache.ops.branch_slots.op import SlotRows, duplicate_prefix_tail

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import BranchLayout
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.page_ledger import IntArray


class BranchColumns(NamedTuple):
    """Columns of draft branches' KV elements in their request's row.

    Fields:
        shift_from: int64 [b * K], shift: int64 [b * K * n]: element e of a branch lies
            in column e below `shift_from`, else in e + the branch's shift number e -
            `shift_from`, or its last one.
        parents: int64 [b * K], rows of the step before that the branches continue.
            Defaults to their own.
    """

    shift_from: Tensor
    shift: Tensor
    parents: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleDraftInput:
    """Input of a draft forward besides the batch.

    Fields:
        hidden_states: [T, width]; the target's in an extend, the draft's own in a draft
            step. None if the draft is a separate language model.
        columns: columns of the branches, in a draft step.
        accept_lens: int64 [R]; new tokens that stay, in the extend after verification.
            Defaults to all.
    """

    hidden_states: Tensor | None
    columns: BranchColumns | None = None
    accept_lens: Tensor | None = None

    @staticmethod
    def prepare_for_decode(
        cache: BasePrefixCache,
        *,
        req_pool_indices: IntArray,
        committed: IntArray,
        allocated: IntArray,
        reserve: int,
        spare: int = 0,
    ) -> IntArray | None:
        """Give every request slots for one more iteration, in whole pages.

        Args:
            req_pool_indices: int64 [b], rows of `req_to_token`.
            committed: int64 [b], tokens that the host knows to have KV. The device may
                be one iteration ahead, which `reserve` allows for.
            allocated: int64 [b], columns that hold slots already.
            reserve: columns after `committed` that are taken (`decode_reserve`), of
                which `spare` are not needed yet.

        Returns:
            int64 [b], columns that hold slots now, or None, with nothing taken, if
            there are too few slots even after eviction.

        Raises:
            RuntimeError: a row is too narrow. Always checked before anything is taken:
                a slot that no row records cannot be freed, and a write past the end of
                a row lands in another request's row.
        """
        if bool((committed + (reserve - spare) <= allocated).all()):
            return allocated
        page, width = cache.page_size, cache.req_to_token_pool.row_width
        ends = np.maximum(allocated, -(-(committed + reserve) // page) * page)
        longest = int(ends.max())
        if longest > width:
            raise RuntimeError(
                f"speculative decoding needs {longest} columns of a request row "
                f"({int(committed[ends.argmax()])} tokens and a reserve of {reserve}, "
                f"page size {page}), but a row has {width}: rows must be widened by "
                "the reserve and a page"
            )
        slots = extend_rows(
            cache, rows=req_pool_indices, prefix_lens=allocated, seq_lens=ends
        )
        return None if slots is None else ends


def duplicate_prefix_tail_to_draft_branches(
    kv_pool: KVCache,
    rows: SlotRows,
    *,
    layout: BranchLayout,
    src: Tensor,
    dst: Tensor,
) -> None:
    """Copy the prefix's last, partial page to every branch but the first, which has it.

    Needed by attention that reads whole pages per branch, which it does not in a draft
    region. It is one move of fixed shape: pairs after the tail are (0, 0), so the host
    need not know its length.

    Args:
        kv_pool: the draft's pool.
        src, dst: int64 [b * `layout.tail_moves`], scratch for the moves.
    """
    if not layout.tail_moves:
        return
    duplicate_prefix_tail(rows, layout=layout, src=src, dst=dst)
    kv_pool.move_kv_cache(dst, src)
