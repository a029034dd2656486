"""Questions to the scheduler that have one answer each: flushes, state, incidents,
snapshots, profiles, pauses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.messages.errors import ApiError, BadRequest, Unavailable
from sglang.srt.managers.messages.io_struct import (
    FlushCacheReq,
    FlushCacheRsp,
    GetIncidentsReq,
    GetIncidentsRsp,
    GetSlotReq,
    GetSlotRsp,
    GetSnapshotReq,
    GetSnapshotRsp,
    GetStateReq,
    GetStateRsp,
    PauseReq,
    PauseRsp,
    ProfileReq,
    ProfileRsp,
    SchedulerRequest,
    SchedulerStats,
)

TIMEOUT_SECONDS = 10.0
# A profile takes seconds to begin, and to write longer than it lasted.
PROFILE_TIMEOUT_SECONDS = 300.0

Question = (
    FlushCacheReq
    | GetStateReq
    | GetIncidentsReq
    | GetSnapshotReq
    | GetSlotReq
    | ProfileReq
    | PauseReq
)
Reply = (
    FlushCacheRsp
    | GetStateRsp
    | GetIncidentsRsp
    | GetSnapshotRsp
    | GetSlotRsp
    | ProfileRsp
    | PauseRsp
)


class SchedulerCalls:
    """Matches answers to questions by their `call_id`.

    `send` hands messages to the scheduler. Belongs to the thread of the asyncio loop.
    Every question raises Unavailable where no answer comes in time, and the ApiError
    with which the engine failed meanwhile.
    """

    def __init__(self, send: Callable[[Sequence[SchedulerRequest]], None]) -> None:
        self._send = send
        self._ids = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def flush_cache(self) -> bool:
        """Whether the prefix cache was emptied."""
        question = FlushCacheReq(call_id=next(self._ids))
        answer: FlushCacheRsp = await self._ask(question, TIMEOUT_SECONDS)
        return answer.success

    async def stats(self, timeout: float = TIMEOUT_SECONDS) -> SchedulerStats:
        """The scheduler's numbers of this moment."""
        question = GetStateReq(call_id=next(self._ids))
        answer: GetStateRsp = await self._ask(question, timeout)
        return answer.stats

    def request_sign(self) -> None:
        """Have the scheduler send something; nobody waits for it."""
        self._send([GetStateReq(call_id=next(self._ids))])

    async def incidents(self) -> list[dict[str, Any]]:
        """The KV canary's incidents, oldest first."""
        question = GetIncidentsReq(call_id=next(self._ids))
        answer: GetIncidentsRsp = await self._ask(question, TIMEOUT_SECONDS)
        return answer.incidents

    async def snapshot(self, *, is_whole: bool) -> GetSnapshotRsp:
        """The KV pool and its requests of this moment, and the scheduler's numbers."""
        question = GetSnapshotReq(call_id=next(self._ids), is_whole=is_whole)
        answer: GetSnapshotRsp = await self._ask(question, TIMEOUT_SECONDS)
        return answer

    async def slot_records(self, slot: int) -> list[dict[str, Any]]:
        """The KV canary's records of a slot; empty while it is off."""
        question = GetSlotReq(call_id=next(self._ids), slot=slot)
        answer: GetSlotRsp = await self._ask(question, TIMEOUT_SECONDS)
        return answer.records

    async def profile(self, *, is_start: bool, **options: Any) -> str:
        """Begin or end a profile; returns the path of its trace.

        Raises:
            BadRequest: the scheduler's reason why it cannot.
        """
        question = ProfileReq(call_id=next(self._ids), is_start=is_start, **options)
        answer: ProfileRsp = await self._ask(question, PROFILE_TIMEOUT_SECONDS)
        if answer.error is not None:
            raise BadRequest(answer.error)
        return answer.path

    async def pause(self, *, is_pause: bool, mode: str = "abort") -> None:
        """Let the scheduler launch nothing, or go on."""
        question = PauseReq(call_id=next(self._ids), is_pause=is_pause, mode=mode)
        await self._ask(question, TIMEOUT_SECONDS)

    def receive(self, answer: Reply) -> None:
        """Wake the caller that asked; an answer that came too late is dropped."""
        future = self._open.get(answer.call_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, error: ApiError) -> None:
        """Fail every open question with `error`."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)

    async def _ask(self, question: Question, timeout: float) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[question.call_id] = future
        self._send([question])
        try:
            return await asyncio.wait_for(future, timeout)
        except asyncio.TimeoutError:
            raise Unavailable(
                f"the scheduler did not answer within {timeout:g} seconds"
            ) from None
        finally:
            del self._open[question.call_id]
