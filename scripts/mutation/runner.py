"""Runs each fault in a process forked after all imports, and receives its rows through
a pipe.

The parent imports and chooses but builds no engine, so every child starts from the same
state.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Send = Callable[[dict[str, Any]], None]
Work = Callable[[Send], None]


@dataclass(kw_only=True)
class Child:
    """A running child.

    Fields:
        job: number of its work item.
        deadline: time by which the next message must come.
        messages: messages so far; the last one may be incomplete.
    """

    job: int
    pid: int
    pipe: int
    deadline: float
    started: float
    rest: bytes = b""
    messages: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished child.

    Fields:
        end: done, killed (too long without a message) or died.
    """

    job: int
    end: str
    seconds: float
    messages: list[dict[str, Any]]


def run_all(works: Sequence[Work], *, jobs: int, silence: float) -> Generator[Done]:
    """Run each work in a child, `jobs` at a time; yield them as they end.

    Args:
        silence: seconds without a message after which a child is killed.
    """
    pending = list(enumerate(works))
    running: dict[int, Child] = {}
    try:
        while pending or running:
            while pending and len(running) < jobs:
                job, work = pending.pop(0)
                child = _start(job, work, silence)
                running[child.pipe] = child
            yield from _wait(running, silence)
    finally:
        for child in running.values():
            _end(child, "killed")


def _start(job: int, work: Work, silence: float) -> Child:
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _run_child(work, writing)
    os.close(writing)
    now = time.monotonic()
    return Child(job=job, pid=pid, pipe=reading, deadline=now + silence, started=now)


def _run_child(work: Work, writing: int) -> None:
    """Run the work in the child. Never returns, so nothing of the parent is flushed or
    ended twice.
    """
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)

        def send(message: dict[str, Any]) -> None:
            os.write(writing, json.dumps(message).encode() + b"\n")

        work(send)
        code = 0
    finally:
        os._exit(code)


def _wait(running: dict[int, Child], silence: float) -> Iterator[Done]:
    first = min(child.deadline for child in running.values())
    timeout = max(first - time.monotonic(), 0.0)
    ready, _, _ = select.select(list(running), [], [], timeout)
    for pipe in ready:
        child = running[pipe]
        piece = os.read(pipe, 1 << 16)
        if not piece:
            del running[pipe]
            yield _end(child, "")
            continue
        *lines, child.rest = (child.rest + piece).split(b"\n")
        child.messages += [json.loads(line) for line in lines]
        child.deadline = time.monotonic() + silence
    for pipe, child in list(running.items()):
        if child.deadline < time.monotonic():
            del running[pipe]
            yield _end(child, "killed")


def _end(child: Child, how: str) -> Done:
    if how:
        # The child leads its own process group.
        os.killpg(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    os.close(child.pipe)
    return Done(
        job=child.job,
        end=how or ("done" if status == 0 else "died"),
        seconds=time.monotonic() - child.started,
        messages=child.messages,
    )
