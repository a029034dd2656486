"""Stops a process whose forward does not come back."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

EXIT_CODE = 70


class Watchdog:
    """A thread that ends the process when one guarded section outlasts the time-out.

    The process is beyond repair then (a hung kernel cannot be interrupted), so it
    prints all stacks and exits; the parent reports it to the clients.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._began: float | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @contextmanager
    def guard(self) -> Iterator[None]:
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(self._timeout / 4, 5.0))
            began = self._began
            if began is not None and time.monotonic() - began > self._timeout:
                logger.critical(
                    "A forward runs for more than --watchdog-timeout %s s; stopping",
                    self._timeout,
                )
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                os._exit(EXIT_CODE)
