"""The server under trial, the tools a model may call, and the type of a trial."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from pydantic import BaseModel

NUM_AGENT_CALLS = 20
PLACES = {"Paris": "18", "Rome": "24", "Oslo": "7"}
QUESTION = "How warm is it where the user is?"
SYSTEM = "You are a helpful assistant. Use the tools."
IDLE_SECONDS = 30.0
NO_KEY = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The server. `url` has no path; `key` is any text if none is required."""

    url: str
    key: str
    model: str

    @property
    def v1(self) -> str:
        return self.url + "/v1"

    def get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def wait_idle(self) -> None:
        """Wait until nothing is in flight, for example after a client has left."""
        deadline = time.monotonic() + IDLE_SECONDS
        while self.get("/get_server_info")["num_in_flight"]:
            check(time.monotonic() < deadline, "a request goes on without its client")
            time.sleep(0.1)


class Failed(Exception):
    """The answer is not what the client's documentation promises."""


class Skipped(Exception):
    """A trial that does not apply to this server."""


Trialled = Callable[[ModuleType, Site], None]


def check(holds: object, what: str) -> None:
    if not holds:
        raise Failed(what)


# Tools that the model may call, in the forms that clients accept.


def get_place() -> str:
    """Get the city where the user is."""
    return "Paris"


def get_temperature(city: Literal["Paris", "Rome", "Oslo"]) -> str:
    """Get the temperature of a city in degrees Celsius."""
    return PLACES[city]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    sunny: bool


CITY = {"type": "string", "enum": list(PLACES)}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_place": {"type": "object", "properties": {}, "additionalProperties": False},
    "get_temperature": {
        "type": "object",
        "properties": {"city": CITY},
        "required": ["city"],
        "additionalProperties": False,
    },
}
FUNCTIONS: dict[str, Callable[..., str]] = {
    "get_place": get_place,
    "get_temperature": get_temperature,
}
CALLS = tuple(FUNCTIONS)
OPENAI_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": FUNCTIONS[name].__doc__,
            "parameters": schema,
        },
    }
    for name, schema in SCHEMAS.items()
]
ANTHROPIC_TOOLS: list[Any] = [
    {
        "name": name,
        "description": FUNCTIONS[name].__doc__,
        "input_schema": schema,
    }
    for name, schema in SCHEMAS.items()
]
ASKED: list[Any] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": QUESTION},
]
TOO_LONG = [{"role": "user", "content": "word " * 60_000}]
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
# A call may contain white space before it is complete.
CALL: dict[str, Any] = {"temperature": 0, "max_tokens": 400}


def run_tool(name: str, arguments: str | dict[str, Any]) -> str:
    """Return the tool's result as text; raises Failed if the call is invalid."""
    check(name in FUNCTIONS, f"a call of {name!r}")
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    return FUNCTIONS[name](**values)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def joined(pieces: Iterable[str | None]) -> str:
    return "".join(piece or "" for piece in pieces)


def refused(error: type[Exception], ask: Callable[[], Any]) -> Any:
    """Return the error of type `error` that `ask` raises."""
    try:
        ask()
    except error as caught:
        return caught
    raise Failed(f"no {error.__name__}")


@dataclass(frozen=True, slots=True)
class Trial:
    """What a client does. `package` is the distribution, `module` the import name."""

    name: str
    package: str
    module: str
    run: Trialled
