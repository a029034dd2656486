"""Requests to send: bodies that the schema allows, nearly allows or forbids, and ways
to send them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

from sglang.test.fuzz.values import Pairs, Values, encode

JSON = "application/json"
# A trace slows the engine down, a pause stops it for all clients, and the inspector's
# events continue until the reader leaves.
LEFT_OUT = frozenset({"/start_profile", "/pause_generation", "/canary/events"})
# Weight of a path, if it is not 1.
WEIGHTS = {
    "/generate": 12,
    "/v1/completions": 8,
    "/v1/chat/completions": 10,
    "/v1/responses": 6,
    "/v1/messages": 6,
    "/tokenize": 3,
    "/detokenize": 3,
    "/abort_request": 2,
}

MAX_SHOTS = 8
# Share of all requests with unknown paths and methods, or paths refused by name.
WRONG_SHARE = 0.02
REFUSED_SHARE = 0.03
# Shares of all bodies that are usually not an object, and that have wrong bytes.
HOSTILE_SHARE = 0.05
BROKEN_SHARE = 0.08
# Share of all objects with a size of megabytes.
BULKY_SHARE = 0.003
LONG_BLANK = 1_000_000
# Output limits that keep a run short, by path: the names of the field.
LENGTHS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
    "/generate": ("sampling_params", "max_new_tokens"),
}


class Manner(Enum):
    """How a request is sent, and when its sender leaves."""

    WHOLE = "whole"
    CHUNKED = "chunked"
    PIPELINED = "pipelined"
    ABORTED = "aborted"
    LEAVES_IN_BODY = "leaves in body"
    LEAVES_IN_ANSWER = "leaves in answer"


_MANNERS = (
    *[Manner.WHOLE] * 14,
    *(Manner.CHUNKED, Manner.PIPELINED, Manner.ABORTED),
    *(Manner.LEAVES_IN_BODY, Manner.LEAVES_IN_ANSWER, Manner.LEAVES_IN_ANSWER),
)


_PATH_PARAMETER = re.compile(r"\{\w+\}")
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")
_WRONG_PATHS = ("/x", "//", "/%00", "/generate/", "/v1/models/", "/" + "a" * 5000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """One request. `part`: of the body or the answer until its sender leaves."""

    method: str
    path: str
    body: bytes
    manner: Manner = Manner.WHOLE
    part: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    method: str
    path: str
    content: dict[str, Any] | None


class Cases:
    """Draws the requests of one client after another; deterministic for a seed.

    hypothesis works well for single properties, but not here: for the same schema most
    of its requests were repetitions, at 4 ms each.
    """

    def __init__(self, openapi: dict[str, Any], *, number: int) -> None:
        self._random = Random(number)
        self._values = Values(openapi, self._random)
        self._paths = sorted(set(openapi["paths"]) - LEFT_OUT)
        self._served: list[_Operation] = []
        self._refused: list[_Operation] = []
        for path, methods in openapi["paths"].items():
            for method, shown in methods.items():
                content = shown.get("requestBody", {}).get("content", {}).get(JSON)
                operation = _Operation(
                    method=method.upper(), path=path, content=content
                )
                if path in LEFT_OUT:
                    continue
                if "200" in shown["responses"]:
                    self._served += [operation] * WEIGHTS.get(path, 1)
                else:
                    self._refused.append(operation)

    def next(self) -> list[Shot]:
        """The requests of one client, over one connection."""
        count = self._random.randint(1, MAX_SHOTS)
        return [self._shot() for _ in range(count)]

    def _shot(self) -> Shot:
        random = self._random
        kind = random.random()
        manner, part = random.choice(_MANNERS), random.random()
        if kind < WRONG_SHARE:
            return Shot(
                method=random.choice(_METHODS),
                path=random.choice([*self._paths, *_WRONG_PATHS]),
                body=b"",
                manner=manner,
                part=part,
            )
        is_refused = kind < WRONG_SHARE + REFUSED_SHARE and self._refused
        operation = random.choice(self._refused if is_refused else self._served)
        return Shot(
            method=operation.method,
            path=_PATH_PARAMETER.sub("a%2Fb", operation.path),
            body=self._bytes(operation),
            manner=manner,
            part=part,
        )

    def _bytes(self, operation: _Operation) -> bytes:
        """Return a body, usually an object, occasionally with wrong bytes."""
        if operation.method == "GET":
            return b""
        random = self._random
        kind = random.random()
        if operation.content is None or kind < HOSTILE_SHARE:
            value = self._values.hostile()
        else:
            value = self._body(operation.path, operation.content)
            if random.random() < BULKY_SHARE:
                known = self._values.resolved(operation.content["schema"])["properties"]
                names = [name for name in known if name not in _HARMFUL]
                value[random.choice(names)] = self._values.bulky()
            elif kind < 0.5:
                value = self._with_fault(operation.content["schema"], value)
        text = encode(value).encode("utf-8", "surrogatepass")
        if random.random() < BROKEN_SHARE:
            break_up = random.choice(_BREAKS)
            return break_up(text, int(len(text) * random.random()))
        return text

    def _body(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        """An example with other members, or any body of the type."""
        values, node = self._values, content["schema"]
        examples = list(content.get("examples", {}).values())
        if not examples or self._random.random() < 0.25:
            return _limited(path, values.valid(node))
        example = self._random.choice(examples)["value"]
        return _limited(path, values.widened(node, example))

    def _with_fault(self, node: dict[str, Any], body: dict[str, Any]) -> Any:
        random, value = self._random, self._values.hostile()
        known = self._values.resolved(node)["properties"]
        names = [name for name in (*known, *body) if name not in _HARMFUL]
        name = random.choice([*names, "unknown", ""])
        fault = random.choice(("set", "set", "inside", "inside", "drop", "twice"))
        if fault == "drop":
            return {key: kept for key, kept in body.items() if key != name}
        if fault == "twice":
            return Pairs((*body.items(), (name, value), (name, value)))
        if fault == "inside":
            return _with_inner(body, value, random)
        return {**body, name: value}


def _with_inner(body: Any, value: Any, random: Random) -> Any:
    """`body` with `value` somewhere in it."""
    if isinstance(body, dict) and body:
        key = random.choice(list(body))
        return {**body, key: _with_inner(body[key], value, random)}
    if isinstance(body, list) and body:
        at = random.randrange(len(body))
        return [*body[:at], _with_inner(body[at], value, random), *body[at + 1 :]]
    return value


# Fields that would end other clients' requests.
_HARMFUL = frozenset({"abort_all"})


def _harmless(body: dict[str, Any]) -> dict[str, Any]:
    """`body` without `_HARMFUL` fields."""
    return {key: value for key, value in body.items() if key not in _HARMFUL}


def _limited(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return `body` with a short output and without anything that disturbs all
    clients.
    """
    body = _harmless(body)
    names = LENGTHS.get(path)
    if names is None:
        return body
    if len(names) == 1:
        return {names[0]: 4, **body}
    params = body.get(names[0])
    if isinstance(params, dict) or params is None:
        body[names[0]] = {names[1]: 4, **(params or {})}
    return body


# Byte faults at a position.
_BREAKS: tuple[Callable[[bytes, int], bytes], ...] = (
    lambda body, at: body[:at],
    lambda body, at: body + b"}",
    lambda body, at: b"\xef\xbb\xbf" + body,
    lambda body, at: body[:at] + b"\xff\xfe" + body[at:],
    lambda body, at: body[:at] + b"\0" + body[at:],
    lambda body, at: body[:at] + b"\xed\xa0\x80" + body[at:],
    lambda body, at: body.decode("utf-8", "replace").encode("utf-16"),
    lambda body, at: b" " * LONG_BLANK + body,
)
