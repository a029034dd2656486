"""The answer of `/v1/responses`: output items, and the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

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
from sglang.srt.entrypoints.openai.logprobs import encoded_tokens, json_list
from sglang.srt.entrypoints.openai.responses_items import (
    call_item,
    item_id,
    message_item,
    reasoning_item,
    reasoning_part,
    repeated_fields,
    shown_error,
    text_part,
)
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesRequest
from sglang.srt.managers.front.request_state import Update
from sglang.srt.managers.messages.errors import ApiError

Events = list[dict[str, Any]]

# Type of the finish -> status of the response.
STATUSES = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}
# Status -> type of the last event.
LAST_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
}


class ResponsesAnswer(BlockAnswer):
    """The answer to one request."""

    def __init__(
        self,
        front: Front,
        chat: SubmittedChat,
        asked: ResponsesRequest,
        *,
        metadata: dict[str, str],
    ) -> None:
        super().__init__(front, chat, model=asked.model)
        self._repeated = repeated_fields(asked, chat) | {"metadata": metadata}
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._error: ApiError | None = None
        # Encoded log probabilities of the text: all, and the ones not shown yet.
        self._logprobs: list[bytes] = []
        self._fresh_logprobs: list[bytes] = []

    def add(self, update: Update) -> Events:
        if update.logprobs is not None:
            fresh = encoded_tokens(self._tokenizer, update.logprobs)
            self._logprobs += fresh
            self._fresh_logprobs += fresh
        return super().add(update)

    def body(self) -> dict[str, Any]:
        return self._response(self._status())

    def _response(self, status: str) -> dict[str, Any]:
        shown = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": list(self._items),
            "usage": None,
        }
        if self._error is not None:
            shown["error"] = shown_error(self._error)
        elif status == "incomplete":
            shown["incomplete_details"] = {"reason": "max_output_tokens"}
        if status not in ("in_progress", "failed"):
            shown["usage"] = self._usage()
        return shown | self._repeated

    def failed(self, error: ApiError) -> bytes:
        self._error = error
        return named_event(self._about("response.failed", "failed"))

    def _begin(self) -> Events:
        return [
            self._about(f"response.{step}", "in_progress")
            for step in ("created", "in_progress")
        ]

    def _render(self, event: BlockEvent) -> Events:
        return _RENDERERS[event.block.kind](self, event)

    def _end(self) -> Events:
        status = self._status()
        return [self._about(LAST_EVENTS[status], status)]

    def _status(self) -> str:
        finish = self.latest.finish_reason
        return "in_progress" if finish is None else STATUSES[finish.type]

    def _usage(self) -> dict[str, Any]:
        counts = self.counts()
        return {
            "input_tokens": counts.prompt,
            "input_tokens_details": {
                "cached_tokens": counts.cached,
                "cache_write_tokens": 0,
            },
            "output_tokens": counts.output,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning},
            "total_tokens": counts.prompt + counts.output,
        }

    # -- events --------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._sequence = self._sequence, self._sequence + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _about(self, kind: str, status: str) -> dict[str, Any]:
        """Return an event with the whole response."""
        return self._event(kind, response=self._response(status))

    def _of_item(self, kind: str, block: Block, **fields: Any) -> dict[str, Any]:
        """Return an event about an item."""
        return self._event(
            kind, item_id=item_id(block), output_index=block.index, **fields
        )

    def _item_event(self, kind: str, block: Block, item: dict[str, Any]) -> Events:
        return [self._event(kind, output_index=block.index, item=item)]

    def _added(self, block: Block, item: dict[str, Any]) -> Events:
        return self._item_event(
            "response.output_item.added", block, item | {"status": "in_progress"}
        )

    def _done(self, block: Block, item: dict[str, Any]) -> Events:
        finish = self.latest.finish_reason
        is_cut = finish is not None and finish.type != "stop"
        is_last = block is self.blocks[-1]
        item["status"] = "incomplete" if is_cut and is_last else "completed"
        self._items.append(item)
        return self._item_event("response.output_item.done", block, item)

    def _text_events(self, event: BlockEvent) -> Events:
        block = event.block
        if event.step is BlockStep.OPEN:
            return [
                *self._added(block, message_item(block, [])),
                self._part_event("added", block, text_part("", [])),
            ]
        if event.step is BlockStep.GROW:
            return [self._text_delta(block, event.text)]
        # The end of the output may have no text of its own.
        rest = [self._text_delta(block, "")] if self._fresh_logprobs else []
        logprobs = json_list(self._logprobs)
        part = text_part(block.text, logprobs)
        done = self._of_item(
            "response.output_text.done",
            block,
            content_index=0,
            text=block.text,
            logprobs=logprobs,
        )
        return [
            *rest,
            done,
            self._part_event("done", block, part),
            *self._done(block, message_item(block, [part])),
        ]

    def _text_delta(self, block: Block, text: str) -> dict[str, Any]:
        logprobs, self._fresh_logprobs = self._fresh_logprobs, []
        return self._of_item(
            "response.output_text.delta",
            block,
            content_index=0,
            delta=text,
            logprobs=json_list(logprobs),
        )

    def _reasoning_events(self, event: BlockEvent) -> Events:
        block = event.block
        if event.step is BlockStep.OPEN:
            return [
                *self._added(block, reasoning_item(block, [])),
                self._part_event("added", block, reasoning_part("")),
            ]
        if event.step is BlockStep.GROW:
            return [
                self._of_item(
                    "response.reasoning_text.delta",
                    block,
                    content_index=0,
                    delta=event.text,
                )
            ]
        part = reasoning_part(block.text)
        return [
            self._of_item(
                "response.reasoning_text.done", block, content_index=0, text=block.text
            ),
            self._part_event("done", block, part),
            *self._done(block, reasoning_item(block, [part])),
        ]

    def _call_events(self, event: BlockEvent) -> Events:
        block = event.block
        if event.step is BlockStep.OPEN:
            return self._added(block, call_item(block, ""))
        if event.step is BlockStep.GROW:
            return [
                self._of_item(
                    "response.function_call_arguments.delta", block, delta=event.text
                )
            ]
        return [
            self._of_item(
                "response.function_call_arguments.done",
                block,
                name=block.name,
                arguments=block.text,
            ),
            *self._done(block, call_item(block, block.text)),
        ]

    def _part_event(
        self, step: str, block: Block, part: dict[str, Any]
    ) -> dict[str, Any]:
        return self._of_item(
            f"response.content_part.{step}", block, content_index=0, part=part
        )


_RENDERERS: dict[BlockKind, Callable[[ResponsesAnswer, BlockEvent], Events]] = {
    BlockKind.TEXT: ResponsesAnswer._text_events,
    BlockKind.REASONING: ResponsesAnswer._reasoning_events,
    BlockKind.CALL: ResponsesAnswer._call_events,
}
