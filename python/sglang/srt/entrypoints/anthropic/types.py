"""Types of the answers and events of `/v1/messages`, for the OpenAPI schema."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sglang.srt.entrypoints.answers import Shape

StopReason = Literal[
    "end_turn",
    "max_tokens",
    "model_context_window_exceeded",
    "stop_sequence",
    "tool_use",
]


class MessagesErrorCode(Shape):
    error_code: str


class MessagesErrorDetail(Shape):
    """`details` is set if clients know the error by a name."""

    type: str
    message: str
    details: MessagesErrorCode | msgspec.UnsetType = msgspec.UNSET


class MessagesError(Shape, tag_field="type", tag="error"):
    """The body of every error below `/v1/messages`, and the last event of a stream that
    is cut off by an error.
    """

    error: MessagesErrorDetail


class TextBlock(Shape, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Shape, tag_field="type", tag="thinking"):
    """Reasoning; the signature is a checksum that is never verified."""

    thinking: str
    signature: str


class ToolUseBlock(Shape, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(Shape):
    thinking_tokens: int


class MessageUsage(Shape):
    """Token counts; cached tokens are counted separately with --enable-cache-report."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageObject(Shape, tag_field="type", tag="message"):
    """The answer of `/v1/messages`."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Shape):
    input_tokens: int


class TextDelta(Shape, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Shape, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Shape, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Shape, tag_field="type", tag="input_json_delta"):
    partial_json: str


class MessageStop(Shape):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageStartEvent(Shape, tag_field="type", tag="message_start"):
    message: MessageObject


class ContentBlockStartEvent(Shape, tag_field="type", tag="content_block_start"):
    index: int
    content_block: TextBlock | ThinkingBlock | ToolUseBlock


class ContentBlockDeltaEvent(Shape, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStopEvent(Shape, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDeltaEvent(Shape, tag_field="type", tag="message_delta"):
    delta: MessageStop
    usage: MessageUsage


class MessageStopEvent(Shape, tag_field="type", tag="message_stop"):
    """The end of a stream."""


MessageEvent = (
    MessageStartEvent
    | ContentBlockStartEvent
    | ContentBlockDeltaEvent
    | ContentBlockStopEvent
    | MessageDeltaEvent
    | MessageStopEvent
    | MessagesError
)
