"""The paths of OpenAI's API."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ModelCard,
    ModelList,
)
from sglang.srt.entrypoints.endpoint import ENGINE_ERRORS, Endpoint
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import json_response
from sglang.srt.entrypoints.openai.chat import ChatApi
from sglang.srt.entrypoints.openai.completions import CompletionApi
from sglang.srt.entrypoints.openai.parse_routes import ParseRoutes
from sglang.srt.entrypoints.openai.protocol import ChatRequest, CompletionRequest
from sglang.srt.entrypoints.openai.responses import ResponsesApi
from sglang.srt.managers.messages.io_struct import LoraRef

COMPLETION_EXAMPLES = {
    "text": {"prompt": "The capital of France is", "max_tokens": 16},
    "stream": {
        "prompt": ["Once", "Twice"],
        "max_tokens": 4,
        "logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
}
CHAT_EXAMPLES = {
    "question": {
        "messages": [
            {"role": "system", "content": "You answer briefly."},
            {"role": "user", "content": "What is the capital of France?"},
        ],
        "max_completion_tokens": 16,
        "temperature": 0,
    },
    "stream": {
        "messages": [{"role": "user", "content": "Count to three."}],
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
    },
}


class OpenAIRoutes:
    """Handlers of OpenAI's routes."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._completions = CompletionApi(front)
        self._chat = ChatApi(front)
        self._parse = ParseRoutes(front)
        self._responses = ResponsesApi(front)

    def routes(self) -> list[BaseRoute]:
        return [
            Endpoint(
                "/v1/completions",
                self._completions.handle,
                methods=["POST"],
                summary="OpenAI's completions, with SGLang's sampling fields",
                body=CompletionRequest,
                answer=Completion,
                event=Completion,
                errors=ENGINE_ERRORS,
                examples=COMPLETION_EXAMPLES,
            ),
            Endpoint(
                "/v1/chat/completions",
                self._chat.handle,
                methods=["POST"],
                summary="OpenAI's chat completions, with SGLang's sampling fields",
                body=ChatRequest,
                answer=ChatCompletion,
                event=ChatCompletionChunk,
                errors=ENGINE_ERRORS,
                examples=CHAT_EXAMPLES,
            ),
            Endpoint(
                "/v1/models",
                self.models,
                methods=["GET"],
                summary="The model that is served and its adapters, as a list",
                answer=ModelList,
            ),
            Endpoint(
                "/v1/models/{model:path}",
                self.model,
                methods=["GET"],
                summary="The model or adapter of this name, if it is served",
                answer=ModelCard,
                errors=(404,),
            ),
            *self._parse.routes(),
            *self._responses.routes(),
        ]

    async def models(self, request: Request) -> Response:
        loras = self._front.manager.loras.loaded
        cards = [self._card(), *map(self._adapter_card, loras)]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        asked = request.path_params["model"]
        self._front.check_model(asked, is_strict=True)
        loras = self._front.manager.loras
        ref = loras.resolve(loras.of_model(asked))
        return json_response(self._card() if ref is None else self._adapter_card(ref))

    def _adapter_card(self, ref: LoraRef) -> dict[str, Any]:
        """Describe an adapter as a model with a parent."""
        names = {"id": ref.name, "root": ref.path, "parent": self._front.model_name}
        return self._card() | names

    def _card(self) -> dict[str, Any]:
        limits = self._front.manager.limits
        return {
            "id": self._front.model_name,
            "object": "model",
            "created": self._front.started,
            "owned_by": "sglang",
            "root": self._front.server_args.model_path,
            "parent": None,
            "max_model_len": None if limits is None else limits.context_len,
        }
