"""Pieces of the front's own work that are too long for its event loop.

What is linear in its input and bounded runs in a thread of this process; what a
client's text or a checkpoint's template decides runs in processes that can be killed.
Clients take turns in both, weighted by the cost.
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

if TYPE_CHECKING:
    from sglang.srt.utils.hf_tokenizer import Tokenizer

T = TypeVar("T")

# In bytes of a body or in tokens and log probabilities of an answer: about a
# millisecond of work.
LARGE = 1 << 14
# Bytes of a job's arguments up to which it may use the process for cheap ones: some
# tenths of a second of work.
CHEAP_BYTES = 1 << 18
# CPU time of a job: a slow machine tokenizes five times as much.
BASE_CPU_SECONDS = 2.0
BYTES_PER_CPU_SECOND = 1 << 18
# Of the process for expensive jobs.
NICENESS = 5
# Of one client, in bytes or entries. A small piece costs something, too.
MAX_WAITING = 1 << 27
MIN_COST = 1 << 12
# Far longer than the largest answer takes.
STUCK_SECONDS = 60.0


class SideWork:
    """Runs large pieces of work beside the loop, small ones of bounded cost at once.

    Args:
        tokenizer: of the jobs in processes.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._thread = _Thread()
        self._threads = FairTurns({self._thread: math.inf}, max_waiting=MAX_WAITING)
        # One takes cheap jobs only: they never wait for an expensive one, and a chat's
        # first token waits for them.
        places = {
            SideProcess(tokenizer): CHEAP_BYTES,
            SideProcess(tokenizer, niceness=NICENESS): math.inf,
        }
        self._processes = FairTurns(places, max_waiting=MAX_WAITING)
        self.processes = list(places)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return `work()`, which is linear in `size` and touches nothing that the loop
        may change meanwhile.

        Raises:
            Unavailable: too much of the client's work waits.
        """
        if size < LARGE:
            return work()
        async with _turn(self._threads, size) as thread:
            return await thread.run(work)

    async def call(self, job: str, *, field: str, **arguments: Any) -> msgspec.Raw:
        """Return the result of a job of `side_jobs.Jobs`, as JSON.

        The job ends where its client leaves.

        Args:
            field: of the body that the job works on, for errors.

        Raises:
            BadRequest: the job refuses its arguments, or they are too expensive.
            Unavailable: too much of the client's work waits.
            ClientDisconnected: nobody waits for the result any more.
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
        """Start the process of cheap jobs before the first one comes."""
        async with self._processes.turn("", 0) as process:
            await process.start()

    def check(self) -> None:
        """Ask whether everything goes on.

        Raises:
            Unavailable: something is stuck that only a restart helps.
        """
        lateness = max(self._thread.seconds, *(p.lateness for p in self.processes))
        if lateness > STUCK_SECONDS:
            raise Unavailable(f"side work has been stuck for {lateness:.0f} seconds")

    def close(self) -> None:
        """End everything; waits for no work."""
        self._thread.close()
        for process in self.processes:
            process.close()


class _Thread:
    """A thread that the interpreter does not wait for when it exits."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """How long the present piece of work has taken."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    async def run(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(error: BaseException | None, result: Any) -> None:
            if future.done():  # nobody waits any more
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
    """Return what `work` returns, which is cancelled where the client leaves first."""
    wait_left = LEAVING.get()
    if wait_left is None:
        return await work
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(wait_left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
