"""Stops a process whose forward does not come back."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sglang.srt.utils.line_writer import flush_all

logger = logging.getLogger(__name__)

EXIT_CODE = 70


class Watchdog:
    """A thread that ends the process when one guarded section outlasts the time-out.

    The process is beyond repair then (a hung kernel cannot be interrupted), so it
    logs all stacks and exits; the parent reports it to the clients.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._began: float | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @contextmanager
    def guard(self) -> Iterator[None]:
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()

    def _watch(self) -> None:
        while not self._is_closed.wait(min(self._timeout / 4, 5.0)):
            began = self._began
            if began is not None and time.monotonic() - began > self._timeout:
                logger.critical(
                    "A forward runs for more than --watchdog-timeout %s s; stopping\n"
                    "%s",
                    self._timeout,
                    _all_stacks(),
                )
                flush_all()
                os._exit(EXIT_CODE)


def _all_stacks() -> str:
    """The stacks of all threads; through memory, because stderr may be blocked."""
    descriptor = os.memfd_create("stacks")
    faulthandler.dump_traceback(file=descriptor, all_threads=True)
    size = os.lseek(descriptor, 0, os.SEEK_CUR)
    return os.pread(descriptor, size, 0).decode(errors="replace")
