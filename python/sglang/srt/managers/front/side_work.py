"""Runs the front's own work that would block its event loop for too long.

Work that is bounded and linear in its input runs in a thread of this process; work
whose cost a client's text or a checkpoint's template decides runs in processes that can
be killed. In both, clients take turns, weighted by cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from sglang.srt.managers.front.caller import LEAVING, client_tag
from sglang.srt.managers.front.side_jobs import JobRequest
from sglang.srt.managers.front.side_process import SideProcess
from sglang.srt.managers.messages.errors import ClientDisconnected, Unavailable
from sglang.srt.utils.fair_turns import FairTurns, Place, QueueFullError
from sglang.srt.utils.owned_task import owned_task

if TYPE_CHECKING:
    from sglang.srt.utils.hf_tokenizer import Tokenizer

T = TypeVar("T")

# Bytes of a body, or tokens and log probabilities of an answer: about a millisecond of
# work.
LARGE = 1 << 14
# A job with at most this many bytes of arguments may use the process for cheap jobs:
# some tenths of a second of work.
CHEAP_BYTES = 1 << 18
# CPU time of a job, with a margin: even a slow machine tokenizes five times as much.
BASE_CPU_SECONDS = 2.0
BYTES_PER_CPU_SECOND = 1 << 18
# Niceness of the process for expensive jobs.
NICENESS = 5
# Work of one client that may wait, in bytes or entries. A small piece also costs
# something.
MAX_WAITING = 1 << 27
MIN_COST = 1 << 12
# Much longer than the largest answer takes.
STUCK_SECONDS = 60.0


class SideWork:
    """Runs large pieces of work beside the loop, and small ones of bounded cost
    immediately.

    Args:
        tokenizer: the tokenizer for jobs in processes.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._thread = _Thread()
        self._threads = FairTurns({self._thread: math.inf}, max_waiting=MAX_WAITING)
        # One process takes only cheap jobs, so they never wait for an expensive one: a
        # chat's first token waits for them.
        places = {
            SideProcess(tokenizer): CHEAP_BYTES,
            SideProcess(tokenizer, niceness=NICENESS): math.inf,
        }
        self._processes = FairTurns(places, max_waiting=MAX_WAITING)
        self.processes = list(places)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return `work()`, which must be linear in `size` and must not touch anything
        that the loop may change meanwhile.

        Raises:
            Unavailable: too much of the client's work is waiting.
        """
        if size < LARGE:
            return work()
        async with _turn(self._threads, size) as thread:
            return await thread.run(work)

    async def call(self, job: str, *, field: str, **arguments: Any) -> msgspec.Raw:
        """Return the result of a job in `side_jobs.Jobs`, as JSON.

        The job is ended if its client leaves.

        Args:
            field: of the body that the job works on, for errors.

        Raises:
            BadRequest: the job refuses its arguments, or they are too expensive.
            Unavailable: too much of the client's work is waiting.
            ClientDisconnected: the client no longer waits for the result.
        """
        encoded = msgspec.Raw(msgspec.json.encode(arguments))
        cost = len(memoryview(encoded))
        seconds = BASE_CPU_SECONDS + cost / BYTES_PER_CPU_SECOND
        request = JobRequest(name=job, arguments=encoded, cpu_seconds=seconds)

        async def work() -> msgspec.Raw:
            async with _turn(self._processes, cost) as process:
                return await process.run(request, field=field)

        return await _unless_left(work())

    async def start(self) -> None:
        """Start the process for cheap jobs before the first job arrives."""
        async with self._processes.turn("", 0) as process:
            await process.start()

    def check(self) -> None:
        """Check that nothing is stuck.

        Raises:
            Unavailable: something is stuck that only a restart can fix.
        """
        lateness = max(self._thread.seconds, *(p.lateness for p in self.processes))
        if lateness > STUCK_SECONDS:
            raise Unavailable(f"side work has been stuck for {lateness:.0f} seconds")

    def close(self) -> None:
        """End everything without waiting for work."""
        self._thread.close()
        for process in self.processes:
            process.close()


class _Thread:
    """A thread that the interpreter does not wait for at exit."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """How long the current piece of work has taken."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    async def run(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(error: BaseException | None, result: Any) -> None:
            if future.done():  # the caller no longer waits
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def run() -> None:
            error, result = None, None
            self._since = time.monotonic()
            try:
                result = work()
            except BaseException as raised:
                error = raised
            self._since = None
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(settle, error, result)

        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="side-work", daemon=True
            )
            self._thread.start()
        self._work.put(run)
        return await future

    def close(self) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        while (run := self._work.get()) is not None:
            run()


@asynccontextmanager
async def _turn(turns: FairTurns[Place], cost: int) -> AsyncIterator[Place]:
    try:
        async with turns.turn(client_tag(), max(cost, MIN_COST)) as place:
            yield place
    except QueueFullError as error:
        raise Unavailable(f"{error}; try again later") from error


async def _unless_left(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client leaves first."""
    wait_left = LEAVING.get()
    if wait_left is None:
        return await work
    working = owned_task(work)
    leaving = owned_task(wait_left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
