"""The output of a chat as blocks that open, grow and close one after another.

Shared by the APIs whose answers are lists of items or blocks, each with its own form.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import (
    answer_size,
    json_response,
    named_event,
    whole_results,
)
from sglang.srt.entrypoints.openai.chat_submit import SubmittedChat
from sglang.srt.function_call.core_types import CallDelta
from sglang.srt.managers.front.request_state import Update
from sglang.srt.managers.messages.errors import ApiError
from sglang.srt.parser.output_parser import OutputParser, Piece
from sglang.srt.parser.reasoning_detector import Reasoning


class BlockKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class BlockStep(Enum):
    OPEN = "open"
    GROW = "grow"
    CLOSE = "close"


@dataclass(slots=True, kw_only=True)
class Block:
    """A passage of an output.

    Fields:
        index: index among all blocks.
        block_id: a generated id. call_id, name: id and function name of a call.
        parts: its text, or the JSON text of a call's arguments, received so far.
    """

    index: int
    kind: BlockKind
    block_id: str
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockEvent(NamedTuple):
    """A change of one block; `text` is what is added to it."""

    step: BlockStep
    block: Block
    text: str = ""


class BlockMachine:
    """Puts the pieces of one output into blocks; at the end there is at least one.

    Attributes:
        blocks: all blocks so far; only the last may still be open.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def push(self, pieces: Iterable[Piece]) -> list[BlockEvent]:
        """Add the next `pieces`; return the changes."""
        events: list[BlockEvent] = []
        for piece in pieces:
            if isinstance(piece, str):
                self._grow(BlockKind.TEXT, piece, events)
            elif isinstance(piece, Reasoning):
                self._grow(BlockKind.REASONING, piece.text, events)
            else:
                if piece.name is not None:
                    self._begin(BlockKind.CALL, events, call=piece)
                self._grow(BlockKind.CALL, piece.arguments, events)
        return events

    def finish(self) -> list[BlockEvent]:
        """Close the open block, because no more pieces come."""
        events: list[BlockEvent] = []
        if not self.blocks:
            self._begin(BlockKind.TEXT, events)
        self._close(events)
        return events

    def _grow(self, kind: BlockKind, text: str, events: list[BlockEvent]) -> None:
        if not text:
            return
        block = self._open
        if block is None or block.kind is not kind:
            block = self._begin(kind, events)
        block.parts.append(text)
        events.append(BlockEvent(BlockStep.GROW, block, text))

    def _begin(
        self,
        kind: BlockKind,
        events: list[BlockEvent],
        *,
        call: CallDelta | None = None,
    ) -> Block:
        self._close(events)
        block = Block(
            index=len(self.blocks),
            kind=kind,
            block_id=uuid.uuid4().hex,
            call_id=call.call_id or "" if call else "",
            name=call.name or "" if call else "",
        )
        self.blocks.append(block)
        self._open = block
        events.append(BlockEvent(BlockStep.OPEN, block))
        return block

    def _close(self, events: list[BlockEvent]) -> None:
        if self._open is not None:
            events.append(BlockEvent(BlockStep.CLOSE, self._open))
        self._open = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Numbers of a chat's tokens so far.

    Fields:
        cached: cached prompt tokens; 0 without --enable-cache-report.
        reasoning: reasoning tokens of the output, counted at its end.
    """

    prompt: int
    cached: int
    output: int
    reasoning: int


class BlockAnswer(ABC):
    """The answer to a chat with one output: the events of a stream, and one body.

    Both are made from the same blocks, so they cannot differ.

    Args:
        chat: the submitted chat, with the format of its output.
    """

    def __init__(self, front: Front, chat: SubmittedChat, *, model: str | None) -> None:
        self.model = model or front.model_name
        self._reports_cached = front.server_args.enable_cache_report
        self._tokenizer = chat.tokenizer
        self._parser = OutputParser(chat.form)
        self._machine = BlockMachine()
        self._latest: Update | None = None
        self._num_reasoning = 0

    # -- what an API adds ----------------------------------------------------------

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the answer so far."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Return the last event of a stream that ends with an error."""

    @abstractmethod
    def _begin(self) -> list[dict[str, Any]]:
        """Return the events before the first block."""

    @abstractmethod
    def _render(self, event: BlockEvent) -> list[dict[str, Any]]:
        """Return the events that show a change of a block."""

    @abstractmethod
    def _end(self) -> list[dict[str, Any]]:
        """Return the events after the last block."""

    # -- what they share -----------------------------------------------------------

    @property
    def latest(self) -> Update:
        assert self._latest is not None
        return self._latest

    @property
    def blocks(self) -> list[Block]:
        return self._machine.blocks

    @property
    def has_calls(self) -> bool:
        return any(block.kind is BlockKind.CALL for block in self.blocks)

    def add(self, update: Update) -> list[dict[str, Any]]:
        """Add an update; return the resulting events."""
        is_first, self._latest = self._latest is None, update
        events = self._begin() if is_first else []
        changes = self._machine.push(self._parser.push(update.text))
        if update.finish_reason is not None:
            changes += self._machine.push(self._parser.finish())
            changes += self._machine.finish()
            self._num_reasoning = self._reasoning_tokens()
        for change in changes:
            events += self._render(change)
        if update.finish_reason is not None:
            events += self._end()
        return events

    def counts(self) -> TokenCounts:
        update = self.latest
        return TokenCounts(
            prompt=update.prompt_tokens,
            cached=update.cached_tokens if self._reports_cached else 0,
            output=update.completion_tokens,
            reasoning=min(self._num_reasoning, update.completion_tokens),
        )

    def _reasoning_tokens(self) -> int:
        """Count the tokens of the reasoning text: an output does not tell where it
        ended.
        """
        texts = (b.text for b in self.blocks if b.kind is BlockKind.REASONING)
        return sum(
            len(self._tokenizer.encode(text, add_special_tokens=False, in_thread=True))
            for text in texts
        )


async def answer_blocks(
    front: Front, request: Request, chat: SubmittedChat, answer: BlockAnswer
) -> Response:
    """Answer a chat with a stream of named events, or with one body."""
    if chat.prompt.stream:
        events = _events(front, chat, answer)
        return front.stream(events, chat.group, show_error=answer.failed, end=b"")
    with chat.names.in_errors():
        updates = await whole_results(request, front.manager, chat.group)

    def whole() -> Response:
        for update in updates:
            answer.add(update)
        return json_response(answer.body())

    return await front.manager.side_work.run(answer_size(updates), whole)


async def _events(
    front: Front, chat: SubmittedChat, answer: BlockAnswer
) -> AsyncIterator[bytes]:
    with chat.names.in_errors():
        async for news in front.manager.updates(chat.group):
            for update in news:
                # The last events repeat the whole output.
                is_last = update.finish_reason is not None
                size = update.completion_tokens if is_last else 0
                events = await front.manager.side_work.run(
                    size, partial(answer.add, update)
                )
                for shown in events:
                    yield named_event(shown)
