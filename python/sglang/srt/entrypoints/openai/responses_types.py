"""Types of the answers and events of `/v1/responses`, for the OpenAPI schema."""

from __future__ import annotations

from typing import Any, Literal, Union

import msgspec

from sglang.srt.entrypoints.answers import CachedTokens, Shape

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTextPart(Shape, tag_field="type", tag="output_text"):
    """Text of a message; `logprobs` where they were asked for."""

    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class ReasoningText(Shape, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(Shape, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    content: list[OutputTextPart]
    status: ItemStatus


class ReasoningItem(Shape, tag_field="type", tag="reasoning"):
    """Reasoning as the model wrote it; there is no summary."""

    id: str
    summary: list[Any]
    content: list[ReasoningText]
    status: ItemStatus


class CallItem(Shape, tag_field="type", tag="function_call"):
    """A call; `arguments` are JSON, as far as the model wrote it."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class InputTokensDetails(CachedTokens):
    cache_write_tokens: int


class OutputTokensDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Shape):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class ResponseObject(Shape):
    """The answer of `/v1/responses`; the fields from `instructions` on repeat the
    request, with their defaults."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[MessageItem | ReasoningItem | CallItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    background: Literal[False]
    reasoning: dict[str, str | None]
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: None


def _event(kind: str, **fields: Any) -> Any:
    """The type of the events that are called `kind`."""
    words = kind.replace(".", "_").split("_")
    return msgspec.defstruct(
        "".join(word.capitalize() for word in words) + "Event",
        [("sequence_number", int), *fields.items()],
        bases=(Shape,),
        kw_only=True,
        tag_field="type",
        tag=kind,
        forbid_unknown_fields=True,
    )


_OF_ITEM: dict[str, Any] = {"item_id": str, "output_index": int}
_OF_PART = _OF_ITEM | {"content_index": int}
_ITEM = MessageItem | ReasoningItem | CallItem
_PART = OutputTextPart | ReasoningText
# Name after `response.` -> its fields.
_FIELDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("created", "in_progress", "completed", "incomplete", "failed"),
        {"response": ResponseObject},
    ),
    **dict.fromkeys(
        ("output_item.added", "output_item.done"),
        {"output_index": int, "item": _ITEM},
    ),
    **dict.fromkeys(
        ("content_part.added", "content_part.done"), _OF_PART | {"part": _PART}
    ),
    "output_text.delta": _OF_PART | {"delta": str, "logprobs": list[dict[str, Any]]},
    "output_text.done": _OF_PART | {"text": str, "logprobs": list[dict[str, Any]]},
    "reasoning_text.delta": _OF_PART | {"delta": str},
    "reasoning_text.done": _OF_PART | {"text": str},
    "function_call_arguments.delta": _OF_ITEM | {"delta": str},
    "function_call_arguments.done": _OF_ITEM | {"name": str, "arguments": str},
}
ResponseEvent: Any = Union[  # noqa: UP007
    tuple(_event(f"response.{name}", **fields) for name, fields in _FIELDS.items())
]
