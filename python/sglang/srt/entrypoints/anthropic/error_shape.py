"""Errors in the shape of Anthropic's API, for the paths below `/v1/messages`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATH = "/v1/messages"
# HTTP status -> type of the error.
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_content(status: int, message: str, code: object) -> dict[str, Any]:
    """Return the body of an error. A code is shown only if it is a name."""
    kind = "invalid_request_error" if 400 <= status < 500 else "api_error"
    error: dict[str, Any] = {"type": TYPES.get(status, kind), "message": message}
    if isinstance(code, str):
        error["details"] = {"error_code": code}
    return {"type": "error", "error": error}


class ErrorShapeMiddleware:
    """Rewrites errors of all inner layers, which have the shape of `ApiError.body`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and (
            scope["path"] == PATH or scope["path"].startswith(PATH + "/")
        )
        await self._app(scope, receive, _Rewriter(send) if is_ours else send)


class _Rewriter:
    """Passes messages on and rewrites the body of an error, which is a single piece."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
            return
        start, self._start = self._start, None
        if start is not None:
            body = _rewritten(start["status"], message["body"])
            MutableHeaders(raw=start["headers"])["content-length"] = str(len(body))
            message = {**message, "body": body}
            await self._send(start)
        await self._send(message)


def _rewritten(status: int, body: bytes) -> bytes:
    error = msgspec.json.decode(body)["error"]
    return msgspec.json.encode(error_content(status, error["message"], error["code"]))
