"""`/`: a chat page for browsers, the API's paths for other clients.

The page contains no data and needs no key, unlike the chat routes that it calls.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.endpoint import TEXT, Endpoint
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import json_response
from sglang.srt.entrypoints.page_files import PageFiles, wants_page
from sglang.version import __version__

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/models"),
    *("/v1/responses", "/v1/messages"),
    *("/generate", "/health", "/model_info", "/server_info", "/docs"),
)


class ChatPage:
    """Handlers of the chat page and its parts."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._files = PageFiles("chat")

    def routes(self) -> list[BaseRoute]:
        return [
            Endpoint(
                "/",
                self.index,
                methods=["GET"],
                summary="Where to go from here; browsers get a page to chat",
                answer=dict[str, Any],
            ),
            Endpoint(
                "/chat/assets/{name}",
                self.asset,
                methods=["GET"],
                summary="A part of the chat page",
                media_type=TEXT,
                errors=(404,),
            ),
        ]

    async def index(self, request: Request) -> Response:
        """Show the page to browsers, and the available paths to other clients."""
        if wants_page(request.scope):
            answer = self._files.answer()
        else:
            answer = json_response(
                {
                    "name": "sglang-canary",
                    "version": __version__,
                    "model": self._front.model_name,
                    "paths": PATHS,
                }
            )
        answer.headers["Vary"] = "Accept"
        return answer

    async def asset(self, request: Request) -> Response:
        return self._files.answer(request.path_params["name"])
