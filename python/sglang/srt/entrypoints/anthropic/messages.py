"""`POST /v1/messages` and `/v1/messages/count_tokens` of Anthropic's API."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.anthropic.messages_answer import MessagesAnswer
from sglang.srt.entrypoints.anthropic.messages_input import client_names, to_chat
from sglang.srt.entrypoints.anthropic.protocol import Conversation, MessagesRequest
from sglang.srt.entrypoints.anthropic.types import (
    MessageEvent,
    MessageObject,
    MessagesError,
    TokenCount,
)
from sglang.srt.entrypoints.chat_blocks import answer_blocks
from sglang.srt.entrypoints.endpoint import ENGINE_ERRORS, Endpoint
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import aside, json_response, read_body
from sglang.srt.entrypoints.neutral_fields import MESSAGES, refuse_others
from sglang.srt.entrypoints.openai.chat_submit import (
    RenderedChat,
    render_chat,
    submit_chat,
)
from sglang.srt.managers.messages.errors import ContextOverflow

EXAMPLES = {
    "text": {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 8,
    },
    "stream": {
        "system": "You answer briefly.",
        "messages": [
            {"role": "user", "content": "Count to three."},
            {"role": "assistant", "content": "One,"},
        ],
        "max_tokens": 8,
        "stop_sequences": ["."],
        "stream": True,
    },
    "call": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is 1 + 2?"}]},
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "tool_use",
                        "id": "call_1",
                        "name": "add",
                        "input": {"a": 1, "b": 2},
                    }
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": "3"}
                ],
            },
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
        "max_tokens": 8,
        "stream": True,
    },
}
COUNT_EXAMPLES = {"text": {"messages": [{"role": "user", "content": "Hello"}]}}


class MessagesApi:
    """Handlers of the paths below `/v1/messages`."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def routes(self) -> list[BaseRoute]:
        return [
            Endpoint(
                "/v1/messages",
                self.create,
                methods=["POST"],
                summary="Anthropic's messages",
                body=MessagesRequest,
                answer=MessageObject,
                event=MessageEvent,
                is_named=True,
                errors=ENGINE_ERRORS,
                error=MessagesError,
                examples=EXAMPLES,
            ),
            Endpoint(
                "/v1/messages/count_tokens",
                self.count_tokens,
                methods=["POST"],
                summary="The tokens of the prompt that a message would have",
                body=Conversation,
                answer=TokenCount,
                errors=ENGINE_ERRORS,
                error=MessagesError,
                examples=COUNT_EXAMPLES,
            ),
        ]

    async def create(self, request: Request) -> Response:
        body = await read_body(request, MessagesRequest)
        rendered = await self._rendered(request, body)
        # Clients must send a limit; one beyond the context means the whole context.
        prompt = dataclasses.replace(rendered.prompt, is_length_exact=False)
        with _overflow_in_words():
            chat = await submit_chat(
                self._front, dataclasses.replace(rendered, prompt=prompt)
            )
        answer = MessagesAnswer(self._front, chat, model=body.model)
        return await answer_blocks(self._front, request, chat, answer)

    async def count_tokens(self, request: Request) -> Response:
        body = await read_body(request, Conversation)
        chat = await self._rendered(request, body)
        with chat.names.in_errors(), _overflow_in_words():
            count = await self._front.manager.count_tokens(chat.prompt)
        return json_response({"input_tokens": count})

    async def _rendered(self, request: Request, body: Any) -> RenderedChat:
        refuse_others(body, MESSAGES)
        self._front.check_model(body.model)
        chat = await aside(request, self._front.manager, to_chat, body)
        return await render_chat(self._front, request, chat, client_names(chat))


@contextmanager
def _overflow_in_words() -> Iterator[None]:
    """Report a prompt that is too long in the words that Anthropic's clients act on."""
    try:
        yield
    except ContextOverflow as error:
        error.message = (
            f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
        )
        raise
