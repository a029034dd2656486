"""Splits a chat output into reasoning, text and tool calls, incrementally.

Reasoning is separated before searching for calls. Knows nothing about API shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.function_call.core_types import CallDelta
from sglang.srt.function_call.function_call_parser import Call, collect_calls
from sglang.srt.parser.reasoning_detector import Reasoning

if TYPE_CHECKING:
    from sglang.srt.function_call.base_detector import CallFormat
    from sglang.srt.function_call.core_types import Tool
    from sglang.srt.parser.reasoning_detector import ReasoningDetector

# A plain string is text.
Piece = Reasoning | str | CallDelta


@dataclass(slots=True)
class ParsedOutput:
    """A complete output."""

    reasoning: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> ParsedOutput:
        whole, deltas = cls(), []
        for piece in pieces:
            if isinstance(piece, Reasoning):
                whole.reasoning += piece.text
            elif isinstance(piece, str):
                whole.text += piece
            else:
                deltas.append(piece)
        whole.calls = collect_calls(deltas)
        return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """Formats of the outputs of one request.

    Fields:
        reasoning, calls: formats, or None if there is nothing to find.
        is_open: whether the outputs begin inside the reasoning, or None for the
            format's default.
        tools: tools that may be called. max_calls: maximum number of calls; further
            calls are dropped.
        separate_reasoning: whether to return reasoning separately; otherwise it is
            text, including its marks, but is not searched for calls.
        stream_reasoning: whether to stream reasoning instead of returning it in one
            piece.
    """

    reasoning: type[ReasoningDetector] | None = None
    is_open: bool | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    calls: CallFormat | None = None
    tools: tuple[Tool, ...] = ()
    max_calls: int | None = None

    @property
    def marks(self) -> frozenset[str]:
        """Strings that must be kept in an output even if they are special tokens."""
        kinds = (self.reasoning, self.calls)
        return frozenset(mark for kind in kinds if kind for mark in kind.marks)


class OutputParser:
    """Parses one output."""

    def __init__(self, form: OutputFormat) -> None:
        self._is_separate = form.separate_reasoning
        self._is_streamed = form.stream_reasoning or not form.separate_reasoning
        self._held: list[str] = []
        self._reasoning = None
        if form.reasoning is not None:
            self._reasoning = form.reasoning(
                is_open=form.is_open, is_raw=not form.separate_reasoning
            )
        self._tools = None
        if form.calls is not None:
            self._tools = form.calls(form.tools, max_calls=form.max_calls)

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str) -> list[Piece]:
        """Parse the next piece of text; return what it adds to the output."""
        split = [text] if self._reasoning is None else self._reasoning.push(text)
        return self._tell(split)

    def finish(self) -> list[Piece]:
        """Return the rest of the output after the last text."""
        out: list[Piece] = []
        if self._reasoning is not None:
            out += self._tell(self._reasoning.finish())
        out += self._release()
        if self._tools is not None:
            out += self._tools.finish()
        return out

    def _tell(self, split: Sequence[str | Reasoning]) -> list[Piece]:
        out: list[Piece] = []
        for piece in split:
            if isinstance(piece, Reasoning):
                if not self._is_streamed:
                    self._held.append(piece.text)
                else:
                    out.append(piece if self._is_separate else piece.text)
                continue
            out += self._release()
            if self._tools is not None:
                out += self._tools.push(piece)
            elif piece:
                out.append(piece)
        return out

    def _release(self) -> list[Piece]:
        held, self._held = "".join(self._held), []
        return [Reasoning(held)] if held else []
