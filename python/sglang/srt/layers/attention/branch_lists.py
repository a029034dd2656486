"""Lists of the KV slots that each draft branch reads, one list per draft step, for
kernels that take (indptr, indices). Knows slots and lengths, but no kernels or layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sglang.srt.mem_cache.ops.branch_slots.op import (
    BranchPaths,
    SlotRows,
    branch_ancestors,
    branch_token_indices,
)

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import BranchLayout
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

GUARD_WORDS = 64
# Not a slot. Guard words that change show that a list has overrun its memory.
_GUARD = -1
_INT32_END = 2**31


class HostOffsets(NamedTuple):
    """Input of the plans of one draft phase, int32 on the host: indptr
    [steps, rows + 1], and `ones` [rows], the number of elements in a row's last
    "page"."""

    indptr: Tensor
    ones: Tensor

    @property
    def rows(self) -> int:
        return self.ones.shape[0]


class BranchLists:
    """The slots that each branch reads, by draft step.

    Row z = q * K + t is branch t of request q. At step i it reads the L slots of the
    prefix and i + 1 others: those of its own columns, or of its ancestors and itself.

    The memory can hold the lists of any batch; guard words follow the declared part.

    Attributes:
        topk: branches of a request. max_rows: most branches of a batch.
        steps: forwards of a draft phase, S - 1.
        capacity: declared entries of a step's lists.
        indptr: int32, flat; a batch uses the first [steps, rows + 1] entries.
        indices: int32 [steps, capacity].

    Raises:
        ValueError: lists that int32 offsets cannot address.
    """

    def __init__(
        self, layout: BranchLayout, *, max_requests: int, pool: ReqToTokenPool
    ) -> None:
        self._layout = layout
        self.topk = layout.topk
        self.max_rows = max_requests * layout.topk
        self.steps = layout.num_steps - 1
        # A branch is at most as long as a context, its root and its drafts.
        longest = pool.context_len + 1 + layout.num_steps
        needed = self.max_rows * longest
        if needed >= _INT32_END:
            raise ValueError(
                f"{max_requests} requests with {layout.topk} draft branches of up to "
                f"{longest} tokens need {needed} KV indices, more than {_INT32_END}; "
                "lower --max-running-requests, --context-length or "
                "--speculative-eagle-topk"
            )
        self._memory = torch.empty(
            self.steps * needed + GUARD_WORDS, dtype=torch.int32, device=pool.device
        )
        self.declare(needed)
        self.indptr = torch.zeros(
            self.steps * (self.max_rows + 1), dtype=torch.int32, device=pool.device
        )
        ones = torch.ones(self.max_rows, dtype=torch.int32)
        self._is_pinned = self.indices.is_cuda
        self._ones = ones.pin_memory() if self._is_pinned else ones

    def declare(self, capacity: int) -> None:
        """Let `indices` have `capacity` entries per step. The memory after them becomes
        guard words."""
        self.capacity = capacity
        declared = self.steps * capacity
        self._memory[declared:] = _GUARD
        self.indices = self._memory[:declared].zero_().view(self.steps, capacity)

    def plan(self, seq_lens: Sequence[int], *, requests: int) -> HostOffsets:
        """Compute the offsets of a phase. Requests after `seq_lens` are padding.

        Raises:
            RuntimeError: the lists do not fit. This is checked here, on the host and
                before anything is enqueued, because kernels would read past the end.
        """
        topk = self._layout.topk
        lens = np.zeros(requests, dtype=np.int64)
        lens[: len(seq_lens)] = seq_lens
        step = np.arange(1, self.steps + 1)[:, None]
        ends = np.cumsum(np.repeat(lens, topk) + step, axis=1)
        longest = int(ends[-1, -1]) if ends.size else 0
        if longest > self.capacity:
            raise RuntimeError(
                f"draft step {self.steps - 1} of {requests} requests with {topk} "
                f"branches reads {longest} KV indices, but the index buffer holds "
                f"{self.capacity} per step: it must be sized with the factor top-k"
            )
        indptr = torch.zeros((self.steps, requests * topk + 1), dtype=torch.int32)
        indptr[:, 1:] = torch.from_numpy(ends)
        if self._is_pinned:
            indptr = indptr.pin_memory()
        return HostOffsets(indptr, self._ones[: requests * topk])

    def fill(self, rows: SlotRows) -> None:
        """Write the offsets and lists of these requests. Enqueued, so it is
        capturable."""
        if not self.steps:
            return
        branch_token_indices(
            rows,
            layout=self._layout,
            indptr=self._indptr_of(len(rows.req_pool_indices)),
            indices=self.indices,
        )

    def follow(self, step: int, paths: BranchPaths) -> None:
        """Let the lists of a step after the first hold the branches' ancestors.
        Enqueued, so it is capturable."""
        branch_ancestors(
            step,
            paths,
            begins=self._indptr_of(len(paths.seq_lens))[step, :-1].long(),
            out=self.indices[step],
        )

    def _indptr_of(self, requests: int) -> Tensor:
        """Return the offsets of a batch's lists, int32 [steps, rows + 1]."""
        entries = self.steps * (requests * self.topk + 1)
        return self.indptr[:entries].view(self.steps, -1)

    def guards_are_intact(self) -> bool:
        """Return whether nothing was written past the declared part. Waits for the
        device."""
        return bool((self._memory[self.indices.numel() :] == _GUARD).all())
