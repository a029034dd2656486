"""The objects in answers of `/v1/responses`: items, their parts, repeated fields."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.chat_blocks import Block, BlockKind
from sglang.srt.entrypoints.openai.chat_submit import SubmittedChat
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesRequest
from sglang.srt.managers.messages.errors import ApiError

PREFIXES = {
    BlockKind.REASONING: "rs_",
    BlockKind.TEXT: "msg_",
    BlockKind.CALL: "fc_",
}


def item_id(block: Block) -> str:
    return PREFIXES[block.kind] + block.block_id


def message_item(block: Block, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": item_id(block),
        "type": "message",
        "role": "assistant",
        "content": content,
    }


def text_part(text: str, logprobs: Any) -> dict[str, Any]:
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": logprobs,
    }


def reasoning_item(block: Block, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": item_id(block),
        "type": "reasoning",
        "summary": [],
        "content": content,
    }


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def call_item(block: Block, arguments: str) -> dict[str, Any]:
    return {
        "id": item_id(block),
        "type": "function_call",
        "call_id": block.call_id,
        "name": block.name,
        "arguments": arguments,
    }


def shown_error(error: ApiError) -> dict[str, Any]:
    is_clients = 400 <= error.status < 500
    return {
        "code": "invalid_prompt" if is_clients else "server_error",
        "message": error.message,
    }


def repeated_fields(asked: ResponsesRequest, chat: SubmittedChat) -> dict[str, Any]:
    """Return the request's fields that the answer repeats, with their defaults."""
    params = chat.prompt.sampling_params
    text = asked.text
    effort = asked.reasoning.effort if asked.reasoning else None
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "background": False,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": (text.format if text else None) or {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": None,
    }
