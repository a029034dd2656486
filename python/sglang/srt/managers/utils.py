"""Leaves shared by scheduler and workers: result bundle and reserve sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang.srt.speculative.draft_layout import alloc_len_per_decode

if TYPE_CHECKING:
    from sglang.srt.layers.logprobs import LogprobResult
    from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBatchResult:
    """Everything the host needs of one forward, on the host once `copy_done` is
    reached.

    Fields:
    tokens: int64 [R * stride]; request r owns `[r * stride, r * stride +
        accept_lens[r])`.
    stride: tokens per request in `tokens` (1 without speculation).
    accept_lens: int64 [R], or None where each request got one token.
    canary: int64 [pools, STATUS_WORDS + R], what the KV canary found in this step in
        the target's pool, and in the draft's where it worked (`StepFindings`); None
        while it is off.
    logprobs: of the sampled tokens, for rows that asked.
    input_logprobs: of prompt tokens, by row, for rows that asked.
    hidden: hidden states for rows that asked.
    copy_done: event of the copy to the host; None: already there.
    """

    tokens: torch.Tensor
    stride: int = 1
    accept_lens: torch.Tensor | None = None
    canary: torch.Tensor | None = None
    logprobs: LogprobResult | None = None
    input_logprobs: dict[int, LogprobResult] = field(default_factory=dict)
    hidden: torch.Tensor | None = None
    copy_done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Block until the host copies are complete."""
        if self.copy_done is not None:
            self.copy_done.synchronize()


def get_alloc_len_per_decode(server_args: ServerArgs) -> int:
    """KV slots that one decode iteration of one request may write.

    1 without speculation. The one source of truth for reserve sizes and row widths.
    """
    if server_args.speculative_algorithm is None:
        return 1
    shape = server_args.tree_shape
    assert server_args.page_size is not None
    return alloc_len_per_decode(
        page_size=server_args.page_size,
        topk=shape.topk,
        num_steps=shape.num_steps,
        num_draft_tokens=shape.num_draft_tokens,
    )


def decode_reserve(server_args: ServerArgs) -> int:
    """KV slots that a request keeps beyond those the host knows to be written.

    One iteration's writes, and as many again for the iteration in flight, whose length
    the host does not know yet. 0 without speculation: slots are taken as they are
    written.
    """
    if server_args.speculative_algorithm is None:
        return 0
    return 2 * get_alloc_len_per_decode(server_args)
