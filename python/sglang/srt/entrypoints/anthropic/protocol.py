"""The request bodies of `/v1/messages`, with the sampling fields that SGLang adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from sglang.srt.entrypoints.neutral_fields import MESSAGES, with_neutral
from sglang.srt.entrypoints.openai.protocol import ChatOptions

if TYPE_CHECKING:

    class _Messages(ChatOptions): ...

else:
    _Messages = with_neutral(ChatOptions, MESSAGES)


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`effort` is a variable of the chat template, `format` a constraint."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class Conversation(_Messages, kw_only=True, forbid_unknown_fields=True):
    """Everything that forms the prompt: the body of `/v1/messages/count_tokens`."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    # The name of `output_config.format` in the clients' beta version.
    output_format: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(Conversation, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/messages`."""

    max_tokens: int
