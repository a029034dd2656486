"""The answer of `/v1/messages`: content blocks, and the events of a stream."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from sglang.srt.entrypoints.anthropic.error_shape import error_content
from sglang.srt.entrypoints.chat_blocks import (
    Block,
    BlockAnswer,
    BlockEvent,
    BlockKind,
    BlockStep,
)
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import named_event
from sglang.srt.entrypoints.openai.chat_submit import SubmittedChat
from sglang.srt.managers.front.request_state import Update
from sglang.srt.managers.messages.errors import (
    CLIENT_ABORT_STATUS,
    ApiError,
    BadRequest,
)
from sglang.srt.utils.hashing import digest

Events = list[dict[str, Any]]

# Holds arguments that are not a JSON object, as clients do that send such a call back.
INVALID_JSON = "INVALID_JSON"
# Kind of a block -> type of its deltas, and the field of their text.
DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


class MessagesAnswer(BlockAnswer):
    """The answer to one request."""

    def __init__(self, front: Front, chat: SubmittedChat, *, model: str | None) -> None:
        super().__init__(front, chat, model=model)
        self._max_tokens = chat.prompt.sampling_params.max_new_tokens
        self._id = f"msg_{uuid.uuid4().hex}"

    def add(self, update: Update) -> Events:
        finish = update.finish_reason
        if finish is not None and finish.type == "abort":
            # This API has no stop reason for a message that something else ended.
            raise BadRequest(finish.message or "aborted", status=CLIENT_ABORT_STATUS)
        return super().add(update)

    def body(self) -> dict[str, Any]:
        return self._message(content=list(map(_content, self.blocks))) | self._stop()

    def failed(self, error: ApiError) -> bytes:
        return named_event(error_content(error.status, error.message, error.code))

    def _begin(self) -> Events:
        stop = {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": self._message(content=[]) | stop}]

    def _render(self, event: BlockEvent) -> Events:
        step, block, text = event
        if step is BlockStep.OPEN:
            shown = _opened(block)
            return [_block_event("start", block, content_block=shown)]
        if step is BlockStep.GROW:
            kind, name = DELTAS[block.kind]
            return [_block_event("delta", block, delta={"type": kind, name: text})]
        events = [_block_event("stop", block)]
        if block.kind is BlockKind.REASONING:
            delta = {"type": "signature_delta", "signature": _signature(block)}
            events.insert(0, _block_event("delta", block, delta=delta))
        return events

    def _end(self) -> Events:
        return [
            {"type": "message_delta", "delta": self._stop(), "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def _message(self, *, content: Events) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "usage": self._usage(),
        }

    def _stop(self) -> dict[str, Any]:
        finish = self.latest.finish_reason
        assert finish is not None
        reason, matched = "end_turn", None
        if finish.type == "length":
            is_asked = self.latest.completion_tokens >= self._max_tokens
            reason = "max_tokens" if is_asked else "model_context_window_exceeded"
        elif isinstance(finish.matched, str):
            reason, matched = "stop_sequence", finish.matched
        elif self.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": matched}

    def _usage(self) -> dict[str, Any]:
        counts = self.counts()
        return {
            "input_tokens": counts.prompt - counts.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached,
            "output_tokens": counts.output,
            "output_tokens_details": {"thinking_tokens": counts.reasoning},
        }


def _block_event(step: str, block: Block, **fields: Any) -> dict[str, Any]:
    return {"type": f"content_block_{step}", "index": block.index, **fields}


def _opened(block: Block) -> dict[str, Any]:
    """Return a block at its start."""
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": ""}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _content(block: Block) -> dict[str, Any]:
    """Return a complete block."""
    shown = _opened(block)
    if block.kind is BlockKind.TEXT:
        return shown | {"text": block.text}
    if block.kind is BlockKind.REASONING:
        return shown | {"thinking": block.text, "signature": _signature(block)}
    return shown | {"input": _input(block.text)}


def _signature(block: Block) -> str:
    """Return a checksum of the reasoning. It is never verified, but clients drop
    reasoning without a signature from what they send back.
    """
    return digest(block.text)


def _input(text: str) -> dict[str, Any]:
    """Return the arguments of a call; anything but a JSON object is kept as text."""
    if not text:
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}
