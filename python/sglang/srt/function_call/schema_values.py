"""Decides which value a text means, by the schema of its parameter.

Formats that write arguments without quotes leave the type to the schema. A text becomes
a value that the schema allows if it can be read as one; it is a string if the schema
allows strings and the text is not clearly another value.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.function_call.json_values import read_number, to_json
from sglang.srt.function_call.relaxed_json import read_value
from sglang.srt.utils.text_source import NoMatchError

if TYPE_CHECKING:
    from sglang.srt.function_call.tool_schema import Reading

_TRUTHS = {
    **dict.fromkeys(("true", "yes", "on", "1", "y", "t"), True),
    **dict.fromkeys(("false", "no", "off", "0", "n", "f"), False),
}
_BRACKETS = ("{", "[", "(")
_QUOTES = ('"', "'")


def read_text(text: str, reading: Reading, *, is_json: bool = False) -> Any:
    """Return the value that `text` means.

    Args:
        is_json: whether the format says that the text is JSON rather than a string.
    """
    if reading.is_open and not is_json:
        return text
    stripped = text.strip()
    if reading.constants:
        for written in (text, stripped, stripped[1:-1]):
            if ("string", written) in reading.constants:
                return written
    has_text = "string" in reading.kinds and not is_json
    kinds = reading.kinds | {kind for kind, _ in reading.constants}
    for value in _candidates(stripped, kinds, has_text=has_text):
        if reading.allows(value) and _has_json(value):
            return reading.as_written(value)
    return text


def _candidates(text: str, kinds: frozenset[str], *, has_text: bool) -> Iterator[Any]:
    """Yield possible meanings of `text`, most likely first; the caller checks the type.

    Args:
        has_text: whether it may be a string, so that only clear non-strings are
            yielded.
    """
    if text in ("null", "None"):
        yield None
    if text[:1] in _BRACKETS and kinds & {"object", "array"}:
        yield from _container(text)
    if has_text:
        return
    if "number" in kinds or "integer" in kinds:
        yield from _number(text, is_integer="number" not in kinds)
    if "boolean" in kinds:
        yield from _truth(text.lower(), has_words="string" not in kinds)
    yield from _json(text)
    if text.lower() in ("", "null", "none", "nil"):
        yield None
    inner = text[1:-1].strip()
    if text[:1] in _QUOTES and text[:1] == text[-1:] and inner[:1] not in _QUOTES:
        yield from _candidates(inner, kinds, has_text=False)


def _container(text: str) -> Iterator[Any]:
    found = list(_json(text))
    if not found:
        with contextlib.suppress(NoMatchError):
            found = [read_value(text)]
    yield from found


def _json(text: str) -> Iterator[Any]:
    try:
        # Models write line breaks into strings.
        yield json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return


def _number(text: str, *, is_integer: bool) -> Iterator[int | float]:
    number = read_number(text)
    if is_integer and isinstance(number, float) and number.is_integer():
        # In JSON schema 5.0 is an integer, but callers that want an integer expect 5.
        yield int(number)
    elif number is not None:
        yield number


def _truth(text: str, *, has_words: bool) -> Iterator[bool]:
    if text in _TRUTHS and (has_words or text in ("true", "false")):
        yield _TRUTHS[text]


def _has_json(value: Any) -> bool:
    try:
        to_json(value)
    except NoMatchError:
        return False
    return True
