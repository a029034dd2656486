"""State that one decode iteration leaves on the device for the next one.

Indexed by request row, so filtering, merging and reordering a batch move nothing, and
the host need not know any of it. With overlapped scheduling the next iteration is
prepared before this one's numbers have arrived.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.draft_trees.buffers import DraftCandidates


class DraftRelay:
    """State by request row. Row 0 is padding; its content is never used.

    Attributes:
        seq_lens: int64 [rows], tokens with KV.
        candidates: candidates for the token after the newest one.
        hidden_states: [rows, H_d], read by the first draft forward, or None.
    """

    def __init__(
        self,
        *,
        rows: int,
        topk: int,
        hidden_size: int | None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.seq_lens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.candidates = DraftCandidates.allocate(rows, topk, device=device)
        self.hidden_states = (
            None
            if hidden_size is None
            else torch.zeros((rows, hidden_size), dtype=dtype, device=device)
        )

    def publish(self, indices: Tensor, seq_lens: Tensor) -> None:
        """Store the new lengths (int64 [b]) of rows `indices` (int64 [b]), right after
        verification."""
        self.seq_lens.index_copy_(0, indices, seq_lens)

    def stash(
        self, indices: Tensor, candidates: DraftCandidates, hidden: Tensor | None
    ) -> None:
        """Store the draft extend's results for rows `indices`; hidden is [b, H_d]."""
        self.candidates.probs.index_copy_(0, indices, candidates.probs)
        self.candidates.ids.index_copy_(0, indices, candidates.ids)
        if self.hidden_states is not None:
            assert hidden is not None
            self.hidden_states.index_copy_(0, indices, hidden)

    def gather(self, indices: Tensor) -> tuple[DraftCandidates, Tensor | None]:
        """Return candidates [b, K] and hidden states [b, H_d] of rows `indices`."""
        hidden = self.hidden_states
        return (
            DraftCandidates(
                probs=self.candidates.probs.index_select(0, indices),
                ids=self.candidates.ids.index_select(0, indices),
            ),
            None if hidden is None else hidden.index_select(0, indices),
        )
