"""Questions to the scheduler with one answer each: flushes, state, incidents,
snapshots, profiles, pauses.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
    GetTiersReq,
    GetTiersRsp,
    LoadLoraReq,
    LoraRef,
    LoraRsp,
    PauseReq,
    PauseRsp,
    ProfileReq,
    ProfileRsp,
    SchedulerRequest,
    SchedulerStats,
    UnloadLoraReq,
)

if TYPE_CHECKING:
    from sglang.srt.managers.messages.tier_snapshot import TierSnapshot

TIMEOUT_SECONDS = 10.0
# Reading an adapter from a disk.
LOAD_TIMEOUT_SECONDS = 120.0
# A profile takes seconds to start, and longer to write than to record.
PROFILE_TIMEOUT_SECONDS = 300.0

Question = (
    FlushCacheReq
    | GetStateReq
    | GetIncidentsReq
    | GetSnapshotReq
    | GetSlotReq
    | GetTiersReq
    | ProfileReq
    | PauseReq
    | LoadLoraReq
    | UnloadLoraReq
)
Reply = (
    FlushCacheRsp
    | GetStateRsp
    | GetIncidentsRsp
    | GetSnapshotRsp
    | GetSlotRsp
    | GetTiersRsp
    | ProfileRsp
    | PauseRsp
    | LoraRsp
)


class SchedulerCalls:
    """Matches answers to questions by their `call_id`.

    `send` hands messages to the scheduler. Belongs to the thread of the asyncio loop.
    Every question raises Unavailable if no answer arrives in time, or the ApiError of
    an engine that failed meanwhile.
    """

    def __init__(self, send: Callable[[Sequence[SchedulerRequest]], None]) -> None:
        self._send = send
        self._ids = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def flush_cache(self, tiers: Sequence[str]) -> bool:
        """Empty tiers of the prefix cache; returns whether they were emptied."""
        question = FlushCacheReq(call_id=next(self._ids), tiers=tuple(tiers))
        answer: FlushCacheRsp = await self._ask(question, TIMEOUT_SECONDS)
        return answer.success

    async def stats(self, timeout: float = TIMEOUT_SECONDS) -> SchedulerStats:
        """Return the scheduler's current numbers."""
        question = GetStateReq(call_id=next(self._ids))
        answer: GetStateRsp = await self._ask(question, timeout)
        return answer.stats

    def request_sign(self) -> None:
        """Make the scheduler send something, without waiting for it."""
        self._send([GetStateReq(call_id=next(self._ids))])

    async def incidents(self) -> list[dict[str, Any]]:
        """Return the KV canary's incidents, oldest first."""
        question = GetIncidentsReq(call_id=next(self._ids))
        answer: GetIncidentsRsp = await self._ask(question, TIMEOUT_SECONDS)
        return answer.incidents

    async def snapshot(self, *, is_whole: bool) -> GetSnapshotRsp:
        """Return the current KV pool and requests, and the scheduler's numbers."""
        question = GetSnapshotReq(call_id=next(self._ids), is_whole=is_whole)
        answer: GetSnapshotRsp = await self._ask(question, TIMEOUT_SECONDS)
        return answer

    async def slot_records(self, slot: int) -> list[dict[str, Any]]:
        """Return the KV canary's records of a slot; empty while it is off."""
        question = GetSlotReq(call_id=next(self._ids), slot=slot)
        answer: GetSlotRsp = await self._ask(question, TIMEOUT_SECONDS)
        return answer.records

    async def tiers(self) -> TierSnapshot | None:
        """Return what is outside of the device, or None without tiers."""
        question = GetTiersReq(call_id=next(self._ids))
        answer: GetTiersRsp = await self._ask(question, TIMEOUT_SECONDS)
        return answer.tiers

    async def profile(self, *, is_start: bool, **options: Any) -> str:
        """Start or stop a profile; returns the path of its trace.

        Raises:
            BadRequest: the scheduler cannot; the message is its reason.
        """
        question = ProfileReq(call_id=next(self._ids), is_start=is_start, **options)
        answer: ProfileRsp = await self._ask(question, PROFILE_TIMEOUT_SECONDS)
        if answer.error is not None:
            raise BadRequest(answer.error)
        return answer.path

    async def pause(self, *, is_pause: bool, mode: str = "abort") -> None:
        """Stop the scheduler from launching anything, or let it continue."""
        question = PauseReq(call_id=next(self._ids), is_pause=is_pause, mode=mode)
        await self._ask(question, TIMEOUT_SECONDS)

    async def load_lora(self, name: str, path: str) -> LoraRef:
        """Load an adapter.

        Raises:
            BadRequest: the scheduler cannot; the message is its reason.
        """
        question = LoadLoraReq(call_id=next(self._ids), name=name, path=path)
        answer: LoraRsp = await self._ask(question, LOAD_TIMEOUT_SECONDS)
        if answer.lora is None:
            raise BadRequest(answer.error or "the adapter was not loaded")
        return answer.lora

    async def unload_lora(self, name: str) -> None:
        """Forget an adapter; raises as `load_lora`."""
        question = UnloadLoraReq(call_id=next(self._ids), name=name)
        answer: LoraRsp = await self._ask(question, TIMEOUT_SECONDS)
        if answer.error is not None:
            raise BadRequest(answer.error)

    def receive(self, answer: Reply) -> None:
        """Wake the caller that asked; drop answers that come too late."""
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
