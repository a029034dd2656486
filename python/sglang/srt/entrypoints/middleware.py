"""ASGI layers around the routes: unhandled errors and body sizes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.entrypoints.body_budget import BodyBudget, BodyLease
from sglang.srt.entrypoints.http_io import error_response
from sglang.srt.managers.messages.errors import (
    ApiError,
    BadRequest,
    ClientDisconnected,
    Unavailable,
    log_failure,
)

# After a rejection the rest of the body is read and dropped, because a client that is
# still sending would see a connection reset instead of the answer.
MAX_DRAINED_BYTES = 256 * 1024 * 1024
MAX_DRAIN_SECONDS = 10.0


class ErrorMiddleware:
    """Turns every exception into an answer; logs an unexpected one with an id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_started = False

        async def watched_send(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except (ClientDisconnect, ClientDisconnected):
            return
        except Exception as error:
            answer = error if isinstance(error, ApiError) else None
            if answer is None:
                what = f"{scope['method']} {scope['path']} failed"
                answer = log_failure(what, error=error)
            if is_started:
                raise
            await error_response(answer)(scope, receive, send)


class BodyLimitMiddleware:
    """Rejects a body beyond `max_bytes` with 413, announced or chunked, and a body for
    which `budget` has no memory with 503.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, budget: BodyBudget) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"")
        # The parser accepts digits only, but any number of them.
        length = int(announced) if announced.isdigit() else self._max_bytes
        if length > self._max_bytes:
            await _refuse_body(self._too_large(length), receive, send)
            return
        lease = BodyLease(self._budget, length)
        lease.attach(scope)
        seen = 0

        async def counted_receive() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise _BodyRefused(self._too_large(seen))
            try:
                await lease.cover(seen)
            except Unavailable as error:
                raise _BodyRefused(error) from error
            return message

        try:
            await self._app(scope, counted_receive, send)
        except _BodyRefused as refused:
            await _refuse_body(refused.error, receive, send)
        finally:
            lease.release()

    def _too_large(self, size: int) -> BadRequest:
        return BadRequest(
            f"the body has {size} bytes or more; at most {self._max_bytes} are "
            "accepted (--max-body-bytes)",
            status=413,
        )


class _BodyRefused(Exception):
    def __init__(self, error: ApiError) -> None:
        super().__init__(error)
        self.error = error


async def _refuse_body(error: ApiError, receive: Receive, send: Send) -> None:
    response = error_response(error)
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send(
        {"type": "http.response.start", "status": error.status, "headers": headers}
    )
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_drain(receive), MAX_DRAIN_SECONDS)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drain(receive: Receive) -> None:
    left = MAX_DRAINED_BYTES
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
