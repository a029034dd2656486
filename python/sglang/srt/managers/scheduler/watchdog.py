"""Stops a process whose step does not come back."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sglang.srt.utils.line_writer import flush_all

logger = logging.getLogger(__name__)

EXIT_CODE = 70


@dataclass(slots=True)
class _Section:
    """When the current guarded section began, or None if none is running."""

    began: float | None = None


class Watchdog:
    """A thread that ends the process when a guarded section exceeds the timeout.

    The process cannot recover then (a hung kernel cannot be interrupted), so it logs
    all stacks and exits; the parent reports it to the clients. The thread ends with
    `close` or with this object.
    """

    def __init__(self, timeout: float) -> None:
        self._section = _Section()
        is_closed = threading.Event()
        self.close = weakref.finalize(self, is_closed.set)
        threading.Thread(
            target=_watch, args=(self._section, timeout, is_closed), daemon=True
        ).start()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Scope of a section. The time of an outer section starts anew after an inner
        one."""
        is_inner = self._section.began is not None
        self._section.began = time.monotonic()
        try:
            yield
        finally:
            self._section.began = time.monotonic() if is_inner else None


def _watch(section: _Section, timeout: float, is_closed: threading.Event) -> None:
    while not is_closed.wait(min(timeout / 4, 5.0)):
        began = section.began
        if began is not None and time.monotonic() - began > timeout:
            logger.critical(
                "A step runs for more than --watchdog-timeout %s s; stopping\n%s",
                timeout,
                _all_stacks(),
            )
            flush_all()
            os._exit(EXIT_CODE)


def _all_stacks() -> str:
    """Return the stacks of all threads, collected in memory because stderr may be
    blocked.
    """
    descriptor = os.memfd_create("stacks")
    faulthandler.dump_traceback(file=descriptor, all_threads=True)
    size = os.lseek(descriptor, 0, os.SEEK_CUR)
    return os.pread(descriptor, size, 0).decode(errors="replace")
