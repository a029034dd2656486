"""The canary's periodic line in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kv_canary.records import Counter

logger = logging.getLogger(__name__)

_TAGS = {
    "verify": Counter.VERIFY_LAUNCHES,
    "head": Counter.HEAD_LAUNCHES,
    "tail": Counter.TAIL_LAUNCHES,
    "sweep": Counter.SWEEP_LAUNCHES,
}


class StatsLogger:
    """One line about `pool` every `every` forwards, 0: never, and at most one in
    `seconds`."""

    def __init__(
        self,
        every: int,
        *,
        pool: str,
        seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._pool = pool
        self._seconds = seconds
        self._clock = clock
        self._last = 0
        self._next = clock()

    def on_counters(self, counters: list[int], *, violations: int) -> None:
        """Log the device's counters as of a result, if the line is due."""
        step = counters[Counter.TAIL_LAUNCHES]
        if not self._every or step - self._last < self._every:
            return
        now = self._clock()
        if now < self._next:
            return
        self._last, self._next = step, now + self._seconds
        active = [tag for tag, counter in _TAGS.items() if counters[counter]]
        logger.info(
            "[canary] step=%d protected_tokens=%d sweep_passes=%d violations=%d "
            "launch_tags_active=%s pool=%s",
            step,
            counters[Counter.VERIFIED_SLOTS],
            counters[Counter.SWEEP_LAUNCHES],
            violations,
            ",".join(active) or "none",
            self._pool,
        )
