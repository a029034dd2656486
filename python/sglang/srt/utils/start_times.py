"""Seconds of each part of a start, for one line of the log."""

from __future__ import annotations

import time


class StartTimes:
    """Seconds of the parts of a start, in the order in which they ended.

    Args:
        began: `time.monotonic()` of the start; all processes of a machine share that
            clock. Defaults to now.
    """

    def __init__(self, began: float | None = None) -> None:
        self._began = time.monotonic() if began is None else began
        self._ended = self._began
        self._parts: dict[str, float] = {}

    def end(self, part: str) -> None:
        """Count the time since the end of the last part as `part`."""
        now = time.monotonic()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._ended
        self._ended = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.1f}" for name, value in self._parts.items())
        return f"{self._ended - self._began:.1f} s ({parts})"
