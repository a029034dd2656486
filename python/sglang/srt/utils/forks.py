"""Spreads work over forked processes, for code that holds the interpreter lock.

A fork has everything this process has, so nothing is sent or imported. It must not use
a GPU, whose driver does not survive a fork, or wait for a thread of this process, which
does not exist in the fork.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial

logger = logging.getLogger(__name__)

_MOST = 32
# Longer than any work here; a fork that hangs is killed after this.
PATIENCE_SECONDS = 120.0
_PAUSE_SECONDS = 0.005
_WORD = 4
_STDERR, _FIRST_OWN_FILE = 2, 3


def in_processes(work: Callable[[int], object], count: int) -> None:
    """Call `work(0)` to `work(count - 1)` in forks, one per processor, for their
    effects on disk.

    Failures are logged; the caller must be able to do without the work.
    """
    numbers, writer = os.pipe()
    running: set[int] = set()
    try:
        for _ in range(min(len(os.sched_getaffinity(0)), _MOST, count)):
            running.add(_fork(lambda: _take_turns(work, numbers, writer)))
    except OSError as error:
        logger.warning("%d processes have to do: %s", len(running), error)
    try:
        for number in range(count):
            os.write(writer, number.to_bytes(_WORD, "little"))
    finally:
        os.close(writer)  # no more numbers
        os.close(numbers)
    _wait_for(running)


class BackgroundFork:
    """One piece of work in a fork, for its effects on disk; the caller polls it.

    The fork keeps no files of this process except the standard streams.

    Args:
        patience: seconds after which a running fork is killed.

    Raises:
        OSError: the process cannot fork.
    """

    def __init__(
        self, work: Callable[[], object], *, patience: float = PATIENCE_SECONDS
    ) -> None:
        self._deadline = time.monotonic() + patience
        self._pid = _fork(lambda: _do_alone(work))
        self._succeeded: bool | None = None

    def poll(self) -> bool | None:
        """Return whether the work succeeded, or None while it runs."""
        if self._succeeded is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                self._succeeded = status == 0
            elif time.monotonic() > self._deadline:
                os.kill(self._pid, signal.SIGKILL)
        return self._succeeded

    def wait(self, timeout: float) -> bool | None:
        """Like `poll`, after waiting at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        return self._succeeded


def _fork(run: Callable[[], bool]) -> int:
    """Call `run`, which returns whether it failed, in a fork; returns the process
    id.
    """
    with warnings.catch_warnings():
        # Other threads exist; the fork does not use anything they may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    failed = True
    try:
        gc.disable()  # which may free GPU memory
        failed = run()
    finally:
        os._exit(failed)


def _take_turns(work: Callable[[int], object], numbers: int, writer: int) -> bool:
    """Work until there are no more numbers; returns whether anything failed."""
    os.close(writer)
    failed = False
    while word := os.read(numbers, _WORD):
        number = int.from_bytes(word, "little")
        failed |= _has_failed(partial(work, number))
    return failed


def _do_alone(work: Callable[[], object]) -> bool:
    os.closerange(_FIRST_OWN_FILE, os.sysconf("SC_OPEN_MAX"))
    return _has_failed(work)


def _has_failed(work: Callable[[], object]) -> bool:
    try:
        work()
    except Exception:
        # Python's own stream may write to a file that this fork has closed.
        os.write(_STDERR, traceback.format_exc().encode())
        return True
    return False


def _wait_for(running: set[int]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    failed = 0
    while running:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.discard(pid)
                failed += status != 0
        if running and time.monotonic() > deadline:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)
    if failed:
        logger.warning("%d of the forked processes failed", failed)
