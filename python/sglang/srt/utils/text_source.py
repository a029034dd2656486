"""Text that arrives in pieces, for parsers that wait for more.

A parser is a generator that yields whenever it needs text that has not arrived yet. It
never learns where pieces begin and end, so its result cannot depend on that. Knows
nothing about formats.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Generic, TypeVar

from sglang.srt.utils.text_stops import Pattern, find_stops

T = TypeVar("T")
P = TypeVar("P")
Read = Generator[None, None, T]
Emit = Callable[[str], None]

# An attempt fails if it reads further than this without a decision.
MAX_ATTEMPT_CHARS = 4096
MAX_AHEAD_CHARS = 256
# Failed attempts may read as many characters as the preceding text has, plus this many;
# beyond that nothing is tried. So a text always takes time proportional to its length.
FREE_REREAD_CHARS = 1 << 16
# Cost of a failed attempt in addition to the characters it read.
ATTEMPT_COST_CHARS = 32

_NOT_SPACE = re.compile(r"\S")


def drop(text: str) -> None:
    """Discard text; an `Emit`."""


class NoMatchError(Exception):
    """The text does not match what the parser tried to read."""


class TextSource:
    """The text of one output, and how far it has been read.

    An attempt begins with `mark` and ends with `commit`, or with `rewind`, which makes
    its text unread again. All other text is dropped once read.
    """

    def __init__(self) -> None:
        self.is_ended = False
        self._text = ""
        self._at = 0
        # Where the attempt and the look-ahead began, and the end of what they may read.
        self._mark: int | None = None
        self._ahead: int | None = None
        self._stop: int | None = None
        self._forgotten = 0
        self._reread = 0

    def feed(self, text: str) -> None:
        """Append text."""
        begin = self._ahead if self._mark is None else self._mark
        kept = self._at if begin is None else begin
        if begin is None and kept == len(self._text):  # nearly always
            self._forgotten += kept
            self._text, self._at = text, 0
            return
        # A long attempt keeps its text; moving it for each piece would take quadratic
        # time.
        if kept and kept * 2 >= len(self._text):
            self._forget(kept)
        # With one reference left, Python appends in place.
        held, self._text = self._text, ""
        held += text
        self._text = held

    def _forget(self, count: int) -> None:
        self._text = self._text[count:]
        self._at -= count
        self._forgotten += count
        if self._mark is not None:
            self._mark -= count
        if self._ahead is not None:
            self._ahead -= count
        if self._stop is not None:
            self._stop -= count

    def end(self) -> None:
        """Declare that no more text will come."""
        self.is_ended = True

    def mark(self, limit: int | None = MAX_ATTEMPT_CHARS) -> None:
        """Begin an attempt that may read `limit` characters; only one at a time. None
        means no limit, for an attempt that a parser makes once per text.
        """
        self._mark = self._at
        self._stop = None
        if limit is not None:
            self.extend(limit)

    def extend(self, limit: int) -> None:
        """Let the attempt read `limit` characters from its mark."""
        self._stop = limit + (self._at if self._mark is None else self._mark)

    @property
    def may_try(self) -> bool:
        """Whether failed attempts have been cheap enough to begin another."""
        return self._reread < self._forgotten + self._at + FREE_REREAD_CHARS

    def commit(self) -> None:
        """End the attempt, keeping its text as read."""
        self._mark = self._stop = None

    def rewind(self) -> None:
        """End the attempt, if there is one, and make its text unread again."""
        if self._mark is not None:
            self._reread += self._at - self._mark + ATTEMPT_COST_CHARS
            self._at, self._mark = self._mark, None
        self._stop = None

    def look_ahead(self, reading: Read[T]) -> Read[T | None]:
        """Run `reading` over at most `MAX_AHEAD_CHARS`, then make its text unread
        again.

        Returns its result, or None if it found no match.
        """
        # Relative, because positions move while `reading` waits.
        rest = None if self._stop is None else self._stop - self._at
        self._ahead = self._at
        self._stop = self._at + MAX_AHEAD_CHARS
        try:
            return (yield from reading)
        except NoMatchError:
            return None
        finally:
            self._at, self._ahead = self._ahead or 0, None
            self._stop = None if rest is None else self._at + rest

    def peek(self, count: int = 1) -> Read[str]:
        """Return the next `count` characters without reading them; fewer at the end."""
        while len(self._text) - self._at < count and not self.is_ended:
            yield
        return self._text[self._at : self._at + count]

    def take(self, count: int = 1) -> Read[str]:
        """Read `count` characters; fewer at the end."""
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

    def skip_cut(self, literals: Sequence[str]) -> None:
        """Read the rest of a text that was cut off inside one of `literals`."""
        rest = self._text[self._at : self._at + max(map(len, literals), default=0)]
        if self.is_ended and any(literal.startswith(rest) for literal in literals):
            self._advance(self._at + len(rest))

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
        """Read and emit text up to a character that `pattern` matches.

        `pattern` matches single characters. Returns the character found without reading
        it, or an empty text at the end.
        """
        while True:
            end = self._readable()
            found = pattern.search(self._text, self._at, end)
            self._emit_to(end if found is None else found.start(), emit)
            if found is not None:
                return found[0]
            if self.is_ended:
                return ""
            yield

    def copy_until(self, literals: Sequence[str], emit: Emit) -> Read[str | None]:
        """Read and emit text as it comes, up to the first of `literals`.

        None of them may be a prefix of another. Reads and returns the one found, or
        returns None at the end.
        """
        found = yield from self.copy_to(literals, emit)
        if found is not None:
            self._advance(self._at + len(found))
        return found

    def copy_to(
        self, literals: Sequence[str], emit: Emit, *, pattern: Pattern | None = None
    ) -> Read[str | None]:
        """Read and emit text up to the first of `literals`, which is not read. Returns
        the literal, or None at the end.

        Args:
            pattern: finds the literals instead, if they count only before certain text.
        """
        stops = find_stops(tuple(literals))
        whole = stops.whole if pattern is None else pattern.whole
        while True:
            end = self._readable()
            found = whole.search(self._text, self._at, end)
            if found is not None:
                self._emit_to(found.start(), emit)
                return found[0]
            held = 0
            if not self.is_ended and end == len(self._text):
                held = stops.held_back(self._text, self._at)
                if pattern is not None:
                    held = max(held, pattern.held_back(self._text, self._at))
            self._emit_to(end - held, emit)
            if self.is_ended:
                return None
            yield

    def copy_through(self, step: Callable[[str, int, int, bool], int]) -> Read[bool]:
        """Read as far as `step` does, until it stops. Returns False if the text ended
        first.

        `step(text, begin, end, is_last)` reads from `begin` and returns where it
        stopped, or the complement of that position (a negative number) if it is done.
        """
        while True:
            end = len(self._text) if self._stop is None else self._readable()
            to = step(self._text, self._at, end, self.is_ended)
            self._advance(to if to >= 0 else ~to)
            if to < 0:
                return True
            if end < len(self._text):
                self._advance(end)
                raise NoMatchError
            if self.is_ended:
                return False
            yield

    def _readable(self) -> int:
        """Return the end of the readable text. It includes one character more than an
        attempt may read, which shows that the attempt failed.
        """
        end = len(self._text)
        return end if self._stop is None else min(end, self._stop + 1)

    def _emit_to(self, stop: int, emit: Emit) -> None:
        text = self._text[self._at : stop]
        self._advance(stop)
        if text:
            emit(text)

    def _advance(self, to: int) -> None:
        self._at = to
        if self._stop is not None and to > self._stop:
            raise NoMatchError


class TextParser(ABC, Generic[P]):
    """A parser that takes pieces of text and returns pieces of its result."""

    def __init__(self) -> None:
        self._source = TextSource()
        self._out: list[P] = []
        self._reading = self._run()

    def push(self, text: str) -> list[P]:
        """Parse `text`; return what it adds to the result."""
        self._source.feed(text)
        return self._resume()

    def finish(self) -> list[P]:
        """Return the rest of the result at the end of the text."""
        self._source.end()
        return self._resume()

    def _resume(self) -> list[P]:
        next(self._reading, None)
        out, self._out = self._out, []
        return out

    @abstractmethod
    def _run(self) -> Read[None]:
        """Read the source to its end; add to `_out`."""
