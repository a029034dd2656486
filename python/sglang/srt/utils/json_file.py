"""Reads untrusted text and JSON: files named by users, and flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang.srt.utils.quoting import MAX_QUOTED_CHARS, clipped

MAX_BYTES = 256 << 20


def read_text_file(file: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Read a file of UTF-8 text.

    Raises:
        ValueError: the file does not exist, is a pipe or device, is too large or not
            UTF-8; names the file.
    """
    try:
        # A pipe or a device might never end.
        if not file.is_file():
            reason = "is not a regular file" if file.exists() else "no such file"
            raise ValueError(f"{file}: {reason}")
        size = file.stat().st_size
        if size > max_bytes:
            raise ValueError(f"{file}: {size} bytes, more than {max_bytes}")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file}: not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error


def read_json(file: Path) -> Any:
    """Read a file that contains one JSON value.

    Raises:
        ValueError: as in `read_text_file`, or not JSON; names the file.
    """
    return parse_json(read_text_file(file), where=str(file))


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a file that contains one JSON object; the last value of a repeated key
    counts.

    Raises:
        ValueError: as in `read_json`, or not an object; names the file.
    """
    return _object(read_json(file), where=str(file))


def parse_json_object(text: str, *, where: str) -> dict[str, Any]:
    """Parse one JSON object. `where` is its file or flag, for errors.

    Raises:
        ValueError: not JSON, or not an object; begins with `where`.
    """
    return _object(parse_json(text, where=where), where=where)


def parse_json(text: str, *, where: str) -> Any:
    """Parse one JSON value; `where` as in `parse_json_object`.

    Raises:
        ValueError: not JSON, nested too deeply, or a number has thousands of digits;
            begins with `where`.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{where}: not valid JSON: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from error


def shown(value: object) -> str:
    """Return a value for error messages, on one line of bounded length."""
    try:
        return clipped(json.dumps(value, default=repr), MAX_QUOTED_CHARS)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"


def _object(value: Any, *, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must hold a JSON object, not {shown(value)}")
    return value
