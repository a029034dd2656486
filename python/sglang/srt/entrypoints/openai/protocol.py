"""OpenAI's request bodies, with the sampling fields that SGLang adds.

A field that this engine cannot honor is rejected by name unless its value is neutral
(`neutral_fields`); the fields in `Harmless` are accepted without effect, because common
clients send them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from sglang.srt.entrypoints.neutral_fields import (
    CHAT,
    COMPLETION,
    UNSET,
    with_neutral,
)
from sglang.srt.utils.salt_chain import tenant_of

# Field of the body -> name in SamplingParams, for fields with the same meaning.
SAMPLING_FIELDS: dict[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
    "stop": "stop",
    "n": "n",
    "seed": "sampling_seed",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
    "stop_token_ids": "stop_token_ids",
    "stop_regex": "stop_regex",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "no_stop_trim": "no_stop_trim",
    "include_stop_str_in_output": "no_stop_trim",
    "regex": "regex",
    "ebnf": "ebnf",
    "json_schema": "json_schema",
}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = False
    include_obfuscation: bool | None = False
    continuous_usage_stats: bool | None = False


class Harmless(msgspec.Struct, kw_only=True):
    """Fields without effect here, whose values are not even parsed.

    All but the last concern accounts, storage or caching elsewhere. `verbosity` is for
    models that were trained on it; chat templates cannot express it.
    """

    user: msgspec.Raw = UNSET
    metadata: msgspec.Raw = UNSET
    store: msgspec.Raw = UNSET
    service_tier: msgspec.Raw = UNSET
    safety_identifier: msgspec.Raw = UNSET
    prompt_cache_key: msgspec.Raw = UNSET
    prompt_cache_retention: msgspec.Raw = UNSET
    verbosity: msgspec.Raw = UNSET


class ChatOptions(Harmless, kw_only=True):
    """Fields shared by all APIs. None means the default."""

    model: str | None = None
    stream: bool | None = False
    rid: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_path: str | None = None
    priority: int | None = None

    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None

    def options(self) -> dict[str, Any]:
        """Return the fields that have the same meaning in every API."""
        return {name: getattr(self, name) for name in _OPTIONS}


_OPTIONS = sorted(set(ChatOptions.__struct_fields__) - set(Harmless.__struct_fields__))


class Sampled(ChatOptions, kw_only=True):
    """Fields of chats and completions. None means the default."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    return_token_ids: bool | None = False
    return_hidden_states: bool | None = False
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None

    def tenant(self) -> str | None:
        """Return the request's `tenant_of`."""
        return tenant_of(salt=self.cache_salt, key=self.extra_key)


if TYPE_CHECKING:

    class _Completion(Sampled): ...

    class _Chat(Sampled): ...

else:
    _Completion = with_neutral(Sampled, COMPLETION)
    _Chat = with_neutral(Sampled, CHAT)


class CompletionRequest(_Completion, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    rid: str | list[str] | None = None  # type: ignore[assignment]
    echo: bool | None = False
    logprobs: int | bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    def __post_init__(self) -> None:
        # Chat clients send a boolean; true means one alternative, as in SGLang.
        if isinstance(self.logprobs, bool):
            self.logprobs = 1 if self.logprobs else None


class ChatRequest(_Chat, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/chat/completions`.

    Reasoning switches (`thinking.py`) are variables of the chat template, which may
    ignore them.
    """

    messages: list[dict[str, Any]]
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: bool | dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    include_reasoning: bool | None = None
