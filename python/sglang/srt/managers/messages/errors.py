"""Errors that are returned to clients, with their HTTP status.

The front raises them where the reason is known; `entrypoints` turns them into answers.
"""

from __future__ import annotations

import logging
import uuid

from sglang.srt.utils.quoting import MAX_QUOTED_CHARS, clipped

logger = logging.getLogger(__name__)

# A client may retry the same request later.
RETRIED_STATUSES = (429, 503)
RETRY_SECONDS = 1
# An abort that the client asked for is answered with a finish reason, not an error.
CLIENT_ABORT_STATUS = 499


class ApiError(Exception):
    """An answer `{"error": {"message", "type", "param", "code"}}`.

    Quoted values are truncated to a few hundred characters.

    Attributes:
        status: HTTP status.
        code: an OpenAI error code that clients act on, or None to use the status as
            code.
        param: the invalid field, if any.
        headers: extra headers of the answer.
    """

    status = 500
    type = "internal_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message = clipped(message)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else clipped(param, MAX_QUOTED_CHARS)
        self.headers = headers or {}
        if status is not None:
            self.status = status
        if code is not None:
            self.code = code
        if self.status in RETRIED_STATUSES:
            self.headers.setdefault("Retry-After", str(RETRY_SECONDS))

    def body(self) -> dict[str, object]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code or self.status,
            }
        }


class BadRequest(ApiError, ValueError):
    """The client must change the request."""

    status = 400
    type = "invalid_request_error"


class ContextOverflow(BadRequest):
    """There are more tokens than the context holds; clients shorten the conversation.

    Attributes:
        tokens: lower bound of the prompt's tokens. limit: how many fit.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str, tokens: int, limit: int) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.limit = limit


class NotFound(ApiError, ValueError):
    status = 404
    type = "not_found_error"


class Unavailable(ApiError):
    """Not ready, shutting down, or too many requests: try again."""

    status = 503
    type = "service_unavailable"


class EngineFailure(ApiError):
    """An internal failure; the same id is in the log."""

    def __init__(self, message: str, *, error_id: str) -> None:
        super().__init__(f"{message} (error id {error_id})")


class ClientDisconnected(Exception):
    """The client left before its answer was complete."""


def log_failure(what: str, *, error: BaseException | None = None) -> EngineFailure:
    """Log a failure under a new id and return the error for the client."""
    error_id = uuid.uuid4().hex[:16]
    logger.error("error id %s: %s", error_id, what, exc_info=error)
    return EngineFailure(what, error_id=error_id)


def abort_error(status: int, message: str) -> ApiError:
    """Return the error for a request that the scheduler ended with an HTTP status."""
    if status == Unavailable.status:
        return Unavailable(message)
    if 400 <= status < 500:
        return BadRequest(message, status=status)
    return log_failure(message)
