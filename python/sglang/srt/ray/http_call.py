"""An HTTP request as a value, and an ASGI application's answer as messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope

# Scope keys that an application needs and that can be sent to another process.
SCOPE_KEYS = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path"),
    *("query_string", "root_path", "headers", "client", "server"),
)

# The type of a prefill replica's first message, which has `host` and `port`.
MEETING = "sglang.meeting"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """A complete request: an ASGI scope without objects, and the body."""

    scope: dict[str, Any]
    body: bytes

    @classmethod
    async def read(cls, scope: Scope, receive: Receive) -> HttpCall | None:
        """Read the body; returns None if the client leaves before its end."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if not message.get("more_body", False):
                kept = {key: scope[key] for key in SCOPE_KEYS if key in scope}
                return cls(scope=kept, body=bytes(body))

    def with_body(self, body: bytes) -> HttpCall:
        """Return the request with another body."""
        headers = [
            (name, str(len(body)).encode() if name == b"content-length" else value)
            for name, value in self.scope["headers"]
        ]
        return replace(self, scope={**self.scope, "headers": headers}, body=body)


async def answer_messages(app: ASGIApp, call: HttpCall) -> AsyncIterator[Message]:
    """Yield the messages of the answer from `app`, as fast as they are consumed.

    Closing the iterator cancels the application, like a client that leaves.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=1)
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()
        is_read = True
        return {"type": "http.request", "body": call.body, "more_body": False}

    async def run() -> None:
        try:
            await app(dict(call.scope), receive, messages.put)
        except Exception:
            await messages.put(None)
            raise
        # Not if it is cancelled, because messages are no longer read.
        await messages.put(None)

    running = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
