"""Owns the requests of a scheduler by id: accepts them, and ends requests that never
ran.

Knows nothing about batches beyond the queue.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from sglang.srt.managers.messages.occupancy import spare_room

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.messages.io_struct import (
        AbortReq,
        GenerateReq,
        GrammarDecision,
    )
    from sglang.srt.managers.scheduler.batch_selector import BatchSelector
    from sglang.srt.managers.scheduler.canary_gate import CanaryGate
    from sglang.srt.managers.scheduler.grammar_queue import GrammarQueue
    from sglang.srt.managers.scheduler.handover import Handover
    from sglang.srt.managers.scheduler.output_streamer import OutputStreamer
    from sglang.srt.managers.scheduler.request_factory import RequestFactory
    from sglang.srt.managers.scheduler.stats import StatsTracker
    from sglang.srt.replay.recording.recorder import Recorder


class RequestIntake:
    """Accepts requests and makes sure that each is answered: by its result, an abort or
    a rejection.

    Args:
        batches: owner of the queue that requests join.
        grammars: compiles grammars, or None if requests may not have any.
        canary: receives the ids of requests.
        max_queued_requests: maximum number of waiting requests; more are rejected.
        unfinished: all unfinished requests by id; maintained here.
        handover: is told which requests are accepted and end.

    Attributes:
        recorder: is told which requests are accepted and end, or None.
    """

    def __init__(
        self,
        factory: RequestFactory,
        *,
        batches: BatchSelector,
        grammars: GrammarQueue | None,
        canary: CanaryGate | None,
        streamer: OutputStreamer,
        stats: StatsTracker,
        max_queued_requests: int,
        unfinished: dict[str, Req],
        handover: Handover,
    ) -> None:
        self._handover = handover
        self._factory = factory
        self._batches = batches
        self._grammars = grammars
        self._canary = canary
        self._streamer = streamer
        self._stats = stats
        self._max_queued_requests = max_queued_requests
        self._spare = spare_room(max_queued_requests)
        self._unfinished = unfinished
        self.recorder: Recorder | None = None

    def accept(self, request: GenerateReq) -> None:
        """Queue a request, or reject it with the reason."""
        try:
            req = self._factory.create(request)
        except ValueError as error:
            self._streamer.refuse(request, str(error), status_code=400)
            return
        limit = self._max_queued_requests
        if self._is_full(req.client):
            self._streamer.refuse(
                request,
                f"the queue is full ({limit} requests wait); try again later",
                status_code=503,
            )
            return
        self._take_in(request, req)
        grammar_key = req.params.grammar_key
        if grammar_key is None:
            self._batches.queue(req)
        elif self._grammars is None:
            req.abort(
                f"{grammar_key[0]} needs a tokenizer with an EOS token and "
                "--grammar-backend llguidance",
                status_code=400,
            )
            self.end(req)
        else:
            self._grammars.submit(req)

    def _is_full(self, client: str) -> bool:
        """Whether the queue accepts no more requests of `client`, by the rule of
        `Occupancy`.
        """
        queued = self._batches.waiting
        compiling = () if self._grammars is None else self._grammars.waiting
        excess = len(queued) + len(compiling) - self._max_queued_requests
        if excess < 0:
            return False
        held = sum(req.client == client for req in chain(queued, compiling))
        return held >= self._spare or excess >= self._spare

    def readmit(self, request: GenerateReq) -> Req:
        """Accept a request without queueing it; the caller restores its memory.

        Raises:
            ValueError: it cannot be served.
        """
        req = self._factory.create(request)
        self._take_in(request, req)
        return req

    def _take_in(self, request: GenerateReq, req: Req) -> None:
        self._unfinished[req.rid] = req
        self._handover.on_request(req)
        if self._canary is not None:
            self._canary.admit(req)
        if self.recorder is not None:
            self.recorder.on_request(request, req)

    @property
    def num_created(self) -> int:
        """Number of requests so far, which determines the seeds of requests without
        one.
        """
        return self._factory.num_created

    @num_created.setter
    def num_created(self, value: int) -> None:
        self._factory.num_created = value

    def abort(self, message: AbortReq) -> None:
        """End one request or all: waiting ones now, running ones after their step."""
        rids = list(self._unfinished) if message.abort_all else [message.rid]
        waiting = self._batches.waiting
        for rid in rids:
            req = self._unfinished.get(rid)
            if req is None or req.is_finished:
                continue
            req.abort_message = message.message
            if self._grammars is not None and self._grammars.cancel(rid) is not None:
                req.finish_if_aborted()
                self.end(req)
            elif req.req_pool_idx == 0 and req in waiting:
                waiting.remove(req)
                req.finish_if_aborted()
                self.end(req)

    def apply_grammars(self, decisions: list[GrammarDecision]) -> None:
        """Queue the requests whose grammar is ready; end the ones whose grammar
        failed.
        """
        assert self._grammars is not None
        ready, failed = self._grammars.apply(decisions)
        for req in ready:
            self._batches.queue(req)
        for req in failed:
            self.end(req)

    def renew_grammar(self, req: Req) -> None:
        """Let a running request wait for another grammar, and then continue."""
        assert self._grammars is not None
        self._batches.withdraw(req)
        self._grammars.submit(req)

    def queue_first(self, reqs: Sequence[Req]) -> None:
        """Queue requests that have already run before all others, in this order. A
        request that has lost its grammar first waits for another.
        """
        lost = [req for req in reqs if req.grammar_failure is not None]
        for req in lost:
            assert self._grammars is not None
            self._grammars.submit(req)
        self._batches.put_first([req for req in reqs if req not in lost])

    def limit_length(self, max_total_len: int) -> None:
        """Reject longer requests from now on, and end waiting ones that are longer,
        which would wait forever.
        """
        limits = self._factory.limits
        if max_total_len >= limits.max_total_len:
            return
        self._factory.limits = replace(limits, max_total_len=max_total_len)
        for req in [
            r for r in self._batches.waiting if r.max_total_len > max_total_len
        ]:
            self._batches.waiting.remove(req)
            req.abort(
                f"{req.max_total_len} tokens do not fit any more: damaged KV pages are "
                f"out of use, and {max_total_len} do",
                status_code=500,
            )
            self.end(req)

    def is_unanswered(self, req: Req) -> bool:
        """Whether a request is still unfinished."""
        return self._unfinished.get(req.rid) is req

    def revive(self, req: Req) -> None:
        """Undo the end of a request that was not answered yet."""
        self._unfinished[req.rid] = req
        self._streamer.owed.pop(req.serial, None)
        self._stats.on_revived(req)
        if self.recorder is not None:
            self.recorder.on_revived(req)
        req.req_pool_idx = 0

    def end(self, req: Req) -> None:
        """Answer a finished request that is not in a batch."""
        self.forget(req)
        self._streamer.send([req])

    def forget(self, req: Req) -> None:
        """Remove a request that has finished, and whose end is to be sent."""
        self._unfinished.pop(req.rid, None)
        self._streamer.owed[req.serial] = req
        self._stats.on_finish(req)
        self._handover.on_end(req)
        if self.recorder is not None:
            self.recorder.on_end(req)
