"""`POST /start_profile` and `POST /stop_profile`: torch's profiler in the scheduler."""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.endpoint import CHANGING_ERRORS, Endpoint
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import json_response, read_body
from sglang.srt.entrypoints.neutral_fields import (
    PROFILE,
    refuse_others,
    with_neutral,
)
from sglang.srt.managers.messages.errors import BadRequest

if TYPE_CHECKING:
    _Profile = msgspec.Struct
else:
    _Profile = with_neutral(msgspec.Struct, PROFILE)


class ProfileRequest(_Profile, kw_only=True, forbid_unknown_fields=True):
    """The body of `/start_profile`; an empty body means the defaults.

    The profile ends after `num_steps` forwards, at the latest after --profile-max-steps
    or 30 seconds, or when stopped with `/stop_profile`.
    """

    output_dir: str | None = None
    num_steps: int | None = None
    activities: list[Literal["CPU", "GPU"]] | None = None
    with_stack: bool | None = False
    record_shapes: bool | None = False


class ProfileAnswer(msgspec.Struct, kw_only=True):
    """`path` is rank 0's trace; other ranks write theirs next to it."""

    status: Literal["started", "stopped"]
    path: str


class ProfileApi:
    """Handlers of both endpoints."""

    def __init__(self, front: Front) -> None:
        self._manager = front.manager
        args = front.server_args
        self._max_steps = args.profile_max_steps
        self._root = Path(args.profile_output_dir or tempfile.gettempdir())

    def routes(self) -> list[BaseRoute]:
        return [
            Endpoint(
                "/start_profile",
                self.start,
                methods=["POST"],
                summary="Begin a profile of the scheduler by torch's profiler",
                body=ProfileRequest,
                is_body_optional=True,
                answer=ProfileAnswer,
                errors=(*CHANGING_ERRORS, 500, 503),
                examples={"five steps": {"num_steps": 5, "activities": ["CPU"]}},
            ),
            Endpoint(
                "/stop_profile",
                self.stop,
                methods=["POST"],
                summary="End the profile that runs and write its trace",
                answer=ProfileAnswer,
                errors=(*CHANGING_ERRORS, 500, 503),
            ),
        ]

    async def start(self, request: Request) -> Response:
        body = ProfileRequest()
        if await request.body():
            body = await read_body(request, ProfileRequest)
        refuse_others(body, PROFILE)
        steps = self._max_steps if body.num_steps is None else body.num_steps
        if not 1 <= steps <= self._max_steps:
            raise BadRequest(
                f"num_steps is {steps}; it must be between 1 and {self._max_steps} "
                "(--profile-max-steps)",
                param="num_steps",
            )
        if body.activities == []:
            raise BadRequest(
                "activities is empty: name CPU, GPU or both", param="activities"
            )
        path = await self._manager.profile(
            is_start=True,
            folder=str(await asyncio.to_thread(self._folder, body.output_dir)),
            name=f"{time.time():.0f}-{uuid.uuid4().hex[:8]}",
            num_steps=steps,
            activities=body.activities or ["CPU", "GPU"],
            with_stack=bool(body.with_stack),
            record_shapes=bool(body.record_shapes),
        )
        return json_response(ProfileAnswer(status="started", path=path))

    async def stop(self, request: Request) -> Response:
        path = await self._manager.profile(is_start=False)
        return json_response(ProfileAnswer(status="stopped", path=path))

    def _folder(self, asked: str | None) -> Path:
        """Return the folder for traces: the operator's, or a client's choice below it,
        because only the operator decides where this process writes.
        """
        root = self._root.resolve()
        try:
            folder = (root / (asked or "")).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            # A null byte, a loop of links.
            raise BadRequest(
                f"output_dir is not a path: {error}", param="output_dir"
            ) from error
        if not folder.is_relative_to(root):
            raise BadRequest(
                f"output_dir must lie below {root} (--profile-output-dir)",
                param="output_dir",
            )
        return folder
