"""Input and output of all HTTP routes: request bodies, answers, event streams."""

from __future__ import annotations

import contextvars
import gc
import logging
import re
import typing
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang.srt.entrypoints.body_budget import release_body
from sglang.srt.entrypoints.neutral_fields import is_raw
from sglang.srt.entrypoints.output_share import OutputShare
from sglang.srt.entrypoints.unknown_fields import (
    UNKNOWN_FIELDS,
    UnknownFields,
    lenient,
    unknown_names,
)
from sglang.srt.managers.front.request_state import RequestGroup, Update
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.messages.errors import (
    ApiError,
    BadRequest,
    ClientDisconnected,
    log_failure,
)
from sglang.srt.utils.owned_task import owned_task
from sglang.srt.utils.quoting import clipped, quoted

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)
Result = TypeVar("Result")

# Larger answers are sent in pieces of this size.
PIECE_BYTES = 1 << 18
# In a body with more values, finding all unknown fields takes too long.
MAX_SCANNED_VALUES = 10_000
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
        BadRequest: the body is not UTF-8 or not JSON, or has a field of a wrong type or
            an unknown field (if rejected); names the problem.
    """
    # Not `request.body()`, which would keep the bytes until the answer is complete.
    # Uses one block, because many chunks freed together would leave permanent holes in
    # the heap.
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
    request.state.body_size = len(body)
    _check_values(body, limit=request.app.state.max_body_values)
    unknown: UnknownFields = request.app.state.unknown_fields
    UNKNOWN_FIELDS.set(unknown)
    try:
        with _no_collection():
            return _decoded(body, kind, unknown)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not valid UTF-8: {error}") from error
    except msgspec.ValidationError as error:
        raise _validation_error(clipped(str(error)), kind) from error
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    finally:
        release_body(request.scope)


def _decoded(body: bytearray, kind: type[T], unknown: UnknownFields) -> T:
    """Decode a body as leniently as SGLang: numbers may be strings, integers may be
    floats.
    """
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except msgspec.ValidationError as error:
        first = None if unknown.is_strict else _unknown_path(clipped(str(error)))
        if first is None:
            raise
    value = msgspec.json.decode(body, type=lenient(kind), strict=False)
    is_small = body.count(b",") <= MAX_SCANNED_VALUES
    for path in unknown_names(body, kind) if is_small else (first,):
        unknown.ignore(path)
    return cast("T", value)


def _check_values(body: bytearray, *, limit: int) -> None:
    """Reject a body that would become too many objects: each but the first follows a
    comma or an opening bracket. Characters inside strings also count, because telling
    them apart would cost as much as parsing.

    Raises:
        BadRequest: names the limit.
    """
    values = sum(map(body.count, (b",", b"[", b"{")))
    if values > limit:
        raise BadRequest(
            f"the body may hold {values} values (commas and opening brackets), but at "
            f"most {limit} are accepted (--max-body-values); split the request",
            status=413,
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from repeatedly walking half-built objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def aside(
    request: Request,
    manager: TokenizerManager,
    work: Callable[..., Result],
    *args: Any,
    **options: Any,
) -> Result:
    """Return `work(...)` over the parsed body, run in a thread if the body is large."""
    size = request.state.body_size
    # A thread has its own context variables.
    run = partial(contextvars.copy_context().run, work, *args, **options)
    return await manager.side_work.run(size, run)


def _unknown_path(message: str) -> str | None:
    """Return the path of the unknown field that an error reports, if any."""
    unknown, where = _UNKNOWN.search(message), _WHERE.search(message)
    if unknown is None:
        return None
    return f"{where[1]}.{unknown[1]}" if where and where[1] else unknown[1]


def _validation_error(message: str, kind: type[Any]) -> BadRequest:
    name, where = _unknown_path(message), _WHERE.search(message)
    if name is not None:
        known = ", ".join(_fields_at(kind, where[1] if where else ""))
        return BadRequest(
            f"unknown field {quoted(name)}; known fields: {known}", param=name
        )
    if not where or not where[1]:
        return BadRequest(message)
    return BadRequest(f"{where[1]}: {message[: where.start()].lower()}", param=where[1])


def _fields_at(kind: type[Any], path: str) -> list[str]:
    """Return the fields that `kind`, or the struct at `path` in it, reads."""
    for field in msgspec.structs.fields(kind) if path else ():
        if field.name == path:
            parts = typing.get_args(field.type) or (field.type,)
            structs = [t for t in parts if hasattr(t, "__struct_fields__")]
            return _fields_at(structs[0], "") if structs else []
    fields = msgspec.structs.fields(kind)
    return [field.name for field in fields if not is_raw(field.type)]


class JsonResponse(Response):
    """An encoded answer; a large one is sent in pieces, as fast as it is read."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= PIECE_BYTES:
            await super().__call__(scope, receive, send)
            return
        body = memoryview(self.body)
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        for at in range(0, len(body), PIECE_BYTES):
            await _send_chunk(send, bytes(body[at : at + PIECE_BYTES]))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_response(content: Any, *, status: int = 200) -> Response:
    return JsonResponse(msgspec.json.encode(content), status_code=status)


def error_response(error: ApiError) -> Response:
    response = json_response(error.body(), status=error.status)
    response.headers.update(error.headers)
    return response


def event(content: Any) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def named_event(content: Mapping[str, Any]) -> bytes:
    """Encode one server-sent event, named by its own `type`."""
    name: str = content["type"]
    return b"event: " + name.encode() + b"\n" + event(content)


def error_event(error: ApiError) -> bytes:
    """Encode an error that occurred after the first event."""
    return event(error.body())


async def whole_results(
    request: Request, manager: TokenizerManager, group: RequestGroup
) -> list[Update]:
    """Wait for the group's results; a client that disconnects aborts the group.

    Raises:
        ApiError: the error to answer with.
        ClientDisconnected: the client left.
    """
    watch = owned_task(_fail_on_disconnect(request.receive, group))
    try:
        return await manager.results(group)
    finally:
        watch.cancel()


def answer_size(updates: Iterable[Update]) -> int:
    """Number of tokens and log probabilities in whole answers: the work to show
    them.
    """
    return sum(update.size for update in updates)


class EventStream(Response):
    """Server-sent events about a group of requests.

    The status line waits for the first event, so a rejected request gets a plain error
    with its status. A later error becomes an event. If the client disconnects, the
    group is aborted; a slow reader gets several updates in one event.

    Args:
        show_error: encodes a later error as an event.
        end: what follows the last event.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        group: RequestGroup,
        release: Callable[[RequestGroup], None],
        share: OutputShare,
        show_error: Callable[[ApiError], bytes] = error_event,
        end: bytes = DONE,
    ) -> None:
        self._events = events
        self.share = share
        self._show_error = show_error
        self._end = end
        self._group = group
        self._release = release
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = owned_task(_fail_on_disconnect(receive, self._group))
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
            await self.share.pay(len(chunk))
            async for chunk in self._events:
                await _send_chunk(send, chunk)
                # Updates that arrive meanwhile are merged into one event.
                await self.share.pay(len(chunk))
        except ApiError as error:
            await _send_chunk(send, self._show_error(error))
        except ClientDisconnected:
            raise
        except Exception as error:
            failure = log_failure("the stream broke off", error=error)
            await _send_chunk(send, self._show_error(failure))
        await send(
            {"type": "http.response.body", "body": self._end, "more_body": False}
        )


async def _send_chunk(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def wait_disconnect(receive: Receive) -> None:
    """Wait until the client has left, dropping what it still sends."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _fail_on_disconnect(receive: Receive, group: RequestGroup) -> None:
    await wait_disconnect(receive)
    logger.info(
        "client disconnected; aborting %s", ", ".join(s.rid for s in group.states[:4])
    )
    group.fail(ClientDisconnected())
