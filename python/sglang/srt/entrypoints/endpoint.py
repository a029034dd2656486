"""A route that describes itself; the OpenAPI schema is made from these descriptions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

JSON = "application/json"
TEXT = "text/plain"
HTML = "text/html"
EVENTS = "text/event-stream"

# Of an endpoint that reads a body and asks the engine.
ENGINE_ERRORS = (400, 404, 413, 500, 503)
# Of one that changes something for others, too.
CHANGING_ERRORS = (400, 403, 413, 415)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One path and its methods, as clients see them.

    Fields:
        summary: one line.
        body: type of the JSON body; None: there is none.
        is_body_optional: whether an empty body means all defaults.
        answer: type of a JSON answer with status 200; None: an empty one. Never set
            where `is_refused`.
        media_type: of the answer, where it is not JSON.
        event: type of one event where the answer may be a stream.
        is_named: whether events bear their `type` as name, and the last one ends the
            stream.
        query: query parameter -> its description.
        errors: statuses whose answers are an error's.
        error: type of those answers; None: the one that all APIs share.
        examples: name -> body that works on any model.
        is_refused: the path exists in order to say that it is not served.
    """

    summary: str
    body: Any = None
    is_body_optional: bool = False
    answer: Any = None
    media_type: str = JSON
    event: Any = None
    is_named: bool = False
    query: Mapping[str, str] = field(default_factory=dict)
    errors: Sequence[int] = ()
    error: Any = None
    examples: Mapping[str, Any] = field(default_factory=dict)
    is_refused: bool = False


class Endpoint(Route):
    """A Starlette route with its `operation`.

    Args:
        path, handler, methods: as of `Route`.
        describes: fields of its `Operation`.
    """

    def __init__(
        self,
        path: str,
        handler: Callable[[Request], Awaitable[Response]],
        *,
        methods: Sequence[str],
        **describes: Any,
    ) -> None:
        super().__init__(path, handler, methods=list(methods))
        self.operation = Operation(**describes)
