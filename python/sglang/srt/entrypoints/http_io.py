"""Input and output of all HTTP routes: request bodies, answers, event streams."""

from __future__ import annotations

import asyncio
import logging
import re
import typing
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang.srt.managers.errors import (
    ApiError,
    BadRequest,
    ClientDisconnected,
    log_failure,
)
from sglang.srt.managers.request_state import RequestGroup, Update
from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_WHERE = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")


async def read_body(request: Request, kind: type[T]) -> T:
    """Parse the JSON body as a `kind`.

    Raises:
        BadRequest: not UTF-8, not JSON, an unknown field or a wrong type; names it.
    """
    body = await request.body()
    try:
        return msgspec.json.decode(body, type=kind)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not valid UTF-8: {error}") from error
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), kind) from error
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error


def _validation_error(message: str, kind: type[Any]) -> BadRequest:
    unknown, where = _UNKNOWN.search(message), _WHERE.search(message)
    if unknown:
        path = where[1] if where else ""
        known = ", ".join(_fields_at(kind, path))
        name = f"{path}.{unknown[1]}" if path else unknown[1]
        return BadRequest(f"unknown field {name!r}; known fields: {known}", param=name)
    if not where or not where[1]:
        return BadRequest(message)
    return BadRequest(f"{where[1]}: {message[: where.start()].lower()}", param=where[1])


def _fields_at(kind: type[Any], path: str) -> list[str]:
    """Fields that `kind`, or the struct in its field `path`, reads."""
    for field in msgspec.structs.fields(kind) if path else ():
        if field.name == path:
            parts = typing.get_args(field.type) or (field.type,)
            structs = [t for t in parts if hasattr(t, "__struct_fields__")]
            return _fields_at(structs[0], "") if structs else []
    fields = msgspec.structs.fields(kind)
    return [field.name for field in fields if field.type is not msgspec.Raw]


def json_response(content: Any, *, status: int = 200) -> Response:
    return Response(
        msgspec.json.encode(content), status_code=status, media_type="application/json"
    )


def error_response(error: ApiError) -> Response:
    response = json_response(error.body(), status=error.status)
    response.headers.update(error.headers)
    return response


def event(content: Any) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def whole_results(
    request: Request, manager: TokenizerManager, group: RequestGroup
) -> list[Update]:
    """Wait for the group's results; a client that disconnects aborts the group.

    Raises:
        ApiError: the answer is this error.
        ClientDisconnected: the client has left.
    """
    watch = asyncio.create_task(_fail_on_disconnect(request.receive, group))
    try:
        return await manager.results(group)
    finally:
        watch.cancel()


class EventStream(Response):
    """Server-sent events about a group of requests.

    The status line waits for the first event: a request that is refused gets a plain
    error with its status. A later error is an event. A client that disconnects aborts
    the group; one that reads slowly gets several updates in one event.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        group: RequestGroup,
        release: Callable[[RequestGroup], None],
    ) -> None:
        self._events = events
        self._group = group
        self._release = release
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(_fail_on_disconnect(receive, self._group))
        try:
            with suppress(ClientDisconnected):
                await self._send_all(scope, receive, send)
        finally:
            watch.cancel()
            self._release(self._group)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            chunk = await anext(self._events)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await send(
            {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
        )
        await _send_chunk(send, chunk)
        try:
            async for chunk in self._events:
                await _send_chunk(send, chunk)
        except ApiError as error:
            await _send_chunk(send, event(error.body()))
        except ClientDisconnected:
            raise
        except Exception as error:
            failure = log_failure("the stream broke off", error=error)
            await _send_chunk(send, event(failure.body()))
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def _send_chunk(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def _fail_on_disconnect(receive: Receive, group: RequestGroup) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    logger.info(
        "client disconnected; aborting %s", ", ".join(s.rid for s in group.states[:4])
    )
    group.fail(ClientDisconnected())
