"""SGLang's routes that change how the server works: cache, pauses, logging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.endpoint import CHANGING_ERRORS, TEXT, Endpoint
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import json_response, read_body
from sglang.srt.entrypoints.neutral_fields import (
    LOGGING,
    refuse_others,
    with_neutral,
)
from sglang.srt.managers.messages.errors import BadRequest

if TYPE_CHECKING:
    _Logging = msgspec.Struct
else:
    _Logging = with_neutral(msgspec.Struct, LOGGING)

_ENGINE_ERRORS = (*CHANGING_ERRORS, 500, 503)
_MAX_LOG_LEVEL = 1


class FlushRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/flush_cache`: the tiers to empty; an empty body means all."""

    tiers: tuple[Literal["device", "host", "storage"], ...] = (
        "device",
        "host",
        "storage",
    )


class PauseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/pause_generation`; an empty body means the default."""

    mode: Literal["abort", "in_place", "retract"] = "abort"


class LoggingRequest(_Logging, kw_only=True, forbid_unknown_fields=True):
    """The body of `/configure_logging`; omitted fields stay unchanged.

    `log_requests_level` 0 omits sampling parameters and 1 shows them; SGLang's higher
    levels show prompts and outputs, which are never logged here.
    """

    log_requests: bool | None = None
    log_requests_level: int | None = None


class Done(msgspec.Struct, kw_only=True):
    message: str
    status: Literal["ok"] = "ok"


class ControlApi:
    """Handlers of these routes."""

    def __init__(self, front: Front) -> None:
        self._manager = front.manager

    def routes(self) -> list[BaseRoute]:
        return [
            Endpoint(
                "/flush_cache",
                self.flush_cache,
                methods=["GET"],
                summary="Empty the prefix cache; 400 while requests run or wait",
                media_type=TEXT,
                errors=_ENGINE_ERRORS,
            ),
            Endpoint(
                "/flush_cache",
                self.flush_cache,
                methods=["POST"],
                summary="Empty tiers of the prefix cache; 400 while requests run",
                body=FlushRequest,
                is_body_optional=True,
                media_type=TEXT,
                errors=_ENGINE_ERRORS,
                examples={"host memory alone": {"tiers": ["host"]}},
            ),
            Endpoint(
                "/pause_generation",
                self.pause,
                methods=["POST"],
                summary="Generate nothing until /continue_generation",
                body=PauseRequest,
                is_body_optional=True,
                answer=Done,
                errors=_ENGINE_ERRORS,
                examples={"keep requests": {"mode": "in_place"}},
            ),
            Endpoint(
                "/continue_generation",
                self.resume,
                methods=["POST"],
                summary="Go on after /pause_generation",
                answer=Done,
                errors=_ENGINE_ERRORS,
            ),
            Endpoint(
                "/configure_logging",
                self.configure_logging,
                methods=["POST"],
                summary="Choose what is logged about requests",
                body=LoggingRequest,
                errors=CHANGING_ERRORS,
                examples={"quiet": {"log_requests": False}},
            ),
        ]

    async def flush_cache(self, request: Request) -> Response:
        body = FlushRequest()
        if await request.body():
            body = await read_body(request, FlushRequest)
        if not await self._manager.flush_cache(body.tiers):
            raise BadRequest(
                "the cache was not flushed: requests are running or waiting"
            )
        return Response("Cache flushed.\n", media_type="text/plain")

    async def pause(self, request: Request) -> Response:
        body = PauseRequest()
        if await request.body():
            body = await read_body(request, PauseRequest)
        await self._manager.pause_generation(body.mode)
        return json_response(Done(message=f"generation is paused ({body.mode})"))

    async def resume(self, request: Request) -> Response:
        # SGLang's clients send an object, whose members have no effect here.
        await request.body()
        await self._manager.continue_generation()
        return json_response(Done(message="generation continues"))

    async def configure_logging(self, request: Request) -> Response:
        body = await read_body(request, LoggingRequest)
        refuse_others(body, LOGGING)
        level = body.log_requests_level
        if level is not None and not 0 <= level <= _MAX_LOG_LEVEL:
            raise BadRequest(
                f"log_requests_level is {level}; it must be 0 or {_MAX_LOG_LEVEL}: "
                "prompts and outputs are not logged",
                param="log_requests_level",
            )
        log = self._manager.request_log
        if body.log_requests is not None:
            log.is_on = body.log_requests
        if level is not None:
            log.has_params = level > 0
        return Response()
