"""Fair sharing between clients: the next client is the one who has had the least.

Knows nothing about what is shared. The order depends only on the calls, so all ranks of
an engine agree on it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Place = TypeVar("Place", bound=Hashable)


class QueueFullError(Exception):
    """The client's waiting work has reached its limit."""


class FairClock:
    """How much each client has had, on a common scale.

    A client that arrives or returns starts level with the one being served: idle time
    gives no credit, and leaving pays no debt.
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._now = 0.0

    def had(self, client: str) -> float:
        """Return how much `client` has had; the client with the least is next."""
        return max(self._had.get(client, 0.0), self._now)

    def charge(self, client: str, cost: float) -> None:
        """Charge `client`, who is next, for `cost`."""
        self._now = self.had(client)
        self._had[client] = self._now + cost
        if len(self._had) > 2 * sum(had > self._now for had in self._had.values()):
            self._had = {c: had for c, had in self._had.items() if had > self._now}

    def pick_next(self, clients: Iterable[str]) -> str | None:
        """Return the client that has had the least (the first of equals), or None
        without clients.
        """
        return min(clients, key=self.had, default=None)


@dataclass(eq=False, slots=True, kw_only=True)
class _Waiter(Generic[Place]):
    client: str
    cost: int
    place: asyncio.Future[Place] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class FairTurns(Generic[Place]):
    """Places that clients use in turns, weighted by the cost of their work.

    Belongs to one thread and starts no tasks, so it can outlive an event loop.

    Args:
        places: the maximum cost of a turn in each place: a place for cheap turns is
            never held for long.
        max_waiting: maximum total cost of one client's waiting turns.
    """

    def __init__(self, places: dict[Place, float], *, max_waiting: int) -> None:
        # Cheap turns leave the other places to the turns that need them.
        self._places = dict(sorted(places.items(), key=lambda item: item[1]))
        self._free = set(places)
        self._max_waiting = max_waiting
        self._clock = FairClock()
        # Waiting turns in each client's order, and their total cost.
        self._waiters: dict[str, dict[_Waiter[Place], None]] = {}
        self._waiting: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiters.values()))

    @asynccontextmanager
    async def turn(self, client: str, cost: int) -> AsyncIterator[Place]:
        """Wait for a place and hold it during the block.

        Raises:
            QueueFullError: too much of the client's work is waiting.
        """
        place = await self._wait(client, cost)
        try:
            yield place
        finally:
            self._free.add(place)
            self._grant()

    async def _wait(self, client: str, cost: int) -> Place:
        waiting = self._waiting[client]
        if waiting and waiting + cost > self._max_waiting:
            raise QueueFullError("too much work of this client waits already")
        waiter: _Waiter[Place] = _Waiter(client=client, cost=cost)
        self._waiters.setdefault(client, {})[waiter] = None
        self._waiting[client] += cost
        self._grant()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled():
                self._free.add(waiter.place.result())
                self._grant()
            else:
                self._remove(waiter)
            raise

    def _grant(self) -> None:
        """Give free places to the waiters whose turn it is."""
        for place, most in self._places.items():
            if place in self._free and (waiter := self._next(most)) is not None:
                self._free.discard(place)
                self._remove(waiter)
                self._clock.charge(waiter.client, waiter.cost)
                waiter.place.set_result(place)

    def _next(self, most: float) -> _Waiter[Place] | None:
        """Return the next waiter among those with a cost of at most `most`."""
        firsts = {
            client: first
            for client, waiters in self._waiters.items()
            if (first := next((w for w in waiters if w.cost <= most), None))
        }
        client = self._clock.pick_next(firsts)
        return None if client is None else firsts[client]

    def _remove(self, waiter: _Waiter[Place]) -> None:
        waiters = self._waiters[waiter.client]
        del waiters[waiter]
        self._waiting[waiter.client] -= waiter.cost
        if not waiters:
            del self._waiters[waiter.client], self._waiting[waiter.client]
