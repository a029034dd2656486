"""A route that describes itself, for the OpenAPI schema."""

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

# Errors of an endpoint that reads a body and asks the engine.
ENGINE_ERRORS = (400, 404, 413, 500, 503)
# Errors of an endpoint that also changes something for other clients.
CHANGING_ERRORS = (400, 403, 413, 415)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One path and its methods, as clients see them.

    Fields:
        summary: one-line summary.
        body: type of the JSON body, or None if there is no body.
        is_body_optional: whether an empty body means all defaults.
        answer: type of a JSON answer with status 200, or None for an empty one. Never
            set if `is_refused`.
        media_type: media type of the answer, if it is not JSON.
        event: type of one event, if the answer may be a stream.
        is_named: whether events are named by their `type`, and the last one ends the
            stream.
        query: query parameter -> its description.
        errors: error statuses.
        error: type of error answers, or None for the common one.
        examples: name -> body that works with any model.
        is_refused: whether the path exists only to say that it is not served.
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
        describes: fields of the `Operation`.
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
