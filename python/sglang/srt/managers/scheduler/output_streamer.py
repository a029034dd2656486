"""Builds messages with the output of requests since the last message."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sglang.srt.managers.messages.io_struct import (
    BatchOutput,
    FinishReason,
    GenerateReq,
    LogprobDelta,
    RequestOutput,
    TokenLogprob,
)
from sglang.srt.managers.messages.output_digest import extend_digest

if TYPE_CHECKING:
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.scheduler.scheduler_io import SchedulerIO
    from sglang.srt.sampling.logprobs import HostLogprob

logger = logging.getLogger(__name__)

# Requests named in a log line.
MAX_SHOWN = 16


class OutputStreamer:
    """Sends one `BatchOutput` per step, for the requests that have new output to send.

    A request that does not stream is sent once, when it has finished.

    Args:
        has_digests: whether messages contain digests of their requests' tokens.

    Attributes:
        owed: requests that have ended, but whose end has not been sent, by serial.
    """

    def __init__(
        self, io: SchedulerIO, *, stream_interval: int, has_digests: bool = False
    ) -> None:
        self._io = io
        self._stream_interval = stream_interval
        self._has_digests = has_digests
        self.owed: dict[int, Req] = {}

    def send_owed(self) -> None:
        """Send the ends that, because of a scheduler error, were not sent in their
        step.
        """
        reqs = list(self.owed.values())
        logger.error(
            "the end of %d request(s) had not been sent: %s",
            len(reqs),
            ", ".join(req.rid for req in reqs[:MAX_SHOWN]),
        )
        self._io.send(BatchOutput(outputs=[self._output(req) for req in reqs]))

    def send(self, reqs: Iterable[Req]) -> None:
        outputs = [self._output(req) for req in reqs if self._is_due(req)]
        if outputs:
            self._io.send(BatchOutput(outputs=outputs))

    def refuse(self, request: GenerateReq, message: str, *, status_code: int) -> None:
        """Answer a request that was never admitted."""
        reason = FinishReason(type="abort", message=message, status_code=status_code)
        output = RequestOutput(
            rid=request.rid,
            output_ids=[],
            prompt_tokens=len(request.input_ids),
            completion_tokens=0,
            cached_tokens=0,
            finish_reason=reason,
        )
        self._io.send(BatchOutput(outputs=[output]))

    def _is_due(self, req: Req) -> bool:
        if req.is_finished:
            return True
        if not req.stream:
            return False
        new_tokens = req.output_len - req.sent.tokens
        is_first = req.sent.tokens == 0
        return new_tokens > 0 and (is_first or new_tokens >= self._stream_interval)

    def _output(self, req: Req) -> RequestOutput:
        start, stop = req.sent.tokens, req.output_len
        req.sent.tokens = stop
        if req.is_finished:
            self.owed.pop(req.serial, None)
        return RequestOutput(
            rid=req.rid,
            output_ids=list(req.tokens[req.prompt_len + start : req.prompt_len + stop]),
            prompt_tokens=req.prompt_len,
            completion_tokens=stop,
            cached_tokens=req.cached_tokens,
            finish_reason=req.finish_reason,
            logprobs=_logprob_delta(req, start, stop)
            if req.logprobs.is_wanted
            else None,
            hidden_states=_hidden_delta(req) if req.hidden.are_wanted else None,
            spec_verify_ct=req.verifications.count,
            spec_accept_tokens=req.verifications.accepted_tokens,
            digest=_digest(req) if self._has_digests else None,
            first_token_at=None if req.stream else req.first_token_at,
        )


def _digest(req: Req) -> int:
    """Return the digest of all tokens that count, continued from the last one and
    independent of the slice that is sent.
    """
    sent = req.sent
    begin = req.prompt_len + sent.num_digested
    new = req.tokens[begin : req.prompt_len + req.output_len]
    sent.digest = extend_digest(sent.digest, new)
    sent.num_digested += len(new)
    return sent.digest


def _logprob_delta(req: Req, start: int, stop: int) -> LogprobDelta:
    new = req.logprobs.output[start:stop]
    # A request without output gets one entry, for the ids that it names.
    named = req.logprobs.output[:1] if req.params.max_new_tokens == 0 else new
    delta = LogprobDelta(
        output_token=_tokens(new, req.tokens, at=req.prompt_len + start),
        output_top=[list(entry.top) for entry in new],
        output_named=[list(e.named) for e in named] if req.logprobs.token_ids else [],
    )
    if req.logprobs.start >= 0 and not req.sent.input_logprobs:
        req.sent.input_logprobs = True
        first = max(req.logprobs.start, 1)
        scored = req.logprobs.input
        tokens = _tokens(scored, req.tokens, at=first)
        top: list[list[TokenLogprob] | None] = [list(entry.top) for entry in scored]
        names: list[list[TokenLogprob] | None] = [list(e.named) for e in scored]
        if req.logprobs.start == 0:
            # Position 0 has no predecessor.
            tokens.insert(0, (None, req.tokens[0]))
            top.insert(0, None)
            names.insert(0, None)
        delta.input_token, delta.input_top = tokens, top
        delta.input_named = names if req.logprobs.token_ids else None
    return delta


def _tokens(
    entries: list[HostLogprob], tokens: Sequence[int], *, at: int
) -> list[TokenLogprob]:
    """Return entries of the tokens from position `at`."""
    named = tokens[at : at + len(entries)]
    return [(e.logprob, t) for e, t in zip(entries, named, strict=True)]


def _hidden_delta(req: Req) -> list[list[float]]:
    end = req.hidden_end - req.hidden.begin
    if req.hidden.only_last:
        return req.hidden.states[max(end - 1, 0) : end] if req.is_finished else []
    new = req.hidden.states[req.sent.hidden_states : end]
    req.sent.hidden_states += len(new)
    return new
