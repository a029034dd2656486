"""Spreads work over forked processes, for code that holds the interpreter lock.

A fork has everything this process has, so nothing is imported. It must not use
a GPU, whose driver does not survive a fork, or wait for a thread of this process, which
does not exist in the fork.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
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
MOST_BYTES = 1 << 16
_STDERR, _FIRST_OWN_FILE = 2, 3


class Workers:
    """Forks, one per processor, that take tasks in turn and do them for their effects
    on disk. They start with the first task.

    Failures are logged; the caller must be able to do without the work.

    Args:
        work: does one task, of at most `MOST_BYTES`.
    """

    def __init__(self, work: Callable[[bytes], object]) -> None:
        self._work = work
        self._running: set[int] = set()
        self._tasks: socket.socket | None = None
        self._is_broken = False

    def give(self, task: bytes) -> None:
        """Let a worker do `task`; blocks while many wait to be taken."""
        if self._tasks is None:
            self._tasks = self._start()
        if self._is_broken:
            return
        try:
            self._tasks.send(task)
        except OSError as error:
            self._is_broken = True
            logger.warning("The forked processes take no more work: %s", error)

    def finish(self) -> None:
        """Wait until all tasks are done, at most `PATIENCE_SECONDS`."""
        if self._tasks is not None:
            self._tasks.close()  # no more tasks
            _wait_for(self._running)

    def cancel(self) -> None:
        """End the workers at once."""
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if self._tasks is not None:
            self._tasks.close()

    def _start(self) -> socket.socket:
        # Messages keep their bounds, whichever worker takes them.
        giver, taker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        giver.settimeout(PATIENCE_SECONDS)
        with taker:
            try:
                for _ in range(min(len(os.sched_getaffinity(0)), _MOST)):
                    self._running.add(_fork(lambda: self._take_turns(giver, taker)))
            except OSError as error:
                logger.warning("%d processes have to do: %s", len(self._running), error)
        return giver

    def _take_turns(self, giver: socket.socket, taker: socket.socket) -> bool:
        """Work until there are no more tasks; returns whether anything failed."""
        giver.close()
        failed = False
        while task := taker.recv(MOST_BYTES):
            failed |= _has_failed(partial(self._work, task))
        return failed


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
