"""Checks and tokenizes prompts, sends them to the scheduler, and returns the answers.

Lives in one asyncio loop and owns the table of requests in flight. Knows nothing about
HTTP, sockets or processes: messages leave through `send` and arrive through `receive`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.front.caller import CALLER, CALLER_SALT, client_tag
from sglang.srt.managers.front.crash_dump import CrashDump
from sglang.srt.managers.front.heartbeat import Heartbeat
from sglang.srt.managers.front.lora_registry import LoraRegistry
from sglang.srt.managers.front.output_check import OutputCheck
from sglang.srt.managers.front.output_text import OutputText
from sglang.srt.managers.front.prompt_request import (
    Limits,
    PromptRequest,
    check_options,
    check_role,
    to_wire,
    within_vocab,
)
from sglang.srt.managers.front.prompt_tokenizer import PromptTokenizer
from sglang.srt.managers.front.request_cost import CostLimits
from sglang.srt.managers.front.request_log import RequestLog
from sglang.srt.managers.front.request_state import RequestGroup, RequestState, Update
from sglang.srt.managers.front.scheduler_calls import TIMEOUT_SECONDS, SchedulerCalls
from sglang.srt.managers.front.side_work import SideWork
from sglang.srt.managers.messages.errors import (
    BadRequest,
    EngineFailure,
    Unavailable,
    log_failure,
)
from sglang.srt.managers.messages.io_struct import (
    CACHE_TIERS,
    AbortReq,
    BatchOutput,
    EngineFailed,
    GenerateBatch,
    GenerateReq,
    GetSnapshotRsp,
    LoraRef,
    RequestOutput,
    SchedulerReady,
    SchedulerRequest,
    SchedulerResponse,
    SchedulerStats,
    ShutdownReq,
)
from sglang.srt.managers.messages.occupancy import Occupancy
from sglang.srt.utils.quoting import quoted
from sglang.srt.utils.salt_chain import tenant_of

if TYPE_CHECKING:
    from sglang.srt.managers.messages.tier_snapshot import TierSnapshot
    from sglang.srt.metrics.front_metrics import FrontMetrics
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.hf_tokenizer import Tokenizer

logger = logging.getLogger(__name__)


# A long list of prompts lets other requests in after this many.
PROMPTS_PER_TURN = 32


class ServerPhase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "shutting down"
    DEAD = "dead"


class TokenizerManager:
    """The front's side of every request in flight.

    Args:
        tokenizer: None with --skip-tokenizer-init.
        send: sends messages to the scheduler; never blocks.
        metrics: where latencies are recorded, or None.
        sampling_defaults: values for sampling parameters that a request leaves out.
    """

    def __init__(
        self,
        *,
        server_args: ServerArgs,
        tokenizer: Tokenizer | None,
        send: Callable[[Sequence[SchedulerRequest]], None],
        metrics: FrontMetrics | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.server_args = server_args
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.sampling_defaults = dict(sampling_defaults or {})
        self.phase = ServerPhase.STARTING
        self.limits: Limits | None = None
        self._send = send
        self.request_log = RequestLog(is_on=server_args.log_requests)
        self._cost = CostLimits.of(server_args)
        self._states: dict[str, RequestState] = {}
        self._occupancy = Occupancy(server_args)
        self._feeding: set[RequestGroup] = set()
        self._waiting_for_change: list[asyncio.Future[None]] = []
        self._failure: EngineFailure | None = None
        # Incidents that a scheduler reported before it exited.
        self._last_incidents: list[dict[str, Any]] | None = None
        folder = server_args.crash_dump_folder
        self._crash_dump = None if folder is None else CrashDump(Path(folder))
        self._calls = SchedulerCalls(send)
        self.loras = LoraRegistry(
            is_on=server_args.enable_lora,
            model_name=server_args.served_model_name or "",
        )
        self.heartbeat = Heartbeat(
            self._calls.request_sign, timeout=server_args.health_timeout
        )
        self.side_work = SideWork(tokenizer)
        self.prompts = PromptTokenizer(
            tokenizer, self.side_work, is_cut=server_args.allow_auto_truncate
        )

    # -- life ----------------------------------------------------------------------

    def set_ready(self, ready: SchedulerReady) -> None:
        """Accept requests from now on: the scheduler can serve."""
        self.limits = Limits.of(ready)
        self.loras.add(ready.loras)
        self._occupancy.set_running(ready.max_running_requests)
        if self.phase is ServerPhase.STARTING:
            self.phase = ServerPhase.READY

    def set_draining(self) -> None:
        """Refuse new requests; those in flight go on."""
        if self.phase is not ServerPhase.DEAD:
            self.phase = ServerPhase.DRAINING

    def set_dead(self, what: str) -> EngineFailure:
        """Answer everything in flight with an error whose id is logged, because the
        engine failed.
        """
        if self._failure is None:
            self.phase = ServerPhase.DEAD
            n = len(self._states)
            self._failure = log_failure(f"{what}; {n} request(s) were in flight")
            for state in list(self._states.values()):
                state.group.fail(self._failure)
            self._calls.fail(self._failure)
            self._states.clear()
            self._occupancy.clear()
            self._on_change()
            if self._crash_dump is not None:
                self._crash_dump.begin_writing(what)
        return self._failure

    def shutdown_scheduler(self) -> None:
        """Make the scheduler exit; running requests are dropped."""
        self._send([ShutdownReq()])

    def close(self) -> None:
        self.side_work.close()
        if self._crash_dump is not None:
            self._crash_dump.close()

    def check_alive(self) -> None:
        """Raise if only a restart would help.

        Raises:
            Unavailable: the scheduler does not answer, or side work is stuck.
        """
        self.heartbeat.check()
        self.side_work.check()

    @property
    def num_in_flight(self) -> int:
        """Number of requests that the scheduler has not ended yet, including abandoned
        ones.
        """
        return len(self._states)

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing is in flight; returns False if `timeout` seconds pass
        first.
        """
        deadline = time.monotonic() + timeout
        while self._states:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            await asyncio.wait([self._next_change()], timeout=left)
        return True

    # -- requests ------------------------------------------------------------------

    def check_sizes(self, prompts: object, *, field: str) -> None:
        """Reject too many or too long prompts by their list lengths, before looking at
        the millions of entries that a body may contain.

        Args:
            prompts: a text, token ids, or a list of either, as the client sent them.

        Raises:
            BadRequest: `submit` would also reject them.
        """
        if not isinstance(prompts, list) or not prompts or self.limits is None:
            return
        ids_lists = [prompts]
        if not isinstance(prompts[0], int):
            self._occupancy.check_count(len(prompts))
            ids_lists = [entry for entry in prompts if isinstance(entry, list)]
        longest = max(map(len, ids_lists), default=0)
        is_cut = self.server_args.allow_auto_truncate
        if longest > self.limits.max_req_input_len and not is_cut:
            raise self.limits.too_long(longest, field=field)

    async def submit(
        self, prompts: Sequence[PromptRequest], *, wait_for_room: bool = False
    ) -> RequestGroup:
        """Check, tokenize and send `prompts` (each `n` times).

        The caller reads the group with `updates` or `results` of this object, which
        release it; any other caller must call `release`.

        Args:
            wait_for_room: whether to send requests beyond the capacity later instead of
                rejecting them.

        Raises:
            BadRequest: a prompt or an option is wrong; nothing was sent.
            Unavailable: not ready, shutting down, or too many requests.
            EngineFailure: the engine is dead.
        """
        count = sum(prompt.sampling_params.n for prompt in prompts)
        limits = self._admit(count, wait_for_room=wait_for_room)
        prompts, ids = await self._tokenized(
            prompts, limits, cost=None if wait_for_room else self._cost
        )
        group = RequestGroup(
            stream=any(prompt.stream for prompt in prompts), owner=CALLER.get()
        )
        for i, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True)):
            leader: RequestState | None = None
            for request in to_wire(
                self._kept_apart(prompt, group.owner, CALLER_SALT.get()),
                tokens,
                limits,
                is_strict=self.server_args.strict_max_tokens,
                owner=group.owner,
                lora=self.loras.resolve(prompt.lora),
            ):
                text = self._output_text(request)
                state = group.add(
                    request,
                    names=(prompt.rid, prompt.list_rid),
                    text=text,
                    leader=leader,
                    check=self._output_check(request),
                )
                state.prompt_ids = tokens if prompt.keeps_prompt_ids else None
                if prompt.has_input_logprobs and leader is None:
                    leader = state
            await _let_others_in(i)
        if len(group.states) != count:
            raise log_failure(f"{len(group.states)} of {count} requests would be sent")
        self._check_rids(group)
        # Other requests were admitted while a long text was tokenized.
        self._admit(count, wait_for_room=wait_for_room)
        if wait_for_room and count > self._occupancy.room_in_queue:
            group.feeder = asyncio.create_task(self._feed(group))
        else:
            if not wait_for_room:
                self._occupancy.check_tokens(
                    group.num_prompt_tokens, client=client_tag()
                )
            self._dispatch(group.states)
        return group

    async def _tokenized(
        self,
        prompts: Sequence[PromptRequest],
        limits: Limits,
        *,
        cost: CostLimits | None,
    ) -> tuple[list[PromptRequest], list[list[int]]]:
        """Check what can be checked without the engine, and tokenize; with `cost`, also
        check the bounds of a call.

        Returns:
            The prompts, with default lengths shortened to fit, and the token ids of
            each.
        """
        fitted: list[PromptRequest] = []
        checked: SamplingParams | None = None
        known: SamplingParams | None = None
        for i, asked in enumerate(prompts):
            prompt = check_role(asked, self.server_args.disaggregation_mode)
            check_options(
                prompt,
                allow_hidden_states=self.server_args.enable_return_hidden_states,
            )
            self.loras.resolve(prompt.lora)
            if cost is not None:
                cost.check_options(prompt)
            # The prompts of a call may share large parameters.
            if prompt.sampling_params is not checked:
                checked = prompt.sampling_params
                known = within_vocab(checked, limits)
            if known is not None and known is not checked:
                prompt = dataclasses.replace(prompt, sampling_params=known)
            fitted.append(prompt)
            await _let_others_in(i)
        ids = await self.prompts.ids(fitted, limits)
        if cost is None:
            return fitted, ids
        lens = list(map(len, ids))
        fitted = [
            cost.fit_default(prompt, prompt_len, limits)
            for prompt, prompt_len in zip(fitted, lens, strict=True)
        ]
        cost.check_call(fitted, lens, limits)
        return fitted, ids

    async def count_tokens(self, prompt: PromptRequest) -> int:
        """Return the number of tokens that `submit` would make from `prompt`.

        Raises:
            BadRequest: the prompt is too long.
            Unavailable: not ready, or shutting down.
        """
        limits = self._admit(0, wait_for_room=True)
        (ids,) = await self.prompts.ids([prompt], limits)
        return len(ids)

    async def updates(self, group: RequestGroup) -> AsyncIterator[list[Update]]:
        """Yield the group's updates; raises as `RequestGroup.updates`."""
        try:
            async for news in group.updates():
                self.request_log.on_updates(news)
                yield news
        finally:
            self.release(group)

    async def results(self, group: RequestGroup) -> list[Update]:
        """Return the group's complete answers; raises as `RequestGroup.updates`."""
        try:
            await group.wait_finished()
            results = await self.side_work.run(
                group.num_output_tokens, group.take_results
            )
            self.request_log.on_updates(results)
            return results
        finally:
            self.release(group)

    def release(self, group: RequestGroup) -> None:
        """Abort the unfinished requests of a group that is no longer read."""
        if group.is_released:
            return
        group.is_released = True
        if group.feeder is not None:
            group.feeder.cancel()
        running = [s.rid for s in group.states if s.is_sent and not s.is_finished]
        if running and self.phase is not ServerPhase.DEAD:
            logger.debug("abandoned: aborting %d request(s)", len(running))
            self._send([AbortReq(rid=rid) for rid in running])

    def refuse_all(self, message: str) -> None:
        """Answer everything in flight with 503 and abort it."""
        for state in list(self._states.values()):
            state.group.fail(Unavailable(message))

    def abort(
        self,
        rid: str = "",
        *,
        abort_all: bool = False,
        message: str | None = None,
        owner: str | None = None,
    ) -> None:
        """End requests with the finish reason "abort". Unknown ids are ignored and, if
        `owner` is given, also other owners' ids.
        """
        text = message or "aborted by the client"

        def is_meant(state: RequestState) -> bool:
            is_owned = owner is None or state.group.owner == owner
            return is_owned and (abort_all or rid in state.names)

        rids = [state.rid for state in self._states.values() if is_meant(state)]
        if rids:
            self._send([AbortReq(rid=one, message=text) for one in rids])
        for group in self._feeding:
            for state in group.states:
                is_open = not state.is_sent and not state.is_finished
                if is_open and is_meant(state):
                    state.abort_unsent(text)

    # -- control -------------------------------------------------------------------

    async def flush_cache(self, tiers: Sequence[str] = CACHE_TIERS) -> bool:
        """Empty tiers of the prefix cache; does nothing and returns False while
        requests run."""
        self._check_up()
        return await self._calls.flush_cache(tiers)

    async def scheduler_stats(self, timeout: float = TIMEOUT_SECONDS) -> SchedulerStats:
        """Return the scheduler's current gauges and counters."""
        self._check_up()
        return await self._calls.stats(timeout)

    async def profile(self, *, is_start: bool, **options: Any) -> str:
        """Start or stop a profile of the scheduler; returns the path of its trace.

        Raises:
            BadRequest: a profile is already running, none is running, or it cannot be
                written.
        """
        self._check_up()
        return await self._calls.profile(is_start=is_start, **options)

    async def pause_generation(self, mode: str) -> None:
        """Generate nothing until `continue_generation`; new requests wait.

        Args:
            mode: "abort" ends all requests; "retract" makes them wait without their
                memory, "in_place" with it.
        """
        self._check_up()
        if mode == "abort":
            self.abort(abort_all=True, message="generation was paused")
        await self._calls.pause(is_pause=True, mode=mode)

    async def continue_generation(self) -> None:
        """Continue after `pause_generation`; otherwise does nothing."""
        self._check_up()
        await self._calls.pause(is_pause=False)

    async def load_lora(self, name: str, path: str) -> None:
        """Load the adapter in a folder of this host.

        Raises:
            BadRequest: it cannot be served, or the name is in use.
        """
        self._check_up()
        self.loras.add([await self._calls.load_lora(name, path)])

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter once its requests have ended; it accepts no new ones.

        Raises:
            BadRequest: it is not loaded.
        """
        self._check_up()
        with self.loras.leaving(name) as ref:
            while self._uses(ref):
                await self._next_change()
                self._check_up()
            await self._calls.unload_lora(name)
            self.loras.remove(name)

    def _uses(self, ref: LoraRef) -> bool:
        """Whether a request uses an adapter, or waits to be sent."""
        unsent = (state for group in self._feeding for state in group.states)
        return any(
            state.lora == ref and not state.is_finished
            for state in chain(self._states.values(), unsent)
        )

    async def canary_incidents(self) -> list[dict[str, Any]]:
        """Return the KV canary's incidents, oldest first; empty while it is off. After
        an engine failure, returns the incidents reported with the failure.

        Raises:
            EngineFailure: the engine exited without a report.
        """
        try:
            self._check_up()
            return await self._calls.incidents()
        except EngineFailure:
            if self._last_incidents is None:
                raise
            return self._last_incidents

    async def pool_snapshot(self, *, is_whole: bool) -> GetSnapshotRsp:
        """Return the current KV pool and requests, with all pages if `is_whole`."""
        self._check_up()
        return await self._calls.snapshot(is_whole=is_whole)

    async def slot_records(self, slot: int) -> list[dict[str, Any]]:
        """Return the KV canary's records of a slot; empty while it is off."""
        self._check_up()
        return await self._calls.slot_records(slot)

    async def tiers(self) -> TierSnapshot | None:
        """Return what is outside of the device, or None without tiers."""
        self._check_up()
        return await self._calls.tiers()

    # -- the wire ------------------------------------------------------------------

    def receive(self, message: SchedulerResponse) -> None:
        """Handle a message from the scheduler."""
        self.heartbeat.on_sign()
        if isinstance(message, BatchOutput):
            for output in message.outputs:
                self._on_output(output)
        elif isinstance(message, EngineFailed):
            self._last_incidents = message.incidents
            self.set_dead(message.message)
        else:
            self._calls.receive(message)

    def _on_output(self, output: RequestOutput) -> None:
        state = self._states.get(output.rid)
        if state is None:
            return
        if self.metrics is not None:
            self.metrics.on_output(state, output)
        if self._crash_dump is not None:
            self._crash_dump.on_output(output)
        if output.finish_reason is not None:
            del self._states[output.rid]
            self._occupancy.remove(state.client, state.num_prompt_tokens)
            self._on_change()
        state.receive(output)
        if output.finish_reason is not None:
            state.group.on_end(state)

    def _check_up(self) -> None:
        """Raise unless the scheduler can answer questions."""
        if self._failure is not None:
            raise self._failure
        if self.phase is ServerPhase.STARTING:
            raise Unavailable(f"the server is {self.phase.value}")

    def _admit(self, count: int, *, wait_for_room: bool) -> Limits:
        self._check_up()
        if self.phase is not ServerPhase.READY or self.limits is None:
            raise Unavailable(f"the server is {self.phase.value}")
        if not wait_for_room:
            self._occupancy.check_requests(count, client=client_tag())
        return self.limits

    def _kept_apart(
        self, prompt: PromptRequest, owner: str, salt: str
    ) -> PromptRequest:
        """Return `prompt` as one of a tenant of its own, if the operator gave the key a
        `salt` or separates all keys.

        Keys with the same salt belong to one tenant.
        """
        if salt:
            tenant = tenant_of(key=prompt.extra_key, salt=salt)
        elif owner and self.server_args.cache_namespace_per_key:
            tenant = tenant_of(key=prompt.extra_key, owner=owner)
        else:
            return prompt
        return dataclasses.replace(prompt, extra_key=tenant)

    def _output_text(self, request: GenerateReq) -> OutputText | None:
        params = request.sampling_params
        if self.tokenizer is None:
            if params.stop or params.stop_regex:
                raise BadRequest(
                    "stop strings need a tokenizer, but the server runs with "
                    "--skip-tokenizer-init; use stop_token_ids",
                    param="stop",
                )
            return None
        return OutputText(self.tokenizer, params)

    def _output_check(self, request: GenerateReq) -> OutputCheck | None:
        if self.server_args.kv_canary == "none":
            return None
        return OutputCheck(request.rid, request.sampling_params, self.tokenizer)

    def _check_rids(self, group: RequestGroup) -> None:
        seen: set[str] = set()
        for state in group.states:
            if state.rid in seen or state.rid in self._states:
                raise BadRequest(
                    f"rid {quoted(state.shown_rid)} is in use", param="rid"
                )
            seen.add(state.rid)

    def _dispatch(self, states: Sequence[RequestState]) -> None:
        """Send before registering: a request that cannot be sent leaves no state."""
        requests = [state.hand_over() for state in states]
        self.request_log.on_sent(requests)
        if self._crash_dump is not None:
            for request in requests:
                self._crash_dump.on_sent(request)
        single = len(requests) == 1
        self._send(requests if single else [GenerateBatch.pack(requests)])
        for state in states:
            state.is_sent = True
            self._states[state.rid] = state
            self._occupancy.add(state.client, state.num_prompt_tokens)

    async def _feed(self, group: RequestGroup) -> None:
        """Send the requests of `group` as room becomes available."""
        waiting = deque(group.states)
        self._feeding.add(group)
        try:
            while waiting and self._failure is None:
                batch: list[RequestState] = []
                while waiting and len(batch) < self._occupancy.room_in_queue:
                    state = waiting.popleft()
                    if not state.is_finished:
                        batch.append(state)
                if batch:
                    self._dispatch(batch)
                if waiting:
                    await self._next_change()
        except Exception as error:
            group.fail(log_failure("a request could not be sent", error=error))
        finally:
            self._feeding.discard(group)
        if self._failure is not None:
            group.fail(self._failure)

    def _next_change(self) -> asyncio.Future[None]:
        """Return a future that is done as soon as a request leaves the table."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_for_change.append(future)
        return future

    def _on_change(self) -> None:
        waiting, self._waiting_for_change = self._waiting_for_change, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


async def _let_others_in(prompt: int) -> None:
    """Let the loop serve others after every few prompts of a long list."""
    if prompt % PROMPTS_PER_TURN == PROMPTS_PER_TURN - 1:
        await asyncio.sleep(0)
