"""JSON text of values that a model wrote in another form."""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.utils.text_source import NoMatchError


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
