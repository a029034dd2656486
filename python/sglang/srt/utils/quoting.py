"""Quotes clients' values in messages, with bounded length and cost."""

from __future__ import annotations

import reprlib

MAX_QUOTED_CHARS = 200
MAX_MESSAGE_CHARS = 1000
# The end of a message often says where the problem is.
_TAIL_CHARS = 200


def quoted(value: object) -> str:
    """Return `repr` of a value, shortened in the middle if long."""
    return _SHORT.repr(value)


def clipped(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    """Return `text`, shortened if longer than `limit` characters."""
    if len(text) <= limit:
        return text
    tail = min(_TAIL_CHARS, limit // 2)
    return f"{text[: limit - tail]} ... {text[len(text) - tail :]}"


def _make_short() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = MAX_QUOTED_CHARS
    return short


_SHORT = _make_short()
