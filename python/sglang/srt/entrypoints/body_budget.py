"""Memory for the bodies of all requests that are read or parsed at the same time."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import Scope

from sglang.srt.managers.messages.errors import Unavailable

WAIT_SECONDS = 2.0
# Bodies up to this size are not counted: a connection buffers as much anyway, and large
# bodies must not keep ordinary requests out.
FREE_BYTES = 64 * 1024
_SCOPE_KEY = "sglang.body_lease"


class BodyBudget:
    """Hands out bytes on a first come, first served basis.

    A body takes everything it may need at once, because bodies that each held a part
    and waited for the rest would deadlock.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Wait a moment for `size` bytes.

        Raises:
            Unavailable: the bytes are in use.
        """
        if not self._waiting and size <= self._free:
            self._free -= size
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, granted)
        self._waiting.append(entry)
        try:
            await asyncio.wait([granted], timeout=WAIT_SECONDS)
        except asyncio.CancelledError:
            self._withdraw(entry)
            raise
        if not granted.done():
            in_use = self._total - self._free
            self._withdraw(entry)
            raise Unavailable(
                f"the bodies of other requests take {in_use} of {self._total} bytes "
                "(--max-total-body-bytes); try again later"
            )

    def give_back(self, size: int) -> None:
        self._free += size
        self._grant()

    def _withdraw(self, entry: tuple[int, asyncio.Future[None]]) -> None:
        if entry[1].done():
            self.give_back(entry[0])
        else:
            self._waiting.remove(entry)
            self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            size, granted = self._waiting.popleft()
            self._free -= size
            granted.set_result(None)


class BodyLease:
    """One body's share of the budget; release it once the body is parsed."""

    def __init__(self, budget: BodyBudget, size: int) -> None:
        self._budget = budget
        self._size = size
        self._is_held = False

    def attach(self, scope: Scope) -> None:
        """Let `release_body` find this lease."""
        scope[_SCOPE_KEY] = self

    async def cover(self, seen: int) -> None:
        """Hold memory for a body of which `seen` bytes have arrived.

        Raises:
            Unavailable: there is no memory left.
        """
        if seen > FREE_BYTES and not self._is_held:
            await self._budget.take(self._size)
            self._is_held = True

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._budget.give_back(self._size)


def release_body(scope: Scope) -> None:
    """Release the memory of a request's body after it is parsed."""
    lease: BodyLease | None = scope.get(_SCOPE_KEY)
    if lease is not None:
        lease.release()
