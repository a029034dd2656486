r"""Converts what models write as JSON to JSON, incrementally.

Valid JSON is passed through unchanged. This also reads Python literals (`'a'`,
`True`, `(1, 2)`, `0x1F`), bare keys, line breaks and unknown escapes in strings,
commas before a bracket, and brackets of the wrong kind. Anything else is passed through
unchanged, or rejected if the reader is strict.
"""

from __future__ import annotations

import json
import re
from typing import Any

from sglang.srt.function_call.json_values import read_number
from sglang.srt.utils.text_source import Emit, NoMatchError

MAX_WORD_CHARS = 256
WORDS = {
    **{word: word for word in ("true", "false", "null")},
    **{"True": "true", "False": "false", "None": "null"},
}

_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_AS_JSON = {"}": "}", "]": "]", ")": "]"}
_TOKEN = re.compile(
    rf"(?P<space>\s+)|(?P<mark>[{{}}\[\](),:=\"'])"
    rf"|(?P<word>[^\s{{}}\[\](),:=\"'<`]{{1,{MAX_WORD_CHARS}}})|(?P<other>.)",
    re.DOTALL,
)
_KEY = re.compile(r"[A-Za-z_][\w.-]*")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")


def _unchanged(quote: str, escape: str) -> re.Pattern[str]:
    """Match text of a string that is the same in JSON. The bound limits the match's
    memory.
    """
    plain = rf'[^{quote}"\\\x00-\x1f]*'
    return re.compile(rf"{plain}(?:{escape}{plain}){{0,1000}}")


_JSON_ESCAPE = r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'
# By the first character of the quote; `<` begins a quote without escapes.
_RUNS = {
    '"': _unchanged('"', _JSON_ESCAPE),
    "'": _unchanged("'", _JSON_ESCAPE),
    "<": _unchanged("<", "(?!)"),
}
_RAW_RUNS = {quote: _unchanged(quote, "(?!)") for quote in "\"'"}
_ESCAPE = re.compile(
    r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|U[0-9a-fA-F]{8}|.)", re.DOTALL
)
_LONGEST_ESCAPE = 10
_JSON_ESCAPES = frozenset('"\\/bfnrt')
_PYTHON_ESCAPES = {"'": "'", "0": "\\u0000", "a": "\\u0007", "v": "\\u000b"}


class RelaxedCopier:
    """Copies one object or list, as a step of `TextSource.copy_through`.

    Args:
        emit: called with pieces of the JSON text.
        closer: text that ends the value outside strings, even if brackets are open.
        is_strict: whether to reject anything outside strings that is not a value.
        is_call: whether the text is the arguments of a Python call, `(a=1)`.
        quote: mark that begins and ends strings without escapes.
    """

    def __init__(
        self,
        emit: Emit,
        *,
        closer: str = "",
        is_strict: bool = False,
        is_call: bool = False,
        quote: str = "",
    ) -> None:
        self._emit = emit
        self._is_strict = is_strict
        self._is_call = is_call
        self._marks = tuple(mark for mark in (closer, quote) if mark)
        self._own_quote = quote
        self._parts: list[str] = []
        # A comma, or the end of a string, and space, held back until more follows.
        self._held: list[str] = []
        # The expected closing brackets, last one first, and the number of each.
        self._open: list[str] = []
        self._due = dict.fromkeys(_CLOSERS.values(), 0)
        self._is_key_next = False
        self._quote = ""
        self._run = _RUNS['"']
        self._is_raw = False
        self.is_done = False

    def step(self, text: str, at: int, end: int, is_last: bool) -> int:
        """Copy `text[at:end]`; see `TextSource.copy_through`.

        Raises:
            NoMatchError: it is not a value, and the copier is strict.
        """
        if self._quote:  # most pieces of a stream are inside a string
            found = self._run.match(text, at, end)
            if found is not None and found.end() == end > at:
                self._emit(found[0])
                return end
        while at < end and not self.is_done:
            read = self._read_string if self._quote else self._read_token
            to = read(text, at, end, is_last)
            if to == at:
                break
            at = to
        if is_last and not self.is_done:
            self._flush()
        if self._parts:
            self._emit("".join(self._parts))
            self._parts.clear()
        return ~at if self.is_done else at

    def _read_token(self, text: str, at: int, end: int, is_last: bool) -> int:
        """Read one token; return its end, or `at` if the end has not arrived."""
        for mark in self._marks:
            if text.startswith(mark, at, end):
                return self._read_mark(mark, at)
            if not is_last and mark.startswith(text[at : min(end, at + len(mark))]):
                return at
        found = _TOKEN.match(text, at, end)
        if found is None:
            return at
        token, to = found[0], found.end()
        if found.lastgroup == "space":
            (self._held if self._held else self._parts).append(token)
        elif found.lastgroup == "word":
            if to == end and not is_last and len(token) < MAX_WORD_CHARS:
                return at
            self._read_word(token, text[to : to + 1] if to < end else "")
        elif token in ('"', "'"):
            return self._open_string(token, text, at, end, is_last)
        elif token in _CLOSERS:
            self._open_bracket(token)
        elif token in _AS_JSON:
            self._close_bracket(token)
        elif token == ",":
            self._hold_comma()
        elif token == ":" or (token == "=" and self._open == [")"]):
            self._is_key_next = False
            self._put(":")
        else:
            self._put_other(token)
        return to

    def _read_mark(self, mark: str, at: int) -> int:
        if mark != self._own_quote:
            if self._is_strict:
                raise NoMatchError
            self._close_all()
            return at
        self._begin_string(mark)
        return at + len(mark)

    def _put(self, text: str) -> None:
        self._flush()
        self._parts.append(text)

    def _put_other(self, text: str) -> None:
        if self._is_strict:
            raise NoMatchError
        self._put(text)

    def _flush(self) -> None:
        if self._held:
            self._parts += self._held
            self._held.clear()

    def _hold_comma(self) -> None:
        if self._held[:1] != [","]:
            self._flush()
            self._held.append(",")
        self._is_key_next = self._is_in_object()

    def _is_in_object(self) -> bool:
        return bool(self._open) and (
            self._open[-1] == "}" or (self._is_call and len(self._open) == 1)
        )

    def _open_bracket(self, bracket: str) -> None:
        is_first = not self._open
        self._open.append(_CLOSERS[bracket])
        self._due[_CLOSERS[bracket]] += 1
        is_object = bracket == "{" or (self._is_call and is_first)
        self._put("{" if is_object else "[")
        self._is_key_next = is_object

    def _close_bracket(self, bracket: str) -> None:
        """Close a bracket and the ones inside it; drop a bracket that closes none."""
        if not self._due[bracket]:
            if self._is_strict:
                raise NoMatchError
            return
        if self._held[:1] == [","]:
            self._held[0] = ""
        while self._close_last() != bracket:
            if self._is_strict:
                raise NoMatchError
        self.is_done = not self._open

    def _close_last(self) -> str:
        bracket = self._open.pop()
        self._due[bracket] -= 1
        is_object = self._is_call and not self._open
        self._put("}" if is_object else _AS_JSON[bracket])
        self._is_key_next = False
        return bracket

    def _close_all(self) -> None:
        if self._held[:1] == [","]:
            self._held[0] = ""
        while self._open:
            self._close_last()
        self.is_done = True

    def _read_word(self, word: str, following: str) -> None:
        if following and following in "\"'" and word in ("r", "R", "u"):
            self._is_raw = word in ("r", "R")
        elif self._is_key_next and _KEY.fullmatch(word):
            self._put(f'"{word}"')
        elif word in WORDS:
            self._put(WORDS[word])
        elif _JSON_NUMBER.fullmatch(word):
            self._put(word)
        elif (number := read_number(word)) is not None:
            self._put(json.dumps(number))
        else:
            self._put_other(word)

    def _open_string(
        self, quote: str, text: str, at: int, end: int, is_last: bool
    ) -> int:
        # Three quotes begin a Python string; two are an empty string.
        opened = text[at : min(end, at + 3)]
        if len(opened) < 3 and not is_last and opened == quote * len(opened):
            return at
        mark = quote * 3 if opened == quote * 3 else quote
        self._begin_string(mark)
        return at + len(mark)

    def _begin_string(self, mark: str) -> None:
        if self._held[:1] == ['"']:  # it continues the preceding string
            self._held.clear()
        else:
            self._put('"')
        self._quote = mark
        self._run = (_RAW_RUNS if self._is_raw else _RUNS)[mark[0]]

    def _read_string(self, text: str, at: int, end: int, is_last: bool) -> int:
        """Read a piece of a string; return where it ends."""
        quote = self._quote
        found = self._run.match(text, at, end)
        if found is not None and found.end() > at:
            self._parts.append(found[0])
            return found.end()
        char = text[at]
        if char == quote[0] and text.startswith(quote, at, end):
            self._quote = ""
            self._is_raw = False
            self._held.append('"')
            return at + len(quote)
        begun = text[at : min(end, at + len(quote))]
        if not is_last and len(begun) < len(quote) and quote.startswith(begun):
            return at
        if char == "\\" and quote != self._own_quote and not self._is_raw:
            return self._read_escape(text, at, end, is_last)
        self._parts.append(_json_inner(char))
        return at + 1

    def _read_escape(self, text: str, at: int, end: int, is_last: bool) -> int:
        found = _ESCAPE.match(text, at, end)
        is_long = found is not None and len(found[0]) == 2 and found[0][1] in "uxU"
        if not is_last and end - at < _LONGEST_ESCAPE and (found is None or is_long):
            return at
        if found is None:  # the text ends in a backslash
            return end
        escape, to = found[0], found.end()
        char = escape[1]
        if char in _JSON_ESCAPES or (char == "u" and len(escape) == 6):
            self._parts.append(escape)
        elif len(escape) > 2:
            code = int(escape[2:], 16)
            # In ASCII, because half of a surrogate pair is not valid text.
            self._parts.append(json.dumps(chr(code))[1:-1] if code < 0x110000 else "")
        else:
            self._parts.append(_PYTHON_ESCAPES.get(char) or _unknown_escape(char))
        return to


def _unknown_escape(char: str) -> str:
    """Keep the character and the backslash before it."""
    return "" if char == "\n" else "\\\\" + _json_inner(char)


def _json_inner(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_value(text: str) -> Any:
    """Return the value of a text that is one object or list.

    Raises:
        NoMatchError: it is none.
    """
    parts: list[str] = []
    copier = RelaxedCopier(parts.append, is_strict=True)
    if text[:1] not in _CLOSERS:
        raise NoMatchError
    end = ~copier.step(text, 0, len(text), True)
    if not copier.is_done or text[end:].strip():
        raise NoMatchError
    return load(parts)


def load(parts: list[str]) -> Any:
    """Return the value of JSON text.

    Raises:
        NoMatchError: it is none.
    """
    try:
        return json.loads("".join(parts))
    except (ValueError, RecursionError) as error:
        raise NoMatchError from error
