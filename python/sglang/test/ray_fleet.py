"""Replicas of Ray Serve as a front sees them, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from sglang.srt.ray.front import Replicas, create_front, key_by
from sglang.srt.ray.http_call import MEETING, HttpCall, answer_messages


class Lost(Exception):
    """A replica is gone."""


class Cancelled(Exception):
    """Someone waits for a message of an answer that was cancelled."""


class Answers:
    """The answer of a replica of `Fleet`; as Serve's, its cancellation is an error for
    those who wait for a message.
    """

    def __init__(self, messages: AsyncIterator[Message]) -> None:
        self._messages = messages
        self._next: asyncio.Future[Message] | None = None
        self.is_cancelled = False

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> Message:
        if self.is_cancelled:
            raise Cancelled
        self._next = asyncio.ensure_future(anext(self._messages))
        try:
            return await self._next
        except asyncio.CancelledError:
            if self.is_cancelled:
                raise Cancelled from None
            raise

    def cancel(self) -> None:
        self.is_cancelled = True
        if self._next is not None:
            self._next.cancel()


class Fleet:
    """Replicas of which the first ones are lost, before or within their answers.

    Attributes:
        asked: the keys and bodies that were sent.
        answers: what came back, in the same order.
    """

    lost: tuple[type[Exception], ...] = (Lost,)

    def __init__(self, app: ASGIApp, *, losses: int = 0, after: int = 0) -> None:
        self._app = app
        self._losses = losses
        self._after = after
        self.asked: list[tuple[str, bytes]] = []
        self.answers: list[Answers] = []

    def ask(self, call: HttpCall, *, key: str) -> Answers:
        self.asked.append((key, call.body))
        self.answers.append(Answers(self._messages(call)))
        return self.answers[-1]

    async def _messages(self, call: HttpCall) -> AsyncIterator[Message]:
        is_lost = len(self.asked) <= self._losses
        seen = 0
        async for message in answer_messages(self._app, call):
            if is_lost and seen == self._after:
                raise Lost
            seen += 1
            yield message


async def echo(request: Request) -> Response:
    body = await request.body()
    headers = {"x-given": request.headers.get("x-given", "")}
    return StreamingResponse(_pieces(request.url.path, body), headers=headers)


async def _pieces(path: str, body: bytes) -> AsyncIterator[bytes]:
    yield path.encode()
    yield body


ECHO = Starlette(routes=[Route("/{path:path}", echo, methods=["POST"])])


async def ask_front(
    fleet: Replicas, body: bytes, path: str = "/v1/chat?a=b", routing: str = "prefix"
) -> httpx.Response:
    front = create_front(
        fleet,
        key_of=key_by(routing, prefix_bytes=64),
        max_body_bytes=1000,
        max_total_body_bytes=10_000,
    )
    headers = {"x-given": "y", "x-session-id": "s"}
    transport = httpx.ASGITransport(app=front)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        return await http.post(path, content=body, headers=headers)


class Prefills(Fleet):
    """Prefill replicas, whose first message says where they are."""

    def ask(self, call: HttpCall, *, key: str) -> Answers:
        answers = super().ask(call, key=key)
        answers._messages = self._with_meeting(answers._messages)
        return answers

    async def _with_meeting(
        self, messages: AsyncIterator[Message]
    ) -> AsyncIterator[Message]:
        if self._after == 0 and len(self.asked) <= self._losses:
            raise Lost
        yield {"type": MEETING, "host": "h", "port": 7}
        async for message in messages:
            if message["type"] == "http.response.start":
                yield message
