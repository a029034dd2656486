"""Sends the requests of a case in their manners, and judges each answer."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.test.fuzz.cases import Manner, Shot
from sglang.test.fuzz.wire import Answer, Closed, Connection, request_bytes

# Abandon long answers, like clients with a deadline.
DEADLINE_SECONDS = 15.0
PIPELINE = (("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/model_info"))
PIPELINED_BODY = b'{"prompt": "x"}'
ERROR_FIELDS = {"message", "type", "param", "code"}
ERROR_CODES = ("context_length_exceeded", "invalid_api_key", "model_not_found")
MESSAGES_ERROR_FIELDS = {"message", "type"}
MESSAGES_ERROR_CODES = ("thread_unsupported_request",)
# Paths of streams with named events.
LAST_EVENTS = frozenset(
    {
        "error",
        "message_stop",
        "response.completed",
        "response.failed",
        "response.incomplete",
    }
)
MAX_KEPT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A wrong answer, and the request that got it."""

    reason: str
    shot: Shot
    status: int = 0
    answer: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return a dict with the body as text, one character per byte."""
        return {
            "reason": self.reason,
            "method": self.shot.method,
            "path": self.shot.path,
            "manner": self.shot.manner.value,
            "part": self.shot.part,
            "body": self.shot.body.decode("latin-1"),
            "status": self.status,
            "answer": self.answer,
        }


def parse_shot(failure: dict[str, Any]) -> Shot:
    """Return the request in a `Failure.as_dict`."""
    return Shot(
        method=failure["method"],
        path=failure["path"],
        body=failure["body"].encode("latin-1"),
        manner=Manner(failure["manner"]),
        part=failure["part"],
    )


class Shooter:
    """One client. `statuses` and `failures` are shared by all of them.

    Attributes:
        shot: the request that is being sent or answered, if one is.
    """

    def __init__(
        self, url: str, *, statuses: Counter[str], failures: list[Failure]
    ) -> None:
        self._url = url
        self._connection = Connection(url)
        self._statuses = statuses
        self._failures = failures
        self.shot: Shot | None = None

    async def run(self, case: Sequence[Shot]) -> None:
        for shot in case:
            self.shot = shot
            try:
                await asyncio.wait_for(self._fire(shot), DEADLINE_SECONDS)
            except asyncio.TimeoutError:
                self._statuses["left at the deadline"] += 1
                self._connection.close()
            except Closed:
                # A server may close after a wrong request, never without an answer.
                self._fail("closed without an answer", shot)
                self._connection.close()
            except OSError as error:
                self._fail(f"no connection: {error}", shot)
                self._connection.close()
        self.shot = None

    def close(self) -> None:
        self._connection.close()

    async def _fire(self, shot: Shot) -> None:
        match shot.manner:
            case Manner.LEAVES_IN_BODY:
                await self._leave_in_body(shot)
            case Manner.LEAVES_IN_ANSWER:
                await self._leave_in_answer(shot)
            case Manner.PIPELINED:
                await self._pipeline(shot)
            case Manner.ABORTED:
                await self._abort(shot)
            case Manner.CHUNKED:
                head, body = request_bytes(
                    shot.method, shot.path, shot.body, is_chunked=True
                )
                # On a separate connection, without a second try.
                self._connection.close()
                await self._connection.send(head + body)
                self._judge(shot, await self._connection.receive())
            case Manner.WHOLE:
                self._judge(
                    shot,
                    await self._connection.ask(shot.method, shot.path, shot.body),
                )

    async def _leave_in_body(self, shot: Shot) -> None:
        head, body = request_bytes(shot.method, shot.path, shot.body)
        connection = Connection(self._url)
        await connection.send(head + body[: int(len(body) * shot.part)])
        connection.close()
        self._statuses[Manner.LEAVES_IN_BODY.value] += 1

    async def _leave_in_answer(self, shot: Shot) -> None:
        connection = Connection(self._url)
        await connection.send(b"".join(_streamed(shot)))
        if shot.part > 0.3:
            status, headers = await connection.receive_head()
            head = Answer(status=status, headers=headers, body=b"")
            self._note(shot, head, status_verdict(head))
            async for _ in connection.pieces(headers):
                if shot.part < 0.7:
                    break
        else:
            self._statuses[Manner.LEAVES_IN_ANSWER.value] += 1
        connection.close()

    async def _pipeline(self, shot: Shot) -> None:
        """Several requests at once; their answers come in order."""
        others = [
            b"".join(request_bytes(m, path, PIPELINED_BODY if m == "POST" else b""))
            for m, path in PIPELINE
        ]
        first = b"".join(request_bytes(shot.method, shot.path, shot.body))
        connection = Connection(self._url)
        await connection.send(first + b"".join(others))
        self._judge(shot, await connection.receive())
        for method, path in PIPELINE:
            answer = await connection.receive()
            other = Shot(method=method, path=path, body=b"", manner=Manner.PIPELINED)
            self._judge(other, answer)
            if answer.status != 200:
                self._fail("a good request after it in the pipe", shot, answer)
        connection.close()

    async def _abort(self, shot: Shot) -> None:
        """End the request by its name while it runs, from another connection."""
        rid = f"fuzz-{next(_NUMBERS)}"
        asking = Connection(self._url)
        try:
            await asking.send(b"".join(_streamed(shot, rid=rid)))
            await asyncio.sleep(shot.part * 0.05)
            body = json.dumps({"rid": rid}).encode()
            answer = await self._connection.ask("POST", "/abort_request", body)
            self._judge(shot, answer)
            self._judge(shot, await asking.receive())
        finally:
            asking.close()

    def _judge(self, shot: Shot, answer: Answer) -> None:
        self._note(shot, answer, verdict(answer))

    def _note(self, shot: Shot, answer: Answer, reason: str | None) -> None:
        self._statuses[str(answer.status)] += 1
        if reason is not None:
            self._fail(reason, shot, answer)

    def _fail(self, reason: str, shot: Shot, answer: Answer | None = None) -> None:
        status, text = 0, ""
        if answer is not None:
            status = answer.status
            text = answer.body[:MAX_KEPT].decode("utf-8", "replace")
        self._failures.append(
            Failure(reason=reason, shot=shot, status=status, answer=text)
        )


_NUMBERS = itertools.count()


def _streamed(shot: Shot, *, rid: str | None = None) -> tuple[bytes, bytes]:
    """The request with `stream` set and a name, where its body is an object."""
    body = shot.body
    if body[:1] == b"{" and len(body) > 2:
        extra = b'"stream":true,'
        if rid is not None:
            extra += b'"rid":"%s",' % rid.encode()
        body = b"{" + extra + body[1:]
    return request_bytes(shot.method, shot.path, body)


def verdict(answer: Answer) -> str | None:
    """Return why the answer is wrong, or None if it is not."""
    reason = status_verdict(answer)
    if reason is not None:
        return reason
    if answer.status >= 400:
        return _error_verdict(answer)
    return _stream_verdict(answer) if answer.is_stream else None


def status_verdict(answer: Answer) -> str | None:
    """Return why the status is wrong, or None if it is not."""
    if answer.status >= 500 and answer.status != 503:
        return "5xx"
    if answer.status == 503 and "retry-after" not in answer.headers:
        return "503 without Retry-After"
    return None


def _error_verdict(answer: Answer) -> str | None:
    if answer.headers.get("content-type", "").startswith("text/plain"):
        # The HTTP parser's own answer to a request that is not HTTP.
        return None
    try:
        content = answer.json()
        error = content["error"]
        if content.get("type") == "error":
            code = error.pop("details", {"error_code": ""})
            has_code = code.keys() == {"error_code"} and (
                code["error_code"] in ("", *ERROR_CODES, *MESSAGES_ERROR_CODES)
            )
            has_shape = set(error) == MESSAGES_ERROR_FIELDS and has_code
        else:
            has_code = error["code"] in (answer.status, *ERROR_CODES)
            has_shape = set(error) == ERROR_FIELDS and has_code
    except (KeyError, TypeError, ValueError):
        has_shape = False
    return None if has_shape or not answer.body else "an error of another shape"


def _stream_verdict(answer: Answer) -> str | None:
    events = [line for line in answer.body.split(b"\n\n") if line]
    is_named = bool(events) and events[0].startswith(b"event: ")
    if not is_named and (not events or events.pop() != b"data: [DONE]"):
        return "a stream without an end"
    kind = ""
    for event in events:
        # A client's own text may be in it, and may say "data: ".
        name, _, data = event.partition(b"data: ")
        try:
            content = json.loads(data)
        except ValueError:
            return "an event that is no JSON"
        kind = content.get("type", "")
        if is_named and name != b"event: %s\n" % kind.encode():
            return "an event of another name"
        if _is_failure(content):
            return "5xx in a stream"
    return "a stream without an end" if is_named and kind not in LAST_EVENTS else None


def _is_failure(event: dict[str, Any]) -> bool:
    """Whether an event of any API says that the engine failed."""
    holder = event.get("response", event)
    error = holder.get("error") or {}
    if "code" not in error:
        return error.get("type") == "api_error"
    code = error["code"]
    return code == "server_error" or (
        isinstance(code, int) and code >= 500 and code != 503
    )
