"""Proposals that are judged on the device, when the host has planned the next forward.

Under asynchronous scheduling the host learns a step late how many proposals were
accepted, and counts all of them until then. A row's prefix follows from what the
sampler drew, so it is kept where that is known: its length, and its lineage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kv_canary.records import lineage_terms

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.state import CanaryState


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """The rows of a forward some of whose last new tokens are only proposed; int64.

    Fields:
        req_rows, salts, prefix_lens, extend_lens: [R], as in `ForwardView`.
        drafts: [R], how many are.
        input_ids: [T].
    """

    req_rows: Tensor
    salts: Tensor
    prefix_lens: Tensor
    extend_lens: Tensor
    drafts: Tensor
    input_ids: Tensor

    def rejected(self, counts: Tensor) -> Tensor:
        """Return how many [R] were rejected, given how many tokens were sampled: one
        for each that was accepted, and the next one."""
        return (self.drafts - (counts - 1).clamp(min=0)).clamp(min=0)

    def surplus(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return the parts [R] of the rows' lineages that proposals are, less those
        that the accepted tokens are due to be.

        Args:
            tokens: [R, n], as they were sampled.
        """
        count, width = len(self.input_ids), tokens.shape[1]
        row = torch.repeat_interleave(self.extend_lens, output_size=count)
        starts = self.extend_lens.cumsum(dim=0) - self.extend_lens
        number = torch.arange(count, device=row.device) - starts[row]
        draft = number - (self.extend_lens - self.drafts)[row]
        sampled = tokens.long()[row, draft.clamp(0, width - 1)]
        positions, salts = self.prefix_lens[row] + number, self.salts[row]
        terms = lineage_terms(self.input_ids, positions, salts)
        is_accepted = draft < counts[row] - 1
        terms -= lineage_terms(sampled, positions, salts) * is_accepted
        return torch.zeros_like(counts).index_add_(0, row, terms * (draft >= 0))


class RowLengths:
    """How many tokens the KV of each row has, on the device.

    Args:
        num_rows: requests that may hold blocks at once.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._lengths = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def prefix_lens(self, req_rows: Tensor, known: Tensor) -> Tensor:
        """Return the prefixes [R] of rows.

        Args:
            known: [R], as the host knows them, or negative where it does not.
        """
        return torch.where(known < 0, self._lengths[req_rows], known)

    def judge(
        self,
        proposals: Proposals,
        tokens: Tensor,
        counts: Tensor,
        states: Sequence[CanaryState],
    ) -> None:
        """Keep the lengths of rows whose tokens were sampled, and let their lineages be
        those of the tokens that the sampler accepted.

        Args:
            tokens: [R, n], of which counts [R] were sampled.
            states: of all groups.
        """
        rows, counts = proposals.req_rows, counts.long()
        kept = proposals.extend_lens - proposals.rejected(counts)
        self._lengths.index_copy_(0, rows, proposals.prefix_lens + kept)
        surplus = proposals.surplus(tokens, counts)
        for state in states:
            state.expected_lineage.index_add_(0, rows, surplus, alpha=-1)
