"""The request body of `/v1/responses`, with the sampling fields that SGLang adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from sglang.srt.entrypoints.neutral_fields import RESPONSES, with_neutral
from sglang.srt.entrypoints.openai.protocol import ChatOptions

if TYPE_CHECKING:

    class _Responses(ChatOptions): ...

else:
    _Responses = with_neutral(ChatOptions, RESPONSES)


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`effort` is a variable of the chat template; the others have no effect: reasoning
    is shown as the model writes it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`format` is the constraint of the output's text; `verbosity` has no effect."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ObfuscationOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool = False


class ResponsesRequest(_Responses, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/responses`.

    Nothing is stored, whatever `store` says.
    """

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    stream_options: ObfuscationOptions | None = None
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
