"""Work spread over forked processes, for code that holds the interpreter lock.

A fork has all that this process has, so that nothing is sent and nothing imported. It
must not use a GPU, whose driver does not survive a fork, nor wait for a thread of this
process, which it does not have.
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

logger = logging.getLogger(__name__)

_MOST = 32
# Longer than any work here; a fork that hangs is ended then.
PATIENCE_SECONDS = 120.0
_PAUSE_SECONDS = 0.005
_WORD = 4


def in_processes(work: Callable[[int], object], count: int) -> None:
    """Call `work(0)` to `work(count - 1)` in forks, as many as there are processors;
    for what they leave on disk.

    Failures are logged: the caller must be able to do without the work.
    """
    numbers, writer = os.pipe()
    running: set[int] = set()
    try:
        for _ in range(min(len(os.sched_getaffinity(0)), _MOST, count)):
            running.add(_fork(work, numbers, writer))
    except OSError as error:
        logger.warning("%d processes have to do: %s", len(running), error)
    try:
        for number in range(count):
            os.write(writer, number.to_bytes(_WORD, "little"))
    finally:
        os.close(writer)  # no more numbers
        os.close(numbers)
    _wait_for(running)


def _fork(work: Callable[[int], object], numbers: int, writer: int) -> int:
    with warnings.catch_warnings():
        # Other threads exist; what they may hold is not used in the fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    failed = True
    try:
        os.close(writer)
        gc.disable()  # which may free memory of a GPU
        failed = _take_turns(work, numbers)
    finally:
        os._exit(failed)


def _take_turns(work: Callable[[int], object], numbers: int) -> bool:
    """Work until there are no more numbers; returns whether something failed."""
    failed = False
    while word := os.read(numbers, _WORD):
        try:
            work(int.from_bytes(word, "little"))
        except Exception:
            failed = True
            traceback.print_exc()
    return failed


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
