"""Documents that the tests of the inspector share."""

from __future__ import annotations

from typing import Any


def incident(number: int, **fields: Any) -> dict[str, Any]:
    """An incident of two violations, and two more that it does not hold."""
    violation = {
        "diagnosis": "use after free",
        "reasons": ["verify_freed"],
        "worker": "target",
        "rid": "r0",
        "slot": 17,
        "page": 17,
    }
    return {
        "number": number,
        "rank": 0,
        "time": "2026-11-21T13:24:46Z",
        "forward": 24,
        "forward_mode": "decode",
        "dropped": 2,
        "violations": [violation, violation],
        **fields,
    }
