"""Turns hidden states into the logits that are needed, and prompt logprobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.srt.forward.batch import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    InputLogprobSpan,
)
from sglang.srt.sampling.logprobs import LogprobResult, concat_logprobs, prompt_logprobs

# Prompt logits are made in slices of this many rows, so that a long prompt over a large
# vocabulary does not need [T, vocab] floats at once.
PROMPT_LOGITS_SLICE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorOutput:
    """Results of a forward.

    Fields:
        next_token_logits: [R, V] in the dtype of the model; the sampler widens the rows
            that it edits.
        hidden_states: [R or T, H] by the capture mode, or None: the hidden states that
            a draft model reads, side by side if it reads several layers.
        last_hidden: the same rows of the last layer, normed, for clients that ask. It
            is `hidden_states` itself if the draft reads that.
        input_logprobs: prompt logprobs by row, for the rows that asked.
    """

    next_token_logits: Tensor
    hidden_states: Tensor | None
    last_hidden: Tensor | None
    input_logprobs: dict[int, LogprobResult]


class LogitsProcessor:
    """Applies the head to the rows that need logits.

    Args:
        logit_cap: logits become cap * tanh(logit / cap) (Gemma 2); 0 disables it.
    """

    def __init__(self, *, logit_cap: float = 0.0) -> None:
        self._logit_cap = logit_cap

    def __call__(
        self,
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
        forward_batch: ForwardBatch,
        *,
        aux_hidden: list[Tensor] | None = None,
    ) -> LogitsProcessorOutput:
        """Compute logits, captured hidden states and prompt logprobs.

        Args:
            hidden: [T, H], normed.
            aux_hidden: [T, H] each; captured instead of `hidden` (EAGLE3).
        """
        if self._logit_cap > 0:
            head = self._capped(head)
        rows = _logits_rows(forward_batch)
        needed = hidden if rows is None else hidden[rows]
        returned = hidden if aux_hidden is None else torch.cat(aux_hidden, dim=-1)
        captured: Tensor | None = None
        last: Tensor | None = None
        if forward_batch.capture_hidden_mode is CaptureHiddenMode.FULL:
            captured, last = returned, hidden
        elif forward_batch.capture_hidden_mode is CaptureHiddenMode.LAST:
            captured, last = returned if rows is None else returned[rows], needed
        return LogitsProcessorOutput(
            next_token_logits=head(needed),
            hidden_states=captured,
            last_hidden=captured if aux_hidden is None else last,
            input_logprobs=self._input_logprobs(hidden, head, forward_batch),
        )

    def _capped(self, head: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        cap = self._logit_cap

        def run(rows: Tensor) -> Tensor:
            # In place: the head made them for this call.
            return head(rows).div_(cap).tanh_().mul_(cap)

        return run

    def _input_logprobs(
        self,
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
        forward_batch: ForwardBatch,
    ) -> dict[int, LogprobResult]:
        if not forward_batch.input_logprobs:
            return {}
        assert forward_batch.qo_indptr is not None
        starts = forward_batch.qo_indptr.tolist()
        return {
            span.row: _score_span(hidden[starts[span.row] :], head, span)
            for span in forward_batch.input_logprobs
        }


def _logits_rows(forward_batch: ForwardBatch) -> Tensor | slice | None:
    """Return the index of the rows of [T, H] that need logits, or None for all rows."""
    token_rows = forward_batch.logits_rows
    is_extend = forward_batch.forward_mode is ForwardMode.EXTEND
    if token_rows is not None and is_extend and forward_batch.batch_size == 1:
        # The last one, without a launch.
        return slice(forward_batch.num_tokens - 1, forward_batch.num_tokens)
    return token_rows


def _score_span(
    row_hidden: Tensor, head: Callable[[Tensor], Tensor], span: InputLogprobSpan
) -> LogprobResult:
    parts = []
    for start in range(span.start, span.stop, PROMPT_LOGITS_SLICE):
        stop = min(start + PROMPT_LOGITS_SLICE, span.stop)
        ids = span.next_tokens[start - span.start : stop - span.start]
        next_tokens = torch.tensor(ids, dtype=torch.int64, device=row_hidden.device)
        logits = head(row_hidden[start:stop])
        parts.append(
            prompt_logprobs(logits, next_tokens, top_k=span.top_k, named=span.named)
        )
    return concat_logprobs(parts)
