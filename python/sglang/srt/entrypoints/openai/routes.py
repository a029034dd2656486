"""The paths of OpenAI's API."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import json_response
from sglang.srt.entrypoints.openai.chat import ChatApi
from sglang.srt.entrypoints.openai.completions import CompletionApi
from sglang.srt.entrypoints.openai.parse_routes import ParseRoutes


class OpenAIRoutes:
    """Handlers of OpenAI's routes."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._completions = CompletionApi(front)
        self._chat = ChatApi(front)
        self._parse = ParseRoutes(front)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self._completions.handle, methods=["POST"]),
            Route("/v1/chat/completions", self._chat.handle, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            *self._parse.routes(),
        ]

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._front.check_model(request.path_params["model"], is_strict=True)
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        limits = self._front.manager.limits
        return {
            "id": self._front.model_name,
            "object": "model",
            "created": self._front.started,
            "owned_by": "sglang",
            "root": self._front.server_args.model_path,
            "max_model_len": None if limits is None else limits.context_len,
        }
