"""A wrapper for the main functions of this repository's commands."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")

# The exit code that a shell shows for a process ended by SIGPIPE.
READER_GONE = 141


def ends_with_its_reader(main: Callable[P, int]) -> Callable[P, int]:
    """Make a command end quietly when its reader goes away (`| head`)."""

    @wraps(main)
    def command(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            try:
                return main(*args, **kwargs)
            finally:
                # Not later, by the interpreter, which prints what it could not write.
                _flush()
        except BrokenPipeError:
            if not _has_lost_its_reader():
                raise
            return READER_GONE

    return command


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _has_lost_its_reader() -> bool:
    """Whether a standard stream has lost its reader; if so, redirect it to nowhere."""
    found = False
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and _is_broken(stream.fileno()):
            found = True
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
    return found


def _is_broken(descriptor: int) -> bool:
    # An unbuffered stream has nothing left to write that would show it.
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
