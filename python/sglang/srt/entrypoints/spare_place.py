"""Serves connections beyond --max-connections: probes immediately, others in turn."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.entrypoints.http_io import error_response
from sglang.srt.managers.messages.errors import Unavailable

# Polled by whatever decides whether the server is restarted or gets clients.
PROBE_PATHS = frozenset({"/health", "/readyz", "/livez"})


class SparePlace:
    """The application of one such connection until it is granted a place."""

    def __init__(self) -> None:
        self._granted: asyncio.Future[bool]
        self._granted = asyncio.get_running_loop().create_future()
        self.is_awaited = False

    def settle(self, *, is_granted: bool) -> None:
        """Let a waiting request begin, or answer it with 503; further calls do
        nothing.
        """
        if not self._granted.done():
            self._granted.set_result(is_granted)

    def guard(self, app: ASGIApp) -> ASGIApp:
        """Return `app` as this connection sees it."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if self._granted.done() and self._granted.result():
                await app(scope, receive, send)
            elif scope["path"] in PROBE_PATHS:
                await app(scope, receive, _closing(send))
            else:
                await self._wait(app, scope, receive, send)

        return guarded

    async def _wait(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.is_awaited = True
        if await self._granted:
            await app(scope, receive, send)
            return
        error = Unavailable("as many connections are open as --max-connections admits")
        await error_response(error)(scope, receive, _closing(send))


def _closing(send: Send) -> Send:
    """Close the connection after its answer, because the place is for the next one."""

    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (b"connection", b"close")]
            message = {**message, "headers": headers}
        await send(message)

    return closing
