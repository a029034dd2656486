"""Whether the scheduler's loop still turns: cheap questions, while it matters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sglang.srt.managers.messages.errors import Unavailable

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
"""A sign of life is true for so long."""


class Heartbeat:
    """Judges the scheduler by the age of the oldest question that it has not answered.

    Any message of it is an answer: a stopped process, an endless loop and a device that
    hangs send none. An idle one that nobody asked owes nothing.

    Args:
        ask: sends a question that the scheduler answers between two steps.
        timeout: seconds that it may take; longer than its longest step.
    """

    def __init__(self, ask: Callable[[], None], *, timeout: float) -> None:
        self._ask = ask
        self._timeout = timeout
        self._last_sign = -INTERVAL_SECONDS
        self._asked: float | None = None
        self._is_reported = False

    def on_sign(self) -> None:
        """Note a message of the scheduler."""
        if self._is_reported:
            self._is_reported = False
            logger.warning("the scheduler answers again")
        self._last_sign = time.monotonic()
        self._asked = None

    def beat(self) -> None:
        """Ask, unless a question is open or the last sign is fresh."""
        now = time.monotonic()
        if self._asked is None and now - self._last_sign > INTERVAL_SECONDS:
            self._asked = now
            self._ask()

    @property
    def silence(self) -> float:
        """Seconds for which a question has waited for its answer."""
        return 0.0 if self._asked is None else time.monotonic() - self._asked

    @property
    def is_alive(self) -> bool:
        return self.silence <= self._timeout

    def check(self) -> None:
        """Ask, and judge by what was asked before.

        Raises:
            Unavailable: the scheduler has been silent for too long.
        """
        self.beat()
        if not self.is_alive:
            raise Unavailable(
                f"the scheduler has not answered for {self.silence:.0f} seconds "
                f"(--health-timeout {self._timeout:g})"
            )

    async def keep_asking(self, is_busy: Callable[[], bool]) -> None:
        """Ask while `is_busy`, and log a silence once: nobody may be probing."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            if is_busy():
                self.beat()
            if not self.is_alive and not self._is_reported:
                self._is_reported = True
                logger.error(
                    "the scheduler has not answered for %.0f s (--health-timeout %g)",
                    self.silence,
                    self._timeout,
                )
