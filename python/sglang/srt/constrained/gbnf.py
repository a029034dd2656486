"""GBNF, the grammars of llama.cpp, as a tree.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
# A longer literal becomes a sequence of sequences.
_CHUNK = 32
_MAX_REPETITIONS = 1 << 20

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[\w-]+")
_COUNTS = re.compile(r"\{\s*(\d+)\s*(,)?\s*(\d+)?\s*\}")
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([^a-zA-Z0-9]|[nrtfv]))"
)
_TOKEN = re.compile(r"(!?)<(?:\[(\d+)\]|([^<>\s]+))>")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
REPEATS: dict[str, tuple[int, int | None]] = {
    "*": (0, None),
    "+": (1, None),
    "?": (0, 1),
}

Ranges = tuple[tuple[int, int], ...]


class Node:
    """A part of a rule, compared by identity."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Chars(Node):
    """One character in `ranges`, which are sorted and disjoint."""

    ranges: Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Sequence(Node):
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Choice(Node):
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat(Node):
    """`item` repeated at least `low` and at most `high` times, or without limit if
    None.
    """

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Reference(Node):
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class SpecialToken(Node):
    """A token of the vocabulary, in llguidance's notation."""

    text: str


def child_parts(node: Node) -> tuple[Node, ...]:
    """Return the child parts of a part."""
    match node:
        case Sequence():
            return node.items
        case Choice():
            return node.options
        case Repeat():
            return (node.item,)
    return ()


def parse_gbnf(text: str) -> dict[str, Node]:
    """Return the rules by name, including `root` and everything they refer to.

    Raises:
        ValueError: describes the error and its line.
    """
    reader = _Reader(text)
    rules: dict[str, Node] = {}
    while not reader.is_at_end():
        name, body = reader.rule()
        rules[name] = body
    for name, line in reader.references.items():
        if name not in rules:
            raise ValueError(f"line {line}: rule '{name}' not found")
    if "root" not in rules:
        raise ValueError("there is no rule 'root'")
    return rules


def normal_ranges(ranges: Iterable[tuple[int, int]], *, is_negated: bool) -> Ranges:
    """Return the characters in `ranges`, or all others, without surrogates."""
    taken = sorted(ranges)
    if is_negated:
        taken = list(_complement(taken))
    merged: list[tuple[int, int]] = []
    for low, high in _without(taken, *_SURROGATES):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def _complement(ranges: list[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    at = 0
    for low, high in ranges:
        if low > at:
            yield at, low - 1
        at = max(at, high + 1)
    if at <= MAX_CODE_POINT:
        yield at, MAX_CODE_POINT


def _without(
    ranges: list[tuple[int, int]], first: int, last: int
) -> Iterable[tuple[int, int]]:
    for low, high in ranges:
        for part in ((low, min(high, first - 1)), (max(low, last + 1), high)):
            if part[0] <= part[1]:
                yield part


class _Reader:
    """Reads rules one after another.

    Attributes:
        references: names of the rules used, each with its first line.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.references: dict[str, int] = {}
        self._skip(_SPACE_AND_LINES)

    def is_at_end(self) -> bool:
        return self._at == len(self._text)

    def rule(self) -> tuple[str, Node]:
        name = self._match(_NAME, "the name of a rule")[0]
        self._skip(_SPACE)
        if not self._text.startswith("::=", self._at):
            raise self._error("expected ::= after the name of a rule")
        self._at += 3
        self._skip(_SPACE_AND_LINES)
        body = self._choice(is_nested=False)
        if not self.is_at_end() and self._text[self._at] not in "\r\n":
            raise self._error("unexpected text after a rule")
        self._skip(_SPACE_AND_LINES)
        return name, body

    def _choice(self, *, is_nested: bool) -> Node:
        options = [self._sequence(is_nested=is_nested)]
        while self._next_option():
            options.append(self._sequence(is_nested=is_nested))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _next_option(self) -> bool:
        """Read `|`, which may begin the next line or end this one."""
        before = self._at
        self._skip(_SPACE_AND_LINES)
        if self._peek() == "|":
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            return True
        self._at = before
        return False

    def _sequence(self, *, is_nested: bool) -> Node:
        space = _SPACE_AND_LINES if is_nested else _SPACE
        items: list[Node] = []
        while (char := self._peek()) and char not in "|)\r\n":
            item = self._item(char)
            self._skip(space)
            while repeated := self._repeated(item):
                item = repeated
                self._skip(space)
            items.append(item)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self, char: str) -> Node:
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if char == "(":
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            inner = self._choice(is_nested=True)
            self._skip(_SPACE_AND_LINES)
            if self._peek() != ")":
                raise self._error("expected )")
            self._at += 1
            return inner
        if char == ".":
            self._at += 1
            return Chars(normal_ranges((), is_negated=True))
        if char in "<!":
            return self._token()
        name = self._match(_NAME, "a literal, a class, a group or a rule")[0]
        if name not in self.references:
            self.references[name] = self._line()
        return Reference(name)

    def _repeated(self, item: Node) -> Node | None:
        char = self._peek()
        if char in REPEATS and char:
            self._at += 1
            return Repeat(item, *REPEATS[char])
        if char != "{":
            return None
        counts = self._match(_COUNTS, "{m}, {m,} or {m,n}")
        low = int(counts[1])
        high = low if counts[2] is None else None
        high = high if counts[3] is None else int(counts[3])
        if max(low, high or 0) > _MAX_REPETITIONS or (high is not None and high < low):
            raise self._error(f"{counts[0]} cannot be repeated")
        return Repeat(item, low, high)

    def _literal(self) -> Node:
        self._at += 1
        chars: list[Node] = []
        while (char := self._peek()) != '"':
            if char in ("", "\n"):
                raise self._error("a literal that does not end")
            code = self._char()
            chars.append(Chars(((code, code),)))
        self._at += 1
        while len(chars) > _CHUNK:
            parts = range(0, len(chars), _CHUNK)
            chars = [Sequence(tuple(chars[i : i + _CHUNK])) for i in parts]
        return Sequence(tuple(chars))

    def _class(self) -> Node:
        self._at += 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        while (char := self._peek()) != "]":
            if char in ("", "\n"):
                raise self._error("a class that does not end")
            low = high = self._char()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._char()
            if high < low:
                raise self._error("a range whose end is before its start")
            ranges.append((low, high))
        self._at += 1
        found = normal_ranges(ranges, is_negated=is_negated)
        if not found:
            raise self._error("a class that no character is in")
        return Chars(found)

    def _char(self) -> int:
        """Read a character of a literal or a class."""
        if self._peek() != "\\":
            char = self._peek()
            if not char:
                raise self._error("unexpected end")
            self._at += 1
            return ord(char)
        found = self._match(_ESCAPE, r"an escape: \n \r \t \\ \" \[ \] \xHH \uHHHH \U")
        if found[4] is not None:
            return ord(_CONTROLS.get(found[4], found[4]))
        code = int(found[1] or found[2] or found[3], 16)
        if 0xD800 <= code < 0xDC00:
            # A surrogate pair, JSON's notation for a character beyond 16 bits.
            low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(
                self._text, self._at
            )
            if low is not None:
                self._at = low.end()
                return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if code > MAX_CODE_POINT or _SURROGATES[0] <= code <= _SURROGATES[1]:
            raise self._error(f"{found[0]} is no character")
        return code

    def _token(self) -> Node:
        negated, number, name = self._match(_TOKEN, "<token> or <[id]>").groups()
        if negated and number is None:
            raise self._error("write a token that must not come as !<[id]>")
        if number is None:
            return SpecialToken(f"<{name}>")
        return SpecialToken(f"<[{'^' if negated else ''}{number}]>")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found is not None else self._at

    def _match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._error(f"expected {what}")
        self._at = found.end()
        return found

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _error(self, message: str) -> ValueError:
        near = self._text[self._at : self._at + 20]
        return ValueError(f"line {self._line()}: {message} at {near!r}")
