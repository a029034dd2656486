"""The event stream to one inspector page, and turns for expensive questions."""

from __future__ import annotations

import asyncio
import time

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang.srt.entrypoints.http_io import STREAM_HEADERS, wait_disconnect
from sglang.srt.managers.front.snapshot_feed import Viewer
from sglang.srt.managers.messages.errors import Unavailable
from sglang.srt.utils.owned_task import owned_task


class ViewerStream(Response):
    """Events for one viewer until either side leaves."""

    def __init__(self, viewer: Viewer, hello: bytes) -> None:
        self._viewer = viewer
        self._hello = hello
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = owned_task(self._send_all(send))
        leaving = owned_task(wait_disconnect(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._viewer.leave()
            leaving.cancel()
            sending.cancel()
        if sending.done() and not sending.cancelled():
            sending.result()

    async def _send_all(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
        )
        name, data = "hello", self._hello
        while True:
            await send(
                {
                    "type": "http.response.body",
                    "body": b"event: %b\ndata: %b\n\n" % (name.encode(), data),
                    "more_body": name != "end",
                }
            )
            if name == "end":
                return
            name, data = await self._viewer.next()


class Turns:
    """A scope that one caller enters at a time, at most once per `seconds`.

    Raises:
        Unavailable: on entry, if `max_waiting` callers already wait.
    """

    def __init__(self, seconds: float, *, max_waiting: int) -> None:
        self._seconds = seconds
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._lock = asyncio.Lock()
        self._next = 0.0

    async def __aenter__(self) -> None:
        if self._num_waiting >= self._max_waiting:
            raise Unavailable("too many ask for records of slots")
        self._num_waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._num_waiting -= 1
        try:
            await asyncio.sleep(max(self._next - time.monotonic(), 0))
        except BaseException:
            self._lock.release()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._next = time.monotonic() + self._seconds
        self._lock.release()
