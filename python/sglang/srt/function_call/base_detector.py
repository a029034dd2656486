"""Shared by all formats of tool calls: calls between passages of text.

A format's detector looks for an opener, then tries to read calls after it. If that
fails before the first call has begun, the opener stays in the text; if it fails later,
the calls read so far stand, and the rest is text.
"""

from __future__ import annotations

import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from sglang.srt.function_call.core_types import CallDelta
from sglang.srt.utils.text_source import NoMatchError, Read, TextParser

if TYPE_CHECKING:
    from sglang.srt.function_call.core_types import Tool
    from sglang.srt.utils.text_stops import Pattern

logger = logging.getLogger(__name__)

MAX_SHOWN_NAME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat(ABC):
    """A format of tool calls, described by data. Calling it creates a detector.

    Fields:
        openers: strings that begin calls; none may be a prefix of another.
        bare_openers: characters that begin calls only at the start of the output.
        closers: strings that may follow a call, in this order.
        opener_pattern: pattern that finds the openers instead, by the text after them.
        other_marks: further strings that may be special tokens of a tokenizer.
        is_whole: whether an output consists of calls only. Anything else is a leftover
            of a list that the server itself asked for, which a client would mistake for
            an answer.
    """

    openers: tuple[str, ...] = ()
    bare_openers: str = ""
    opener_pattern: Pattern | None = None
    closers: tuple[str, ...] = ()
    other_marks: tuple[str, ...] = ()
    is_whole: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Strings that must be kept in an output even if they are special tokens."""
        return (*self.openers, *self.closers, *self.other_marks)

    @abstractmethod
    def __call__(
        self, tools: Sequence[Tool], *, max_calls: int | None = None
    ) -> ToolCallDetector:
        """Return a detector for one output; see `ToolCallDetector`."""


class ToolCallDetector(TextParser[str | CallDelta]):
    """Finds the calls in one output; text without calls is passed through unchanged.

    White space next to a call belongs to the format and is dropped, unless it separates
    two passages of text.

    Args:
        form: the format, which says where calls begin and end.
        tools: tools that may be called; a call to another name is text.
        max_calls: maximum number of calls; further calls are dropped.
    """

    def __init__(
        self, form: CallFormat, tools: Sequence[Tool], *, max_calls: int | None = None
    ) -> None:
        super().__init__()
        self.num_calls = 0
        self._form = form
        self._tools = {tool.name: tool for tool in tools}
        self._max_calls = max_calls
        self._space: list[str] = []
        self._has_text = False
        self._has_warned = False

    @abstractmethod
    def _read_calls(self, opener: str) -> Read[None]:
        """Read the calls after `opener`, which has already been read unless it is bare.

        Anything that may turn out not to be a call must begin with a mark of the
        source; the first call already has one.

        Raises:
            NoMatchError: no (further) call comes next.
        """

    def _call_id(self) -> str:
        """Generate the id of a call."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def _resume(self) -> list[str | CallDelta]:
        out = super()._resume()
        return out if len(out) < 2 else _merged(out)

    def _run(self) -> Read[None]:
        if self._form.bare_openers:
            yield from self._read_bare()
        while True:
            opener = yield from self._source.copy_to(
                self._form.openers, self._say, pattern=self._form.opener_pattern
            )
            if opener is None:
                break
            yield from self._source.accept(opener)
            if not (self._source.may_try and (yield from self._attempt(opener))):
                self._say(opener)
        if not self.num_calls:
            self._emit_text("".join(self._space))

    def _read_bare(self) -> Read[None]:
        space = yield from self._source.skip_space()
        first = yield from self._source.peek()
        begins = bool(first) and first in self._form.bare_openers
        if not (begins and (yield from self._attempt(first))):
            self._say(space)

    def _attempt(self, opener: str) -> Read[bool]:
        """Read calls. Returns False if none began; nothing after the opener is consumed
        then.
        """
        before = self.num_calls
        self._source.mark()
        try:
            yield from self._read_calls(opener)
            self._source.commit()
        except NoMatchError:
            self._source.rewind()
        return self.num_calls > before

    def _known(self, name: str) -> str:
        """Check the name of a tool and return it.

        Raises:
            NoMatchError: the request has no tool of this name.
        """
        if name in self._tools:
            return name
        if not self._has_warned:
            logger.warning(
                "the model called %r, which is not a tool of the request; it stays "
                "text",
                name[:MAX_SHOWN_NAME],
            )
        self._has_warned = True
        raise NoMatchError

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        """Emit the first piece of a call; the input read so far is not text."""
        self._source.commit()
        self.num_calls += 1
        index = self.num_calls - 1
        call_id = call_id or self._call_id()
        self._emit_call(CallDelta(index=index, name=name, call_id=call_id))

    def _add_arguments(self, text: str) -> None:
        """Emit a fragment of the arguments of the latest call."""
        self._emit_call(CallDelta(index=self.num_calls - 1, arguments=text))

    def _emit_call(self, delta: CallDelta) -> None:
        if self._max_calls is None or delta.index < self._max_calls:
            self._out.append(delta)

    def _say(self, text: str) -> None:
        """Emit text, holding back white space at its end until more follows."""
        body = text.rstrip()
        if body:
            if self.num_calls and not self._has_text:
                body = body.lstrip()
            else:
                self._emit_text("".join(self._space))
            self._space.clear()
            self._emit_text(body)
        if tail := text[len(text.rstrip()) :]:
            self._space.append(tail)

    def _emit_text(self, text: str) -> None:
        if not text or self._form.is_whole:
            return
        self._has_text = True
        self._out.append(text)

    def _read_list(self, read_call: Callable[[], Read[None]]) -> Read[None]:
        """Read the entries of a list up to the first that is not a call, and an
        optional `]`.

        Raises:
            NoMatchError: no (further) call comes next.
        """
        source = self._source
        yield from source.skip_space()
        yield from read_call()
        while True:
            source.mark()
            yield from source.skip_space()
            if not (yield from source.accept(",")):
                break
            yield from source.skip_space()
            if (yield from source.peek()) == "]":
                break
            yield from read_call()
        if (yield from source.accept("]")):
            source.commit()
        else:
            source.rewind()

    def _skip_any(self, *literals: str) -> Read[None]:
        """Skip the `literals` that come next, in this order, and white space. The last
        one may be cut off.
        """
        for literal in literals:
            yield from self._source.skip_space()
            yield from self._source.accept(literal)
        self._source.skip_cut(literals)


def _merged(pieces: list[str | CallDelta]) -> list[str | CallDelta]:
    """Join consecutive pieces of text, and of the arguments of one call."""
    out: list[str | CallDelta] = []
    for _, run in groupby(pieces, _merge_key):
        first, *others = run
        if not others:
            out.append(first)
        elif isinstance(first, str):
            texts = [piece for piece in others if isinstance(piece, str)]
            out.append(first + "".join(texts))
        else:
            deltas = [piece for piece in others if isinstance(piece, CallDelta)]
            rest = "".join(delta.arguments for delta in deltas)
            out.append(CallDelta(index=first.index, arguments=first.arguments + rest))
    return out


def _merge_key(piece: str | CallDelta) -> object:
    """Return a key that is equal for pieces that can be joined."""
    if isinstance(piece, str):
        return ""
    return piece.index if piece.name is None else piece
