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
class HeadCall:
    """What the head was given and what it returned, for checks.

    Fields:
        hidden: [T, H], the output of the layer stack.
        inputs: [R, H], what the head read; may be `hidden` itself.
        logits: [R, V], as it returned them.
    """

    hidden: Tensor
    inputs: Tensor
    logits: Tensor

    def narrow(self, rows: int) -> HeadCall:
        """Return the first rows of a call that had one row per token."""
        hidden = inputs = self.hidden[:rows]
        if self.inputs is not self.hidden:
            inputs = self.inputs[:rows]
        return HeadCall(hidden=hidden, inputs=inputs, logits=self.logits[:rows])


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
        head: the call of the head that made the logits.
    """

    next_token_logits: Tensor
    hidden_states: Tensor | None
    last_hidden: Tensor | None
    input_logprobs: dict[int, LogprobResult]
    head: HeadCall


class _NotedHead:
    """A head that notes what really goes in and comes out."""

    __slots__ = ("_head", "inputs", "logits")

    def __init__(self, head: Callable[[Tensor], Tensor]) -> None:
        self._head = head

    def __call__(self, rows: Tensor) -> Tensor:
        self.inputs = rows
        self.logits = self._head(rows)
        return self.logits


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
            aux_hidden: as `StackOutput.aux`; captured instead of `hidden` (EAGLE3).
        """
        if self._logit_cap > 0:
            head = self._capped(head)
        rows = _logits_rows(forward_batch)
        needed = hidden if rows is None else hidden[rows]
        returned = hidden if aux_hidden is None else _joined(aux_hidden)
        captured: Tensor | None = None
        last: Tensor | None = None
        if forward_batch.capture_hidden_mode is CaptureHiddenMode.FULL:
            captured, last = returned, hidden
        elif forward_batch.capture_hidden_mode is CaptureHiddenMode.LAST:
            captured, last = returned if rows is None else returned[rows], needed
        noted = _NotedHead(head)
        logits = noted(needed)
        return LogitsProcessorOutput(
            next_token_logits=logits,
            hidden_states=captured,
            last_hidden=captured if aux_hidden is None else last,
            input_logprobs=self._input_logprobs(hidden, head, forward_batch),
            head=HeadCall(hidden=hidden, inputs=noted.inputs, logits=noted.logits),
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


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


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
