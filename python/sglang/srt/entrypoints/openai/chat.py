"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import (
    answer_size,
    aside,
    event,
    json_response,
    read_body,
    whole_results,
)
from sglang.srt.entrypoints.neutral_fields import CHAT, refuse_others
from sglang.srt.entrypoints.openai.common import (
    ClientNames,
    StreamUsage,
    UsageCounter,
    finish_name,
    make_id,
    matched_stop,
    sampling_params,
    stream_usage,
)
from sglang.srt.entrypoints.openai.logprobs import chat_logprobs, need_tokenizer
from sglang.srt.entrypoints.openai.protocol import ChatRequest
from sglang.srt.managers.errors import BadRequest
from sglang.srt.managers.prompt_request import PromptRequest
from sglang.srt.managers.request_state import RequestGroup, Update
from sglang.srt.managers.template_manager import TemplateManager
from sglang.srt.utils.hf_tokenizer import Tokenizer

# Larger than any context: a chat without a limit may use all that the prompt leaves.
WHOLE_CONTEXT = 1 << 40
MAX_TEMPLATE_VARIABLES = 64


class ChatApi:
    """Handler of `/v1/chat/completions`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._manager = front.manager

    async def handle(self, request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        refuse_others(body, CHAT)
        self._front.check_model(body.model)
        tokenizer = need_tokenizer(self._manager.tokenizer)
        with_usage = stream_usage(body)
        length_field, _ = _max_tokens(body)
        names = ClientNames(
            body,
            prompt="messages",
            max_tokens=length_field,
            top_logprobs="top_logprobs",
        )
        with names.in_errors():
            prompt = await aside(
                request, self._manager, _prompt_request, body, self._manager.templates
            )
            group = await self._manager.submit([prompt])
        answer = _ChatAnswer(
            self._front,
            tokenizer,
            prompt,
            model=body.model,
            with_usage=with_usage.is_continuous,
        )
        if body.stream:
            events = self._events(group, answer, names, with_usage=with_usage)
            return self._front.stream(events, group)
        with names.in_errors():
            updates = await whole_results(request, self._manager, group)
        answer.usage.add(updates)

        def whole() -> Response:
            choices = [answer.choice(update) for update in updates]
            usage = answer.usage.as_dict()
            return json_response(answer.body("chat.completion", choices, usage=usage))

        return await self._manager.side_work.run(answer_size(updates), whole)

    async def _events(
        self,
        group: RequestGroup,
        answer: _ChatAnswer,
        names: ClientNames,
        *,
        with_usage: StreamUsage,
    ) -> AsyncIterator[bytes]:
        is_first = True
        with names.in_errors():
            async for news in self._manager.updates(group):
                answer.usage.add(news)
                chunks = answer.role_chunks(len(group.states)) if is_first else []
                is_first = False
                for update in news:
                    chunks += answer.delta_chunks(update)
                yield b"".join(map(event, chunks))
        if with_usage.at_end:
            yield event(answer.chunk([], usage=answer.usage.as_dict()))


class _ChatAnswer:
    """Builds the chunks of a stream, or the one body without a stream."""

    def __init__(
        self,
        front: Front,
        tokenizer: Tokenizer,
        prompt: PromptRequest,
        *,
        model: str | None,
        with_usage: bool,
    ) -> None:
        self.usage = UsageCounter(
            n=prompt.sampling_params.n,
            report_cached=front.server_args.enable_cache_report,
        )
        self._tokenizer = tokenizer
        self._with_logprobs = prompt.return_logprob
        self._id = make_id("chatcmpl")
        self._created = int(time.time())
        self._model = model or front.model_name
        self._with_usage = with_usage

    def body(
        self,
        kind: str,
        choices: Sequence[dict[str, Any]],
        *,
        usage: dict[str, Any] | None,
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage,
        }

    def chunk(
        self, choices: Sequence[dict[str, Any]], *, usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        if self._with_usage:
            usage = self.usage.as_dict()
        return self.body("chat.completion.chunk", choices, usage=usage)

    def choice(self, update: Update) -> dict[str, Any]:
        return {
            "index": update.index,
            "message": {"role": "assistant", "content": update.text, "refusal": None},
            "logprobs": self._logprobs(update),
            "finish_reason": finish_name(update.finish_reason),
            "matched_stop": matched_stop(update.finish_reason),
        }

    def role_chunks(self, count: int) -> list[dict[str, Any]]:
        """Return the first chunk of every choice."""
        delta = {"role": "assistant", "content": ""}
        return [self.chunk([self._delta(i, delta)]) for i in range(count)]

    def delta_chunks(self, update: Update) -> list[dict[str, Any]]:
        """Return a chunk with the new text, and a last one with the finish reason."""
        chunks = []
        logprobs = self._logprobs(update)
        if update.text or logprobs is not None:
            shown = self._delta(update.index, {"content": update.text})
            shown["logprobs"] = logprobs
            chunks.append(self.chunk([shown]))
        if update.finish_reason is not None:
            last = self._delta(update.index, {})
            last["finish_reason"] = finish_name(update.finish_reason)
            last["matched_stop"] = matched_stop(update.finish_reason)
            chunks.append(self.chunk([last]))
        return chunks

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }

    def _logprobs(self, update: Update) -> dict[str, Any] | None:
        if not self._with_logprobs or update.logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, update.logprobs)


def _prompt_request(body: ChatRequest, templates: TemplateManager) -> PromptRequest:
    _refuse_unsupported(body)
    _, max_tokens = _max_tokens(body)
    params = sampling_params(
        body, max_tokens=max_tokens, default_max_tokens=WHOLE_CONTEXT
    )
    text = templates.render(body.messages, variables=_template_variables(body))
    return PromptRequest(
        prompt=text,
        # The template contains them already.
        add_special_tokens=False,
        sampling_params=params,
        is_length_exact=max_tokens is not None,
        stream=bool(body.stream),
        return_logprob=bool(body.logprobs),
        top_logprobs_num=body.top_logprobs or 0,
        rid=body.rid,
        extra_key=body.namespace(),
    )


def _template_variables(body: ChatRequest) -> dict[str, Any]:
    given = body.chat_template_kwargs or {}
    if len(given) > MAX_TEMPLATE_VARIABLES:
        raise BadRequest(
            f"chat_template_kwargs has {len(given)} entries, but at most "
            f"{MAX_TEMPLATE_VARIABLES} are accepted",
            param="chat_template_kwargs",
        )
    variables = dict(given)
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return variables


def _max_tokens(body: ChatRequest) -> tuple[str, int | None]:
    """Return the name and value of the output limit; the newer name wins."""
    if body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _refuse_unsupported(body: ChatRequest) -> None:
    """Refuse fields that would change the answer and cannot be honoured."""
    asked: dict[str, bool] = {
        "tools": bool(body.tools),
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
        "functions": bool(body.functions),
        "function_call": body.function_call not in (None, "none", "auto"),
        "modalities": body.modalities not in (None, [], ["text"]),
        "audio": body.audio is not None,
        "prediction": body.prediction is not None,
        "web_search_options": body.web_search_options is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise BadRequest(f"{name} is not supported by this server", param=name)
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
