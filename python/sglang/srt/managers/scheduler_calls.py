"""Questions to the scheduler that have one answer each: cache flushes, state."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sglang.srt.managers.errors import ApiError, Unavailable
from sglang.srt.managers.io_struct import (
    FlushCacheReq,
    FlushCacheRsp,
    GetStateReq,
    GetStateRsp,
    SchedulerRequest,
    SchedulerStats,
)

T = TypeVar("T")

TIMEOUT_SECONDS = 10.0


class SchedulerCalls:
    """Matches answers to questions by their `call_id`.

    `send` hands messages to the scheduler. Belongs to the thread of the asyncio loop.
    """

    def __init__(self, send: Callable[[Sequence[SchedulerRequest]], None]) -> None:
        self._send = send
        self._ids = itertools.count()
        self._flushes: dict[int, asyncio.Future[FlushCacheRsp]] = {}
        self._states: dict[int, asyncio.Future[GetStateRsp]] = {}

    async def flush_cache(self) -> bool:
        """Whether the prefix cache was emptied.

        Raises:
            Unavailable: no answer in time.
            ApiError: the engine failed meanwhile.
        """
        call_id = next(self._ids)
        future: asyncio.Future[FlushCacheRsp]
        future = self._flushes[call_id] = asyncio.get_running_loop().create_future()
        self._send([FlushCacheReq(call_id=call_id)])
        try:
            return (await _in_time(future, TIMEOUT_SECONDS)).success
        finally:
            del self._flushes[call_id]

    async def stats(self, timeout: float = TIMEOUT_SECONDS) -> SchedulerStats:
        """The scheduler's numbers of this moment. Raises: as `flush_cache`."""
        call_id = next(self._ids)
        future: asyncio.Future[GetStateRsp]
        future = self._states[call_id] = asyncio.get_running_loop().create_future()
        self._send([GetStateReq(call_id=call_id)])
        try:
            return (await _in_time(future, timeout)).stats
        finally:
            del self._states[call_id]

    def receive(self, answer: FlushCacheRsp | GetStateRsp) -> None:
        """Wake whoever asked; an answer that came too late is dropped."""
        if isinstance(answer, FlushCacheRsp):
            _resolve(self._flushes.get(answer.call_id), answer)
        else:
            _resolve(self._states.get(answer.call_id), answer)

    def fail(self, error: ApiError) -> None:
        """Every open question gets `error`."""
        futures: list[asyncio.Future[Any]]
        futures = [*self._flushes.values(), *self._states.values()]
        for future in futures:
            if not future.done():
                future.set_exception(error)


async def _in_time(future: asyncio.Future[T], timeout: float) -> T:
    try:
        return await asyncio.wait_for(future, timeout)
    except asyncio.TimeoutError:
        raise Unavailable(
            f"the scheduler did not answer within {timeout:g} seconds"
        ) from None


def _resolve(future: asyncio.Future[T] | None, answer: T) -> None:
    if future is not None and not future.done():
        future.set_result(answer)
