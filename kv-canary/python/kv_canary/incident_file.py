"""Files of the report folder, each with one incident as a JSON document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Far larger than any incident; keeps foreign files from filling the memory.
MAX_BYTES = 64 << 20


def read_incident(file: Path) -> dict[str, Any]:
    """Read an incident document.

    Raises:
        ValueError: the file cannot be read, or holds no incident. The message names it.
    """
    try:
        if file.exists() and not file.is_file():
            raise ValueError("not a regular file")
        if (size := file.stat().st_size) > MAX_BYTES:
            raise ValueError(f"{size} bytes, more than {MAX_BYTES}")
        incident = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(incident, dict):
            raise ValueError("no JSON object")
        violations = incident.get("violations")
        if not isinstance(violations, list) or not violations:
            raise ValueError("violations must be a list with an entry")
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not an incident file: not UTF-8 text") from error
    except RecursionError as error:
        raise ValueError(f"{file}: not an incident file: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{file}: not an incident file, or cut: {error}") from error
    return incident
