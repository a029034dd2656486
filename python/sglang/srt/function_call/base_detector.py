"""The part that all formats of tool calls share: calls between passages of text.

A format's detector looks for an opener, then tries to read calls after it. An attempt
that fails before its first call has begun leaves the opener in the text; one that fails
later leaves the calls it has read, and the rest is text.
"""

from __future__ import annotations

import logging
import re
import uuid
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from sglang.srt.function_call.core_types import CallDelta
from sglang.srt.utils.text_source import NoMatchError, Read, TextParser

if TYPE_CHECKING:
    from sglang.srt.function_call.core_types import Tool

logger = logging.getLogger(__name__)

MAX_SHOWN_NAME = 64


class ToolCallDetector(TextParser[str | CallDelta]):
    """Finds the calls in one output; text that holds none comes out unchanged.

    White space next to a call belongs to the format and is dropped, but for what parts
    two passages of text.

    Class attributes:
        openers: strings that begin calls; none may begin another.
        bare_opener: a character that begins calls only where the output begins with it.
        marks: all strings of the format that may be special tokens of a tokenizer.

    Args:
        tools: those that may be called; a call to another name is text.
        max_calls: further calls are dropped.
    """

    openers: ClassVar[tuple[str, ...]] = ()
    bare_opener: ClassVar[str] = ""
    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Sequence[Tool], *, max_calls: int | None = None) -> None:
        super().__init__()
        self.num_calls = 0
        self._tools = {tool.name: tool for tool in tools}
        self._max_calls = max_calls
        self._space = ""
        self._has_text = False
        self._has_warned = False

    @abstractmethod
    def _read_calls(self, opener: str) -> Read[None]:
        """Read the calls after `opener`, which has been read unless it is the bare one.

        Whatever may turn out to be no call begins with a mark of the source; the first
        has it already.

        Raises:
            NoMatchError: no call, or no further one, comes next.
        """

    def _call_id(self, index: int) -> str:
        """Make the id of a call."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def _run(self) -> Read[None]:
        if self.bare_opener:
            yield from self._read_bare()
        while True:
            opener = yield from self._source.copy_until(self.openers, self._say)
            if opener is None:
                break
            if not (yield from self._attempt(opener)):
                self._say(opener)
        if not self.num_calls:
            self._emit_text(self._space)

    def _read_bare(self) -> Read[None]:
        space = yield from self._source.skip_space()
        begins = (yield from self._source.peek()) == self.bare_opener
        if not (begins and (yield from self._attempt(self.bare_opener))):
            self._say(space)

    def _attempt(self, opener: str) -> Read[bool]:
        """Read calls; False where none began: nothing after the opener was read."""
        before = self.num_calls
        self._source.mark()
        try:
            yield from self._read_calls(opener)
            self._source.commit()
        except NoMatchError:
            self._source.rewind()
        return self.num_calls > before

    def _known(self, name: str) -> str:
        """Return the name of a tool.

        Raises:
            NoMatchError: the request has no tool of this name.
        """
        if name in self._tools:
            return name
        if not self._has_warned:
            logger.warning(
                "the model called %r, which is no tool of the request; it stays text",
                name[:MAX_SHOWN_NAME],
            )
        self._has_warned = True
        raise NoMatchError

    def _begin_call(self, name: str) -> None:
        """Emit the first piece of a call: what was read is no text."""
        self._source.commit()
        self.num_calls += 1
        index = self.num_calls - 1
        self._emit_call(CallDelta(index=index, name=name, call_id=self._call_id(index)))

    def _add_arguments(self, text: str) -> None:
        """Emit a fragment of the arguments of the latest call."""
        self._emit_call(CallDelta(index=self.num_calls - 1, arguments=text))

    def _emit_call(self, delta: CallDelta) -> None:
        if self._max_calls is None or delta.index < self._max_calls:
            self._out.append(delta)

    def _say(self, text: str) -> None:
        """Emit text; white space at its end waits for what follows."""
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body and self.num_calls and not self._has_text:
            body = body.lstrip()
        self._emit_text(body)

    def _emit_text(self, text: str) -> None:
        if not text:
            return
        self._has_text = True
        self._out.append(text)

    def _read_header(self, end: str, pattern: re.Pattern[str]) -> Read[str]:
        """Read a call's header, `end` included; return the tool that it names.

        Args:
            pattern: finds the name, its first group, in the header without `end`.

        Raises:
            NoMatchError: no such header comes next, or no such tool exists.
        """
        header: list[str] = []
        ended = yield from self._source.copy_until((end,), header.append)
        found = pattern.search("".join(header))
        if ended is None or found is None:
            raise NoMatchError
        return self._known(found[1])

    def _read_list(self, read_call: Callable[[], Read[None]]) -> Read[None]:
        """Read the entries of a list, up to the first that is no call, and `]`.

        Raises:
            NoMatchError: no call comes next, or the list does not end.
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
            yield from read_call()
        yield from source.expect("]")
        source.commit()

    def _skip_any(self, *literals: str) -> Read[None]:
        """Read each of `literals` that comes next, in this order, and white space."""
        for literal in literals:
            yield from self._source.skip_space()
            yield from self._source.accept(literal)
