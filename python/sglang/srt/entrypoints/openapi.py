"""The OpenAPI 3.1 schema of the server, made from its endpoints and their types."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.access import OPEN_PATHS
from sglang.srt.entrypoints.answers import Error
from sglang.srt.entrypoints.endpoint import EVENTS, JSON, Endpoint, Operation
from sglang.srt.entrypoints.wire_types import wire_type
from sglang.version import __version__

OPENAPI_VERSION = "3.1.0"
SCHEMAS = "#/components/schemas/"
STATUSES: dict[int, str] = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "Only with the administrator's key, or not from a page of another site.",
    404: "There is no such path or model, or the feature is off.",
    413: "The body is too large, or holds too many values.",
    415: "The body is not announced as JSON.",
    500: "The engine failed; the message has an id that is also in the log.",
    503: "Not ready, shutting down, or too many requests: try again.",
}
_UNNAMED = "Events `data: {...}`, then `data: [DONE]`."
_NAMED = "Events `event: <type>` with `data: {...}`; the last one ends the stream."
_PATH_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


def openapi_schema(
    routes: Iterable[BaseRoute], *, needs_key: bool = False
) -> dict[str, Any]:
    """Describe all of `routes`, each of which is an `Endpoint`.

    Args:
        needs_key: whether clients must send the API key.

    Raises:
        TypeError: a route does not describe itself.
    """
    endpoints: list[Endpoint] = []
    for route in routes:
        if not isinstance(route, Endpoint):
            raise TypeError(f"{route} does not describe itself; make it an Endpoint")
        endpoints.append(route)
    types = _Types(endpoints)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = _PATH_PARAMETER.sub(r"{\1}", endpoint.path)
        for method in sorted((endpoint.methods or set()) - {"HEAD"}):
            shown = _operation(endpoint, method, types, needs_key=needs_key)
            paths.setdefault(path, {})[method.lower()] = shown
    schema: dict[str, Any] = {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "sglang-canary", "version": __version__},
        "paths": paths,
        "components": {"schemas": types.components, "responses": _error_responses()},
    }
    if needs_key:
        bearer = {"type": "http", "scheme": "bearer"}
        schema["components"]["securitySchemes"] = {"bearer": bearer}
    return schema


class _Types:
    """JSON schemas of all types that `endpoints` refer to.

    Attributes:
        components: schemas of structs, by name.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        named: list[Any] = [Error]
        for endpoint in endpoints:
            operation = endpoint.operation
            named += [operation.body, operation.answer]
            named += [operation.event, operation.error]
        # A type may be unhashable, as some `list[A] | B` are.
        self._kinds = [kind for i, kind in enumerate(named) if kind not in named[:i]]
        self._kinds = [kind for kind in self._kinds if kind is not None]
        schemas, self.components = msgspec.json.schema_components(
            [wire_type(kind) for kind in self._kinds], ref_template=SCHEMAS + "{name}"
        )
        self._schemas = list(schemas)
        for component in self.components.values():
            if "description" in component:
                component["description"] = inspect.cleandoc(component["description"])

    def schema(self, kind: Any) -> dict[str, Any]:
        return self._schemas[self._kinds.index(kind)]


def _operation(
    endpoint: Endpoint, method: str, types: _Types, *, needs_key: bool
) -> dict[str, Any]:
    operation, errors = endpoint.operation, list(endpoint.operation.errors)
    words = re.findall(r"\w+", endpoint.path) or ["index"]
    shown: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *words]),
        "summary": operation.summary,
    }
    if operation.is_refused:
        shown["deprecated"] = True
    parameters = _parameters(endpoint)
    if parameters:
        shown["parameters"] = parameters
    if operation.body is not None:
        shown["requestBody"] = _request_body(operation, types)
    answers: dict[str, Any] = {}
    if not operation.is_refused:
        answers["200"] = _answer(operation, types)
    if needs_key and endpoint.path not in OPEN_PATHS:
        shown["security"] = [{"bearer": []}]
        errors.append(401)
    for status in errors:
        answers[str(status)] = (
            {"$ref": f"#/components/responses/{status}"}
            if operation.error is None
            else _error(status, types.schema(operation.error))
        )
    shown["responses"] = answers
    return shown


def _error(status: int, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response of a status in the shape of `schema`."""
    shown: dict[str, Any] = {
        "description": STATUSES[status],
        "content": {JSON: {"schema": schema}},
    }
    if status == 503:
        seconds = {"description": "Seconds.", "schema": {"type": "integer"}}
        shown["headers"] = {"Retry-After": seconds}
    return shown


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    text = {"type": "string"}
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in _PATH_PARAMETER.findall(endpoint.path)
    ]
    return in_path + [
        {"name": name, "in": "query", "description": about, "schema": text}
        for name, about in endpoint.operation.query.items()
    ]


def _request_body(operation: Operation, types: _Types) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": types.schema(operation.body)}
    if operation.examples:
        content["examples"] = {
            name: {"value": body} for name, body in operation.examples.items()
        }
    return {
        "required": not operation.is_body_optional,
        "content": {JSON: content},
    }


def _answer(operation: Operation, types: _Types) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content[JSON] = {"schema": types.schema(operation.answer)}
    elif operation.media_type != JSON:
        content[operation.media_type] = {"schema": {"type": "string"}}
    if operation.event is not None:
        # OpenAPI 3.1 can describe only the text of a stream; its events are JSON.
        content[EVENTS] = {
            "schema": {
                "type": "string",
                "contentMediaType": JSON,
                "contentSchema": types.schema(operation.event),
                "description": _NAMED if operation.is_named else _UNNAMED,
            }
        }
    return {"description": "Success.", **({"content": content} if content else {})}


def _error_responses() -> Mapping[str, Any]:
    """Return error responses in the shape that all APIs share."""
    schema = {"$ref": SCHEMAS + Error.__name__}
    return {str(status): _error(status, schema) for status in STATUSES}
