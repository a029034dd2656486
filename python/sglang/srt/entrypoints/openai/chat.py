"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import (
    answer_size,
    event,
    json_response,
    read_body,
    whole_results,
)
from sglang.srt.entrypoints.neutral_fields import CHAT, refuse_others
from sglang.srt.entrypoints.openai.chat_answer import ChatAnswer
from sglang.srt.entrypoints.openai.chat_submit import (
    SubmittedChat,
    max_tokens,
    render_chat,
    submit_chat,
)
from sglang.srt.entrypoints.openai.common import ClientNames, StreamUsage, stream_usage
from sglang.srt.entrypoints.openai.protocol import ChatRequest
from sglang.srt.entrypoints.openai.thinking import shows_reasoning


class ChatApi:
    """Handler of `/v1/chat/completions`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._manager = front.manager

    async def handle(self, request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        refuse_others(body, CHAT)
        self._front.check_model(body.model)
        with_usage = stream_usage(body)
        length_field, _ = max_tokens(body)
        names = ClientNames(
            body,
            prompt="messages",
            max_tokens=length_field,
            top_logprobs="top_logprobs",
        )
        rendered = await render_chat(self._front, request, body, names)
        chat = await submit_chat(self._front, rendered)
        answer = ChatAnswer(
            self._front,
            chat.tokenizer,
            chat.prompt,
            chat.form,
            model=body.model,
            with_usage=with_usage.is_continuous,
            shows_reasoning=shows_reasoning(body),
        )
        if body.stream:
            events = self._events(chat, answer, with_usage=with_usage)
            return self._front.stream(events, chat.group)
        with names.in_errors():
            updates = await whole_results(request, self._manager, chat.group)
        answer.usage.add(updates)

        def whole() -> Response:
            choices = [answer.choice(update) for update in updates]
            usage = answer.usage.as_dict()
            body = answer.body("chat.completion", choices, usage=usage)
            return json_response(body | answer.prompt_ids(updates))

        return await self._manager.side_work.run(answer_size(updates), whole)

    async def _events(
        self, chat: SubmittedChat, answer: ChatAnswer, *, with_usage: StreamUsage
    ) -> AsyncIterator[bytes]:
        is_first = True
        with chat.names.in_errors():
            async for news in self._manager.updates(chat.group):
                answer.usage.add(news)
                chunks = answer.role_chunks(news) if is_first else []
                is_first = False
                for update in news:
                    chunks += answer.delta_chunks(update)
                yield b"".join(map(event, chunks))
        if with_usage.at_end:
            yield event(answer.chunk([], usage=answer.usage.as_dict()))
