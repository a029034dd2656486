"""`POST /tokenize` and `POST /detokenize`, in the shapes of SGLang and vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.endpoint import ENGINE_ERRORS, Endpoint
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.generate_api import split_ids
from sglang.srt.entrypoints.http_io import json_response, read_body
from sglang.srt.entrypoints.neutral_fields import (
    DETOKENIZE,
    TOKENIZE,
    refuse_others,
    with_neutral,
)
from sglang.srt.entrypoints.openai.chat_submit import template_variables
from sglang.srt.entrypoints.openai.logprobs import need_tokenizer
from sglang.srt.entrypoints.openai.tools import read_tool_use
from sglang.srt.managers.front.prompt_request import Limits
from sglang.srt.managers.messages.errors import BadRequest, Unavailable

# Maximum for all texts of one call: their ids are Python integers until answered. Ids
# in a body are bounded by --max-body-values.
MAX_CALL_CHARS = 4 * 1024 * 1024
MAX_CALL_ENTRIES = 4096

if TYPE_CHECKING:
    _Tokenize = msgspec.Struct
    _Detokenize = msgspec.Struct
else:
    _Tokenize = with_neutral(msgspec.Struct, TOKENIZE)
    _Detokenize = with_neutral(msgspec.Struct, DETOKENIZE)


class TokenizeRequest(_Tokenize, kw_only=True, forbid_unknown_fields=True):
    """The body of `/tokenize`: `prompt`, a text or several, or `messages`, a chat.

    `add_special_tokens` defaults to true for a prompt and to false for a chat, whose
    template already contains them. The last five fields are for chats only, as in the
    chat endpoint.
    """

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`tokens` and `count` are lists if `prompt` is a list of texts."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str | list[str]] | None = None


class DetokenizeRequest(_Detokenize, kw_only=True, forbid_unknown_fields=True):
    """The body of `/detokenize`: one list of token ids, or several."""

    model: str | None = None
    tokens: list[int | list[int]]
    skip_special_tokens: bool | None = True


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """The text under two names: `text` is SGLang's, `prompt` vLLM's."""

    text: str | list[str]
    prompt: str | list[str]


EXAMPLES = {
    "text": {"prompt": "Hello, world", "add_special_tokens": True},
    "chat": {"messages": [{"role": "user", "content": "Hello"}]},
}


class TokenizeApi:
    """Handlers of both endpoints, also under `/v1`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._manager = front.manager

    def routes(self) -> list[BaseRoute]:
        return [
            *(
                Endpoint(
                    path,
                    self.tokenize,
                    methods=["POST"],
                    summary="Token ids of a text, of several, or of a chat",
                    body=TokenizeRequest,
                    answer=TokenizeAnswer,
                    errors=ENGINE_ERRORS,
                    examples=EXAMPLES,
                )
                for path in ("/tokenize", "/v1/tokenize")
            ),
            *(
                Endpoint(
                    path,
                    self.detokenize,
                    methods=["POST"],
                    summary="The text of token ids",
                    body=DetokenizeRequest,
                    answer=DetokenizeAnswer,
                    errors=ENGINE_ERRORS,
                    examples={"ids": {"tokens": [72, 101, 108, 108, 111]}},
                )
                for path in ("/detokenize", "/v1/detokenize")
            ),
        ]

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request, TokenizeRequest)
        refuse_others(body, TOKENIZE)
        self._front.check_model(body.model)
        limits = self._limits()
        texts, field = await self._texts(body)
        _check_size(len(texts), MAX_CALL_ENTRIES, "texts", field)
        _check_size(sum(map(len, texts)), MAX_CALL_CHARS, "characters", field)
        around = body.add_special_tokens
        encoded = await self._manager.prompts.encode(
            texts,
            limits,
            add_special_tokens=body.messages is None if around is None else around,
            field=field,
            with_strings=bool(body.return_token_strs),
        )
        is_list = isinstance(body.prompt, list)
        answer = {
            "tokens": _shown_json(encoded.ids, is_list=is_list),
            "count": _shown(encoded.counts, is_list=is_list),
            "max_model_len": limits.context_len,
        }
        if body.return_token_strs:
            answer["token_strs"] = _shown_json(encoded.strings, is_list=is_list)
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest)
        refuse_others(body, DETOKENIZE)
        self._front.check_model(body.model)
        limits = self._limits()
        lists, is_list = split_ids(body.tokens, field="tokens")
        _check_size(len(lists), MAX_CALL_ENTRIES, "lists", "tokens")
        for ids in lists:
            limits.check_vocab(ids, field="tokens")
        texts = await self._manager.prompts.decode(
            lists, skip_special_tokens=body.skip_special_tokens is not False
        )
        text = _shown(texts, is_list=is_list)
        return json_response(DetokenizeAnswer(text=text, prompt=text))

    def _limits(self) -> Limits:
        """The engine's limits, once they are known."""
        need_tokenizer(self._manager.tokenizer)
        if self._manager.limits is None:
            raise Unavailable(f"the server is {self._manager.phase.value}")
        return self._manager.limits

    async def _texts(self, body: TokenizeRequest) -> tuple[list[str], str]:
        """Return the texts to tokenize, and the field that holds them."""
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("set either prompt or messages", param="prompt")
        if body.messages is None:
            texts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
            return cast("list[str]", texts), "prompt"
        use = read_tool_use(body.tools, body.tool_choice, parallel=None)
        text = await self._manager.prompts.render(
            body.messages,
            variables=template_variables(body.chat_template_kwargs),
            tools=use.for_template or None,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
        )
        return [text], "messages"


def _check_size(size: int, limit: int, unit: str, field: str) -> None:
    if size > limit:
        raise BadRequest(
            f"{field} has {size} {unit}, but one call reads at most {limit}; split it",
            param=field,
        )


def _shown(entries: list[Any], *, is_list: bool) -> Any:
    """Return all entries if the client sent a list, else the only one."""
    return entries if is_list else entries[0]


def _shown_json(entries: msgspec.Raw, *, is_list: bool) -> msgspec.Raw:
    """Like `_shown`, for a list that is already JSON."""
    return entries if is_list else msgspec.Raw(memoryview(entries)[1:-1])
