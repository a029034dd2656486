"""Values that a model wrote in a form other than JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from sglang.srt.utils.text_source import NoMatchError

_DIGITS = r"\d+(?:_\d+)*"
_INTEGER = re.compile(rf"[+-]?{_DIGITS}")
_DECIMAL = re.compile(
    rf"[+-]?(?:{_DIGITS}\.?|(?:{_DIGITS})?\.{_DIGITS})(?:[eE][+-]?\d+)?"
)
_OTHER_BASE = re.compile(r"[+-]?0(?:[xX][0-9a-fA-F]+|[oO][0-7]+|[bB][01]+)")


def to_json(value: Any) -> str:
    """Encode `value` in a form that UTF-8 can carry.

    Raises:
        NoMatchError: JSON has no such value.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise NoMatchError from error
    return text


def read_number(word: str) -> int | float | None:
    """Read a number like Python, but also with leading zeros.

    Returns None if it is not a finite number.
    """
    try:
        if _INTEGER.fullmatch(word):
            return int(word)
        if _OTHER_BASE.fullmatch(word):
            return int(word, 0)
        if _DECIMAL.fullmatch(word):
            number = float(word)
            return number if abs(number) != float("inf") else None
    except ValueError:  # more digits than Python reads
        pass
    return None
