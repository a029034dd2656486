"""What speculative forwards carry beside the batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sglang.srt.speculative.ops.buffers import DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleVerifyInput:
    """The trees that a target forward verifies.

    Fields:
        tree: of b requests, D nodes each.
        topk, num_steps, num_draft_tokens: the numbers K, S and D.
    """

    tree: DraftTree
    topk: int
    num_steps: int
    num_draft_tokens: int

    @property
    def hidden_states(self) -> Tensor | None:
        """The target reads none."""
        return None
