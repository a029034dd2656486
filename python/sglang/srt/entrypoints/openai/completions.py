"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.bootstrap_fields import read_bootstraps
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import (
    answer_size,
    aside,
    event,
    json_response,
    read_body,
    whole_results,
)
from sglang.srt.entrypoints.neutral_fields import COMPLETION, refuse_others
from sglang.srt.entrypoints.openai.common import (
    ClientNames,
    StreamUsage,
    UsageCounter,
    finish_name,
    last_hidden_state,
    make_id,
    matched_stop,
    sampling_params,
    stream_usage,
)
from sglang.srt.entrypoints.openai.logprobs import CompletionLogprobs, need_tokenizer
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.managers.front.output_check import check_shown
from sglang.srt.managers.front.prompt_request import PromptRequest, prompt_rids
from sglang.srt.managers.front.request_state import RequestGroup, Update
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.utils.hf_tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


class CompletionApi:
    """Handler of `/v1/completions`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._manager = front.manager

    async def handle(self, request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        refuse_others(body, COMPLETION)
        self._front.check_model(body.model)
        tokenizer = need_tokenizer(self._manager.tokenizer)
        with_usage = stream_usage(body)
        names = ClientNames(
            body, prompt="prompt", max_tokens="max_tokens", top_logprobs="logprobs"
        )
        with names.in_errors():
            self._manager.check_sizes(body.prompt, field="prompt")
            prompts = await aside(
                request,
                self._manager,
                _prompt_requests,
                body,
                self._manager,
            )
            group = await self._manager.submit(prompts)
        answer = _CompletionAnswer(self._front, tokenizer, body, prompts)
        if body.stream:
            events = self._events(group, answer, names, with_usage=with_usage)
            return self._front.stream(events, group)
        with names.in_errors():
            updates = await whole_results(request, self._manager, group)
        answer.usage.add(updates)

        def whole() -> Response:
            choices = [answer.choice(update) for update in updates]
            return json_response(answer.body(choices, usage=answer.usage.as_dict()))

        return await self._manager.side_work.run(answer_size(updates), whole)

    async def _events(
        self,
        group: RequestGroup,
        answer: _CompletionAnswer,
        names: ClientNames,
        *,
        with_usage: StreamUsage,
    ) -> AsyncIterator[bytes]:
        with names.in_errors():
            async for news in self._manager.updates(group):
                answer.usage.add(news)
                usage = answer.usage.as_dict() if with_usage.is_continuous else None
                yield b"".join(
                    event(answer.body([answer.choice(update)], usage=usage))
                    for update in news
                )
        if with_usage.at_end:
            yield event(answer.body([], usage=answer.usage.as_dict()))


class _CompletionAnswer:
    """Builds the chunks of a stream, or the one body without a stream."""

    def __init__(
        self,
        front: Front,
        tokenizer: Tokenizer,
        body: CompletionRequest,
        prompts: list[PromptRequest],
    ) -> None:
        params = prompts[0].sampling_params
        n = params.n
        self.usage = UsageCounter(
            n=n, report_cached=front.server_args.enable_cache_report
        )
        self._tokenizer = tokenizer
        self._top = body.logprobs
        self._echo = bool(body.echo)
        self._with_token_ids = bool(body.return_token_ids)
        self._skips_special = params.skip_special_tokens
        self._prompts = [prompt.prompt for prompt in prompts for _ in range(n)]
        self._logprobs: dict[int, CompletionLogprobs] = {}
        # Shown of each output.
        self._num_chars: Counter[int] = Counter()
        self._head = {
            "id": make_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or front.model_name,
        }

    def body(
        self, choices: list[dict[str, Any]], *, usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {**self._head, "choices": choices, "usage": usage}

    def choice(self, update: Update) -> dict[str, Any]:
        """Return the choice of `update`; the first one of an index has the echo."""
        text, prompt_text = update.text, ""
        is_first = update.index not in self._logprobs
        if is_first:
            prompt_text = self._prompt_text(update.index) if self._echo else ""
            self._logprobs[update.index] = CompletionLogprobs(
                self._tokenizer,
                top=self._top or 0,
                skip_special_tokens=self._skips_special,
                prompt_text=prompt_text,
            )
            text = prompt_text + text
        self._num_chars[update.index] += len(text) - len(prompt_text)
        check_shown(update, num_chars=self._num_chars[update.index])
        return {
            "index": update.index,
            "text": text,
            "logprobs": self._shown_logprobs(update),
            "finish_reason": finish_name(update.finish_reason),
            "matched_stop": matched_stop(update.finish_reason),
            **self._token_ids(update, with_prompt=is_first),
            **last_hidden_state(update),
        }

    def _token_ids(self, update: Update, *, with_prompt: bool) -> dict[str, Any]:
        """Return the ids for `return_token_ids`; the prompt's ids are included once."""
        if not self._with_token_ids:
            return {}
        prompt = update.prompt_ids if with_prompt else None
        return {"prompt_token_ids": prompt, "token_ids": update.output_ids}

    def _shown_logprobs(self, update: Update) -> dict[str, Any] | None:
        if self._top is None or update.logprobs is None:
            return None
        shown = self._logprobs[update.index]
        return shown.add(update.logprobs, with_input=self._echo)

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index]
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=False)


def _prompt_requests(
    body: CompletionRequest, manager: TokenizerManager
) -> list[PromptRequest]:
    if body.suffix:
        raise BadRequest("suffix is not supported", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadRequest("best_of must equal n", param="best_of")
    params = sampling_params(
        body,
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        defaults=manager.sampling_defaults,
    )
    prompts = _prompts(body.prompt)
    tenant = body.tenant()
    lora = manager.loras.asked(body.model, body.lora_path)
    bootstraps = read_bootstraps(body, prompts=len(prompts), copies=params.n)
    rids = prompt_rids(body.rid, len(prompts), is_list=_is_list(body.prompt))
    return [
        PromptRequest(
            prompt=prompt,
            sampling_params=params,
            add_special_tokens=body.add_special_tokens is not False,
            is_length_exact=body.max_tokens is not None,
            stream=bool(body.stream),
            return_logprob=body.logprobs is not None,
            logprob_start_len=0 if body.echo and body.logprobs is not None else -1,
            top_logprobs_num=body.logprobs or 0,
            rid=rid,
            list_rid=list_rid,
            extra_key=tenant,
            lora=lora,
            priority=body.priority,
            bootstraps=bootstraps[i],
            keeps_prompt_ids=bool(body.return_token_ids),
            return_hidden_states=bool(body.return_hidden_states),
            only_last_hidden_state=bool(body.return_hidden_states),
        )
        for i, (prompt, (rid, list_rid)) in enumerate(zip(prompts, rids, strict=True))
    ]


def _is_list(prompt: str | list[str | int | list[int]]) -> bool:
    """Whether the client sent a list of prompts."""
    return isinstance(prompt, list) and not isinstance(prompt[0], int)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Split `prompt` (text, texts, token ids or lists of ids) into single prompts."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {str} or kinds == {list}:
        return list(prompt)  # type: ignore[arg-type]
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    raise BadRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of "
        "such lists",
        param="prompt",
    )
