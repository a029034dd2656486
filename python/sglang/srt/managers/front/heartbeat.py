"""Checks cheaply whether the scheduler's loop still runs, while it matters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sglang.srt.managers.messages.errors import Unavailable

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
"""How long a sign of life is valid."""


class Heartbeat:
    """Judges the scheduler by the age of its oldest unanswered question.

    Any message from the scheduler counts as an answer: a stopped process, an endless
    loop or a hung device sends none. An idle scheduler that was not asked owes no
    answer.

    Args:
        ask: sends a question that the scheduler answers between two steps.
        timeout: seconds it may take to answer; longer than its longest step.
    """

    def __init__(self, ask: Callable[[], None], *, timeout: float) -> None:
        self._ask = ask
        self._timeout = timeout
        self._last_sign = -INTERVAL_SECONDS
        self._asked: float | None = None
        self._is_reported = False

    def on_sign(self) -> None:
        """Record a message from the scheduler."""
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
        """Seconds for which a question has been unanswered."""
        return 0.0 if self._asked is None else time.monotonic() - self._asked

    @property
    def is_alive(self) -> bool:
        return self.silence <= self._timeout

    def check(self) -> None:
        """Ask again, and judge by the earlier questions.

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
        """Ask while `is_busy`, and log each silence once, because no probe may be
        running.
        """
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
