"""Long pieces of the front's own work, beside its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# In bytes of a body or in tokens and log probabilities of an answer: about a
# millisecond of work.
LARGE = 1 << 14


class SideWork:
    """Runs large pieces of work in a thread, small ones at once.

    One thread: it must not take the scheduler's cores. The interpreter lets the loop in
    every few milliseconds.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="side-work")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return `work()`, which touches nothing that the loop may change meanwhile."""
        if size < LARGE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
