"""JSON files of a checkpoint: anybody may have written them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang.srt.utils.quoting import MAX_QUOTED_CHARS, clipped

MAX_BYTES = 256 << 20


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ValueError: no such file, or another content; names the file.
    """
    try:
        # Not a pipe or a device, which would never end.
        if not file.is_file():
            reason = "is not a regular file" if file.exists() else "no such file"
            raise ValueError(f"{file}: {reason}")
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"{file}: {size} bytes, more than {MAX_BYTES}")
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except RecursionError as error:
        raise ValueError(f"{file}: not valid JSON: nested too deeply") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error
    except ValueError as error:
        if str(file) in str(error):
            raise
        # A number of thousands of digits.
        raise ValueError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: must hold a JSON object, not {shown(value)}")
    return value


def shown(value: object) -> str:
    """A value as errors quote it: on one line, and not for ever."""
    return clipped(json.dumps(value, default=repr), MAX_QUOTED_CHARS)
