"""Text that arrives in pieces, for parsers that wait for more of it.

A parser is a generator that yields wherever it needs text that has not arrived yet. It
never learns where one piece ends and the next begins, so that its result cannot depend
on that. Knows nothing of formats.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
P = TypeVar("P")
Read = Generator[None, None, T]
Emit = Callable[[str], None]

# An attempt that reads further than this without a decision has failed.
MAX_ATTEMPT_CHARS = 4096

_NOT_SPACE = re.compile(r"\S")
_NOTHING = re.compile(r"(?!)")


class NoMatchError(Exception):
    """The text is not what the parser tried to read."""


class TextSource:
    """The text of one output, and how far it has been read.

    An attempt begins with `mark` and ends with `commit`, or with `rewind`, which makes
    its text unread. Of all others, text that was read is forgotten.
    """

    def __init__(self) -> None:
        self.is_ended = False
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._limit = MAX_ATTEMPT_CHARS

    def feed(self, text: str) -> None:
        """Append text."""
        kept = self._at if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._at -= kept
        if self._mark is not None:
            self._mark = 0

    def end(self) -> None:
        """Declare that no more text comes."""
        self.is_ended = True

    def mark(self) -> None:
        """Begin an attempt here; there is one at a time."""
        self._mark = self._at
        self._limit = MAX_ATTEMPT_CHARS

    def extend(self, limit: int) -> None:
        """Let the attempt read `limit` characters from its mark on."""
        self._limit = limit

    def commit(self) -> None:
        """End the attempt; what was read stays read."""
        self._mark = None

    def rewind(self) -> None:
        """End the attempt, if there is one, and make its text unread."""
        if self._mark is not None:
            self._at, self._mark = self._mark, None

    def peek(self, count: int = 1) -> Read[str]:
        """Return the next `count` characters, fewer at the end, without reading."""
        while len(self._text) - self._at < count and not self.is_ended:
            yield
        return self._text[self._at : self._at + count]

    def take(self, count: int = 1) -> Read[str]:
        """Read `count` characters, fewer at the end."""
        text = yield from self.peek(count)
        self._advance(self._at + len(text))
        return text

    def accept(self, literal: str) -> Read[bool]:
        """Read `literal` if it comes next."""
        while True:
            begun = self._text[self._at : self._at + len(literal)]
            if begun == literal:
                self._advance(self._at + len(literal))
                return True
            if self.is_ended or not literal.startswith(begun):
                return False
            yield

    def expect(self, literal: str) -> Read[None]:
        """Read `literal`.

        Raises:
            NoMatchError: something else comes next.
        """
        if not (yield from self.accept(literal)):
            raise NoMatchError

    def skip_space(self) -> Read[str]:
        """Read white space and return it."""
        space: list[str] = []
        yield from self.copy_before(_NOT_SPACE, space.append)
        return "".join(space)

    def copy_before(self, pattern: re.Pattern[str], emit: Emit) -> Read[str]:
        """Read and emit text as it comes, up to a character that `pattern` matches.

        `pattern` matches single characters. Returns the one found, which is not read;
        empty at the end.
        """
        while True:
            found = pattern.search(self._text, self._at)
            stop = len(self._text) if found is None else found.start()
            self._emit_to(stop, emit)
            if found is not None:
                return found[0]
            if self.is_ended:
                return ""
            yield

    def copy_until(self, literals: Sequence[str], emit: Emit) -> Read[str | None]:
        """Read and emit text as it comes, up to the first of `literals`.

        None of them may begin another. Reads and returns the one found; None at the
        end.
        """
        pattern = re.compile("|".join(map(re.escape, literals))) if literals else None
        while True:
            found = (pattern or _NOTHING).search(self._text, self._at)
            if found is not None:
                self._emit_to(found.start(), emit)
                self._advance(found.end())
                return found[0]
            rest = self._text[self._at :]
            held = 0 if self.is_ended else held_back(rest, literals)
            self._emit_to(len(self._text) - held, emit)
            if self.is_ended:
                return None
            yield

    def _emit_to(self, stop: int, emit: Emit) -> None:
        text = self._text[self._at : stop]
        self._advance(stop)
        if text:
            emit(text)

    def _advance(self, to: int) -> None:
        self._at = to
        if self._mark is not None and to - self._mark > self._limit:
            raise NoMatchError


class TextParser(ABC, Generic[P]):
    """A parser that is fed pieces of text and hands out pieces of its result."""

    def __init__(self) -> None:
        self._source = TextSource()
        self._out: list[P] = []
        self._reading = self._run()

    def push(self, text: str) -> list[P]:
        """Return what `text` adds to the result."""
        self._source.feed(text)
        return self._resume()

    def finish(self) -> list[P]:
        """Return the rest of the result: the text has ended."""
        self._source.end()
        return self._resume()

    def _resume(self) -> list[P]:
        next(self._reading, None)
        out, self._out = self._out, []
        return out

    @abstractmethod
    def _run(self) -> Read[None]:
        """Read the source to its end; add to `_out`."""


def held_back(text: str, literals: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins one of `literals`."""
    longest = 0
    for literal in literals:
        for length in range(min(len(literal) - 1, len(text)), longest, -1):
            if text.endswith(literal[:length]):
                longest = length
                break
    return longest
