"""The front's side of one process for side work (`side_jobs`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from sglang.srt.environ import child_environment
from sglang.srt.managers.front.side_jobs import (
    LENGTH_BYTES,
    SECONDS_PER_CPU_SECOND,
    JobAnswer,
    JobRequest,
)
from sglang.srt.managers.messages.errors import BadRequest, Unavailable

if TYPE_CHECKING:
    from sglang.srt.utils.hf_tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_JOBS = "sglang.srt.managers.front.side_jobs"
# Grace beyond the process's own deadlines, after which the front ends it.
GRACE_SECONDS = 5.0
READ_BYTES = 1 << 20
# An exited process is gone as soon as the kernel has freed its memory.
REAP_SECONDS = 0.001
KILL_SECONDS = 1.0
# Signals that a job does not cause: something else ended the child.
_NOT_THE_JOB = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP})


class SideProcess:
    """One child process, started for its first job and restarted after it exits.

    Runs one job at a time. Several event loops may use it, one after another.

    Args:
        tokenizer: the tokenizer for its jobs, or None if they need none.
        niceness: niceness of the child; above 0 the engine's threads have priority.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, niceness: int = 0) -> None:
        self._tokenizer = tokenizer
        self._niceness = niceness
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._deadline: float | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        return None if self._child is None else self._child.pid

    @property
    def lateness(self) -> float:
        """Seconds by which the job exceeds all its deadlines; 0 without a job."""
        return 0.0 if self._deadline is None else time.monotonic() - self._deadline

    async def run(self, request: JobRequest, *, field: str) -> msgspec.Raw:
        """Run a job; if the caller is cancelled, the process is ended.

        Args:
            field: field of the body that the job works on, for errors.

        Raises:
            BadRequest: the job rejects its arguments, or they are too expensive.
            Unavailable: something else ended the process.
            RuntimeError: the job failed.
        """
        # The child's own timers are exact; this one is for a stopped process.
        limit = request.cpu_seconds * SECONDS_PER_CPU_SECOND + GRACE_SECONDS
        self._deadline = time.monotonic() + limit
        is_done = False
        try:
            asking = self._ask(msgspec.json.encode(request))
            reply = await asyncio.wait_for(asking, limit)
            is_done = True
        except asyncio.TimeoutError:
            raise _too_expensive(request, field) from None
        except OSError as error:
            code = await self._reap()
            is_done = True
            raise _death(code, request, field) from error
        finally:
            self._deadline = None
            if not is_done:
                self.close()
        answer = msgspec.json.decode(reply, type=JobAnswer)
        if answer.is_last:
            await self._reap()
        if answer.refusal is not None:
            text, param, status = answer.refusal
            raise BadRequest(text, param=param, status=status)
        if answer.failure is not None:
            raise RuntimeError(f"{request.name} failed beside:\n{answer.failure}")
        return answer.result

    def close(self) -> None:
        """Kill the child; waits only briefly, for the kernel."""
        child, self._child = self._child, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if child is not None:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(KILL_SECONDS)

    async def start(self) -> socket.socket:
        """Start the child unless it is running; returns the connection to it."""
        if self._child is not None and self._child.poll() is not None:
            self.close()  # something else ended it meanwhile
        if self._connection is not None:
            return self._connection
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = start_child(
                [
                    *(sys.executable, "-m", _JOBS),
                    *(str(theirs.fileno()), str(self._niceness)),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment(TOKENIZERS_PARALLELISM="false"),
                # Ctrl-C is for the parent; the child exits when its socket closes.
                start_new_session=True,
            )
        ours.setblocking(False)
        self._connection = ours
        portable = None if self._tokenizer is None else self._tokenizer.portable()
        await _send(ours, msgspec.json.encode(portable))
        return ours

    async def _ask(self, message: bytes) -> bytes:
        connection = await self.start()
        await _send(connection, message)
        head = await _receive(connection, LENGTH_BYTES)
        return await _receive(connection, int.from_bytes(head, "big"))

    async def _reap(self) -> int:
        """Wait for a child that exits by itself; returns its exit code."""
        child = self._child
        assert child is not None
        while (code := child.poll()) is None:
            await asyncio.sleep(REAP_SECONDS)
        self.close()
        return code


start_child: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen


async def _send(connection: socket.socket, message: bytes) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, len(message).to_bytes(LENGTH_BYTES, "big"))
    await loop.sock_sendall(connection, message)


async def _receive(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    parts = bytearray()
    while len(parts) < size:
        part = await loop.sock_recv(connection, min(size - len(parts), READ_BYTES))
        if not part:
            raise ConnectionResetError("the side-work process has exited")
        parts += part
    return bytes(parts)


def _death(code: int, request: JobRequest, field: str) -> Exception:
    if code in _NOT_THE_JOB:
        return Unavailable("the process that worked on this request was ended")
    logger.warning("side work: %s ended its process with %d", request.name, code)
    return _too_expensive(request, field)


def _too_expensive(request: JobRequest, field: str) -> BadRequest:
    return BadRequest(
        f"{field} is too expensive: {request.name} takes more than "
        f"{request.cpu_seconds:g} seconds of CPU time, or too much memory; send less",
        param=field,
    )
