"""Types of the answers that handlers build as plain dicts, for the OpenAPI schema.

Tests decode real answers with them and fail on a field that is not declared here.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sglang.srt.entrypoints.generate_api import ShownLogprob


class Shape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON object with these fields and no others."""


class ErrorDetail(Shape):
    """`code` is the HTTP status, or a name that clients know; `param` is the invalid
    field, if any.
    """

    message: str
    type: str
    param: str | None
    code: int | str


class Error(Shape):
    """The body of every error."""

    error: ErrorDetail


class FinishReasonShown(Shape):
    """Why a request ended: after `length` tokens, at the stop `matched`, or aborted."""

    type: Literal["length", "stop", "abort"]
    length: int | msgspec.UnsetType = msgspec.UNSET
    matched: int | str | msgspec.UnsetType | None = msgspec.UNSET
    message: str | msgspec.UnsetType | None = msgspec.UNSET


class MetaInfo(Shape):
    """Facts about one output of `/generate`; logprobs are [logprob, id, text]."""

    id: str
    finish_reason: FinishReasonShown | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    input_token_logprobs: list[ShownLogprob] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[ShownLogprob] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[ShownLogprob] | None] | msgspec.UnsetType = (
        msgspec.UNSET
    )
    output_top_logprobs: list[list[ShownLogprob]] | msgspec.UnsetType = msgspec.UNSET
    input_token_ids_logprobs: list[list[ShownLogprob] | None] | msgspec.UnsetType = (
        msgspec.UNSET
    )
    output_token_ids_logprobs: list[list[ShownLogprob]] | msgspec.UnsetType = (
        msgspec.UNSET
    )
    hidden_states: list[list[float]] | msgspec.UnsetType = msgspec.UNSET
    spec_verify_ct: int | msgspec.UnsetType = msgspec.UNSET
    spec_accept_length: float | msgspec.UnsetType = msgspec.UNSET


class Generated(Shape):
    """One output of `/generate`; `index` is set in streams of several outputs."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET


class CachedTokens(Shape):
    cached_tokens: int


class Usage(Shape):
    """Token counts; the details with --enable-cache-report."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobsShown(Shape):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobsShown | None
    finish_reason: Literal["stop", "length", "abort"] | None
    matched_stop: int | str | None
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    hidden_states: list[float] | msgspec.UnsetType = msgspec.UNSET


class Completion(Shape):
    """The answer of `/v1/completions`, and each event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None


class CalledFunction(Shape):
    """`arguments` are JSON; in a stream, a piece of it."""

    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(Shape):
    """A piece of the call `index`; its first has the name."""

    index: int
    function: CalledFunction
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCall] | None


class ChatDelta(Shape):
    """The new part; the other fields are null."""

    role: Literal["assistant"] | None
    content: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCallDelta] | None
    hidden_states: list[float] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Shape):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"] | None
    matched_stop: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    hidden_states: list[float] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(Shape):
    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"] | None
    matched_stop: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(Shape):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(Shape):
    """One event of a stream of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None
    parent: str | None
    max_model_len: int | None


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelCard]


class ModelInfo(Shape):
    model_path: str
    tokenizer_path: str | None
    served_model_name: str
    is_generation: bool
    context_length: int | None
    vocab_size: int | None
    has_chat_template: bool


class VersionShown(Shape):
    version: str


class HealthShown(Shape):
    status: Literal["ok"]
    seconds_since_last_sign: float


class IncidentList(Shape):
    """Incidents of the KV canary, oldest first (`docs/kv_canary.md`)."""

    mode: str
    incidents: list[dict[str, Any]]
