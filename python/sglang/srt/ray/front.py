"""The ingress that reads a request before it chooses a replica.

Ray's consistent-hash router maps the request's key to a replica; no state is kept here.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.entrypoints.body_budget import BodyBudget
from sglang.srt.entrypoints.middleware import BodyLimitMiddleware, ErrorMiddleware
from sglang.srt.managers.messages.errors import Unavailable
from sglang.srt.ray.http_call import HttpCall

# Retries of an unanswered request whose replica was lost. A replica whose engine has
# died is chosen until it has left, so attempts wait: 3 s in total.
ATTEMPTS = 6
FIRST_WAIT_SECONDS = 0.1
# As Serve's routers know it.
SESSION_HEADER = b"x-session-id"


class Answers(Protocol):
    """A stream of messages from a replica."""

    def __aiter__(self) -> AsyncIterator[Message]: ...

    def cancel(self) -> None: ...


class Replicas(Protocol):
    """The replicas as seen by the front.

    Attributes:
        lost: errors that mean that a replica was lost before it answered.
    """

    lost: tuple[type[Exception], ...]

    def ask(self, call: HttpCall, *, key: str) -> Answers:
        """Send `call` to the replica of `key`, or to any replica for an empty key."""


class _Prompt(msgspec.Struct):
    """The prompt fields in the bodies of all paths, as JSON text, system prompt
    first.
    """

    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    text: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    input_ids: msgspec.Raw = msgspec.Raw(b"")


def prefix_key(body: bytes, *, prefix_bytes: int) -> str:
    """Return a key shared by requests whose prompts begin alike, or an empty key if the
    body has no prompt.
    """
    try:
        found = msgspec.json.decode(body, type=_Prompt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    text = b"".join(bytes(getattr(found, name)) for name in found.__struct_fields__)
    if not text:
        return ""
    return hashlib.blake2b(text[:prefix_bytes], digest_size=16).hexdigest()


def key_by(routing: str, *, prefix_bytes: int) -> Callable[[HttpCall], str]:
    """Return what makes the key of a request with `routing`."""
    return {
        "load": lambda call: "",
        "session": _session,
        "prefix": lambda call: prefix_key(call.body, prefix_bytes=prefix_bytes),
    }[routing]


def _session(call: HttpCall) -> str:
    value: bytes = dict(call.scope["headers"]).get(SESSION_HEADER, b"")
    return value.decode("latin-1")


def create_front(
    replicas: Replicas,
    *,
    key_of: Callable[[HttpCall], str],
    max_body_bytes: int,
    max_total_body_bytes: int,
) -> ASGIApp:
    """Return the ASGI application that passes every request to a replica.

    Args:
        key_of: requests with one key go to one replica; an empty key is none.
        max_body_bytes, max_total_body_bytes: as in the server's flags.
    """

    async def forward(scope: Scope, receive: Receive, send: Send) -> None:
        call = await HttpCall.read(scope, receive)
        if call is not None:
            await _answer(replicas, call, key_of(call), receive, send)

    return Starlette(
        routes=[Mount("/", app=forward)],
        middleware=[
            Middleware(ErrorMiddleware),
            Middleware(
                BodyLimitMiddleware,
                max_bytes=max_body_bytes,
                budget=BodyBudget(max_total_body_bytes),
            ),
        ],
    )


async def _answer(
    replicas: Replicas, call: HttpCall, key: str, receive: Receive, send: Send
) -> None:
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
        answers = replicas.ask(call, key=key)
        watch = asyncio.create_task(_cancel_on_disconnect(receive, answers))
        has_begun = False
        try:
            async for message in answers:
                has_begun = True
                if _is_last(message):
                    # A client may leave as soon as it has the last message.
                    watch.cancel()
                await send(message)
            return
        except BaseException as error:
            has_left = watch.done() and not watch.cancelled()
            if has_left:
                return
            answers.cancel()
            if has_begun or not isinstance(error, replicas.lost):
                raise
        finally:
            watch.cancel()
    raise Unavailable("the replicas were lost one after the other")


def _is_last(message: Message) -> bool:
    is_body = message["type"] == "http.response.body"
    return is_body and not message.get("more_body", False)


async def _cancel_on_disconnect(receive: Receive, answers: Answers) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answers.cancel()


def body_limits(values: dict[str, Any], defaults: type[Any]) -> dict[str, int]:
    """Return the limits for `create_front` from the engine's arguments or their
    defaults.
    """
    names = ("max_body_bytes", "max_total_body_bytes")
    return {name: values.get(name) or getattr(defaults, name) for name in names}
