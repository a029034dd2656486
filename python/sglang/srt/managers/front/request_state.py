"""The front's state of requests in flight, and of groups awaited together.

Collects the scheduler's outputs until they are read: a slow reader gets them merged, so
memory stays bounded by the length of the outputs. Use only on the asyncio loop's
thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from sglang.srt.managers.front.output_check import output_fault
from sglang.srt.managers.front.prompt_request import rid_scope
from sglang.srt.managers.messages.errors import (
    CLIENT_ABORT_STATUS,
    ApiError,
    EngineFailure,
    abort_error,
)
from sglang.srt.managers.messages.io_struct import (
    FinishReason,
    GenerateReq,
    LogprobDelta,
    RequestOutput,
)

if TYPE_CHECKING:
    from sglang.srt.managers.front.output_check import OutputCheck
    from sglang.srt.managers.front.output_text import OutputText


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Changes to one request since its last update.

    Fields:
        index: position of the request in its group.
        text, output_ids, logprobs, hidden_states: the new ones only.
        prompt_tokens, completion_tokens, cached_tokens: counts so far.
        finish_reason: set in the last update of a request.
        e2e_latency: seconds since the request arrived.
        prompt_ids: token ids of the prompt, if the request keeps them.
        text_len: number of characters so far, or None if outputs are not checked.
    """

    index: int
    rid: str
    text: str
    output_ids: list[int]
    logprobs: LogprobDelta | None
    hidden_states: list[list[float]] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None
    e2e_latency: float
    spec_verify_ct: int
    spec_accept_tokens: int
    prompt_ids: list[int] | None = None
    text_len: int | None = None

    @property
    def size(self) -> int:
        """Number of tokens and log probabilities: the work to show them."""
        size = len(self.output_ids)
        if self.logprobs is not None:
            size += self.logprobs.size
        if self.hidden_states:
            size += len(self.hidden_states) * len(self.hidden_states[0])
        return size + len(self.prompt_ids or ())


class RequestState:
    """One request between its arrival and its last output.

    `rid` is unique among all clients; `shown_rid` is the client's name for it. `names`
    are the client's names that it answers to: the outputs of a prompt share one, the
    prompts of a list another. `leader` is another output of the same prompt, which gets
    the prompt's log probabilities if this one shows them without receiving them.
    """

    def __init__(
        self,
        request: GenerateReq,
        *,
        group: RequestGroup,
        names: Sequence[str | None],
        text: OutputText | None,
        check: OutputCheck | None = None,
    ) -> None:
        self.rid = request.rid
        self.shown_rid = request.rid.removeprefix(rid_scope(group.owner))
        self.names = frozenset((self.shown_rid, *names))
        self.is_stream = request.stream
        self.num_prompt_tokens = len(request.input_ids)
        self.client = request.client
        self.lora = request.lora
        self.index = len(group.states)
        self.arrived = time.monotonic()
        self.first_output: float | None = None
        self.last_output: float | None = None
        self.is_sent = False
        self.is_finished = False
        self.has_shown_end = False
        self.group = group
        self._request: GenerateReq | None = request
        self.prompt_ids: list[int] | None = None
        self.leader: RequestState | None = None
        self.is_leader = False
        self.input_logprobs: LogprobDelta | None = None
        self._has_shown_input = False
        self._text = text
        self._check = check
        self._is_wrong = False
        self._outputs: list[RequestOutput] = []
        self.num_received = 0

    def hand_over(self) -> GenerateReq:
        """Return the request to send, once; its prompt need not be kept here."""
        assert self._request is not None
        request, self._request = self._request, None
        return request

    def receive(self, output: RequestOutput) -> None:
        """Keep an output of the scheduler and wake the group's reader. If its tokens do
        not follow the earlier ones, fails the group and shows nothing of it.
        """
        if self._is_wrong:
            self.is_finished = output.finish_reason is not None
            return
        self.num_received += len(output.output_ids)
        error = self._find_fault(output)
        if error is not None:
            self._is_wrong = True
            self.is_finished = output.finish_reason is not None
            self.group.fail(error)
            return
        scored = output.logprobs
        if self.is_leader and scored is not None and scored.input_token is not None:
            self.input_logprobs = scored
        self._outputs.append(output)
        self.is_finished = output.finish_reason is not None
        self.group.notify(self, output.finish_reason)

    def _find_fault(self, output: RequestOutput) -> EngineFailure | None:
        if self.num_received != output.completion_tokens:
            return output_fault(
                self.rid,
                f"{self.num_received} tokens arrived, but the engine counts "
                f"{output.completion_tokens}",
            )
        return None if self._check is None else self._check.take_tokens(output)

    def abort_unsent(self, message: str) -> None:
        """End a request that has not been sent to the scheduler yet."""
        self.receive(
            RequestOutput(
                rid=self.rid,
                output_ids=[],
                prompt_tokens=self.num_prompt_tokens,
                completion_tokens=0,
                cached_tokens=0,
                finish_reason=FinishReason(
                    type="abort", message=message, status_code=CLIENT_ABORT_STATUS
                ),
            )
        )
        self.group.on_end(self)

    def take(self) -> Update:
        """Return everything that arrived since the last call, as one update.

        Raises:
            EngineFailure: the update does not match the engine's tokens.
        """
        outputs, self._outputs = self._outputs, []
        last = outputs[-1]
        ids = [token for output in outputs for token in output.output_ids]
        finish, check = last.finish_reason, self._check
        text = "" if self._text is None else self._text.push(ids, finish)
        if check is not None and self._text is not None:
            check.take_text(text, finish)
        update = Update(
            index=self.index,
            rid=self.shown_rid,
            text=text,
            output_ids=ids,
            logprobs=self._with_input(_merge_logprobs(outputs)),
            hidden_states=_merge_hidden_states(outputs),
            prompt_tokens=last.prompt_tokens,
            completion_tokens=last.completion_tokens,
            cached_tokens=last.cached_tokens,
            finish_reason=finish,
            e2e_latency=time.monotonic() - self.arrived,
            spec_verify_ct=last.spec_verify_ct,
            spec_accept_tokens=last.spec_accept_tokens,
            prompt_ids=self.prompt_ids,
            text_len=None if check is None else check.text_len,
        )
        if check is not None:
            check.check_update(update)
        self.has_shown_end = update.finish_reason is not None
        return update

    @property
    def waits_for_leader(self) -> bool:
        """Whether the prompt's log probabilities are still to come."""
        leader = self.leader
        return (
            leader is not None
            and leader.input_logprobs is None
            and not leader.is_finished
        )

    def _with_input(self, delta: LogprobDelta | None) -> LogprobDelta | None:
        """Add the prompt's log probabilities once, if another request has them."""
        leader = self.leader
        if leader is None or self._has_shown_input or delta is None:
            return delta
        scored = leader.input_logprobs
        if scored is None:
            return delta
        self._has_shown_input = True
        return msgspec.structs.replace(
            delta,
            input_token=scored.input_token,
            input_top=scored.input_top,
            input_named=scored.input_named,
        )


class RequestGroup:
    """Requests that one caller, the `owner`, awaits together; one reader at a time."""

    def __init__(self, *, stream: bool, owner: str = "") -> None:
        self.owner = owner
        self.states: list[RequestState] = []
        self.feeder: asyncio.Task[None] | None = None
        self.is_released = False
        self._stream = stream
        self._unfinished = 0
        self._num_ended = 0
        self._error: Exception | None = None
        self._fresh: dict[int, RequestState] = {}
        self._wake = asyncio.Event()

    def add(
        self,
        request: GenerateReq,
        *,
        names: Sequence[str | None],
        text: OutputText | None,
        leader: RequestState | None = None,
        check: OutputCheck | None = None,
    ) -> RequestState:
        state = RequestState(request, group=self, names=names, text=text, check=check)
        if leader is not None:
            state.leader, leader.is_leader = leader, True
        self.states.append(state)
        self._unfinished += 1
        return state

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests; each copy of a prompt counts."""
        return sum(state.num_prompt_tokens for state in self.states)

    def notify(self, state: RequestState, finish: FinishReason | None) -> None:
        """Record that `state` has a new output; `finish` ends it."""
        if self.is_released:
            return
        self._fresh[state.index] = state
        if finish is not None:
            self._unfinished -= 1
            error = _refusal(finish)
            if error is not None:
                self.fail(error)
        if self._stream or self._unfinished == 0:
            self._wake.set()

    def on_end(self, state: RequestState) -> None:
        """Make sure that the reader learns of a request that has ended, whatever became
        of its last output.
        """
        if self.is_released or self._error is not None:
            return
        self._num_ended += 1
        is_last = self._have_all_ended
        is_told = state.is_finished and state.index in self._fresh
        if not is_told or (is_last and self._unfinished):
            self.fail(output_fault(state.rid, "its end did not reach its reader"))
        elif self._stream or is_last:
            self._wake.set()

    @property
    def _have_all_ended(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self._num_ended == len(self.states)

    def fail(self, error: Exception) -> None:
        """Raise `error` in the reader; the first error wins."""
        if self._error is None:
            self._error = error
        self._wake.set()

    async def updates(self) -> AsyncIterator[list[Update]]:
        """Yield the group's updates as they arrive, until all requests have finished.

        Raises:
            ApiError: a request was rejected, or the engine failed.
            ClientDisconnected: the client has left.
        """
        while self._unfinished or self._fresh:
            is_last = self._error is not None or self._have_all_ended
            if not is_last:
                await self._wake.wait()
                self._wake.clear()
            fresh: list[RequestState] = []
            # Outputs from before an engine failure are valid and yielded first, even if
            # the failure arrived while the reader was busy.
            if not self._is_refused():
                is_over = self._error is not None
                fresh = [
                    state
                    for state in self._fresh.values()
                    if is_over or not state.waits_for_leader
                ]
                for state in fresh:
                    del self._fresh[state.index]
                if fresh:
                    yield [state.take() for state in fresh]
            is_drained = not fresh or not self._fresh
            if self._error is not None and (self._is_refused() or is_drained):
                raise self._error
            if is_last and not fresh:
                break
        self._check_ends()

    def _is_refused(self) -> bool:
        return self._error is not None and not isinstance(self._error, EngineFailure)

    async def wait_finished(self) -> None:
        """Wait until all requests have finished, before `take_results`.

        Raises: as `updates`.
        """
        while self._unfinished and self._error is None:
            if self._have_all_ended:
                break
            await self._wake.wait()
            self._wake.clear()
        if self._error is not None:
            raise self._error
        self._fresh.clear()

    def take_results(self) -> list[Update]:
        """Return one update per request, in order; they no longer change.

        Raises:
            EngineFailure: an update does not match the engine's tokens.
        """
        results = [state.take() for state in self.states]
        self._check_ends()
        return results

    def _check_ends(self) -> None:
        """Check that the reader has got the end of every request.

        Raises:
            EngineFailure: it has not.
        """
        for state in self.states:
            if not state.has_shown_end:
                raise output_fault(state.rid, "its end was not shown")

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens that have arrived."""
        return sum(state.num_received for state in self.states)


def _refusal(finish: FinishReason) -> ApiError | None:
    """Return the cause if this is an abort that the client did not request."""
    if finish.type != "abort" or finish.status_code in (None, CLIENT_ABORT_STATUS):
        return None
    assert finish.status_code is not None
    return abort_error(finish.status_code, finish.message or "aborted")


def _merge_logprobs(outputs: Sequence[RequestOutput]) -> LogprobDelta | None:
    parts = [output.logprobs for output in outputs if output.logprobs is not None]
    if len(parts) <= 1:
        return parts[0] if parts else None
    with_input = next(
        (part for part in parts if part.input_token is not None), parts[0]
    )
    return LogprobDelta(
        input_token=with_input.input_token,
        input_top=with_input.input_top,
        output_token=[entry for part in parts for entry in part.output_token],
        output_top=[entry for part in parts for entry in part.output_top],
        input_named=with_input.input_named,
        output_named=[entry for part in parts for entry in part.output_named],
    )


def _merge_hidden_states(outputs: Sequence[RequestOutput]) -> list[list[float]] | None:
    parts = [output.hidden_states for output in outputs]
    if all(part is None for part in parts):
        return None
    return [row for part in parts if part is not None for row in part]
