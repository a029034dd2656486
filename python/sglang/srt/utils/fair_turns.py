"""Who is next where several clients share something: the one who has had least of it.

Knows nothing of what is shared. The order depends on the calls alone, so that all ranks
of an engine come to the same one.
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
    """As much of a client's work waits as may wait."""


class FairClock:
    """What each client has had, on one scale.

    A client that comes or comes back starts level with the one that is served now:
    idle time gives no credit, and leaving pays no debt.
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._now = 0.0

    def had(self, client: str) -> float:
        """What counts for `client`: the least is next."""
        return max(self._had.get(client, 0.0), self._now)

    def charge(self, client: str, cost: float) -> None:
        """Serve `client`, who is next, for `cost`."""
        self._now = self.had(client)
        self._had[client] = self._now + cost
        if len(self._had) > 2 * sum(had > self._now for had in self._had.values()):
            self._had = {c: had for c, had in self._had.items() if had > self._now}

    def next_of(self, clients: Iterable[str]) -> str | None:
        """The client that has had least, the first of equals; None where there is
        none."""
        return min(clients, key=self.had, default=None)


@dataclass(eq=False, slots=True, kw_only=True)
class _Waiter(Generic[Place]):
    client: str
    cost: int
    place: asyncio.Future[Place] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class FairTurns(Generic[Place]):
    """Places that clients take in turns, weighted by the cost of what they do there.

    Belongs to one thread and starts no task, so that it outlives an event loop.

    Args:
        places: each with the highest cost of a turn in it: a place for cheap turns is
            never held for long.
        max_waiting: cost of the turns of one client that may wait.
    """

    def __init__(self, places: dict[Place, float], *, max_waiting: int) -> None:
        # Cheap turns leave the other places to those that need them.
        self._places = dict(sorted(places.items(), key=lambda item: item[1]))
        self._free = set(places)
        self._max_waiting = max_waiting
        self._clock = FairClock()
        # In order within each client, and the cost of all of them.
        self._waiters: dict[str, dict[_Waiter[Place], None]] = {}
        self._waiting: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiters.values()))

    @asynccontextmanager
    async def turn(self, client: str, cost: int) -> AsyncIterator[Place]:
        """Wait for a place and hold it during the block.

        Raises:
            QueueFullError: too much of the client's work waits.
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
        """Give the free places to those whose turn it is."""
        for place, most in self._places.items():
            if place in self._free and (waiter := self._next(most)) is not None:
                self._free.discard(place)
                self._remove(waiter)
                self._clock.charge(waiter.client, waiter.cost)
                waiter.place.set_result(place)

    def _next(self, most: float) -> _Waiter[Place] | None:
        """The waiter whose turn it is, of those that cost at most `most`."""
        firsts = {
            client: first
            for client, waiters in self._waiters.items()
            if (first := next((w for w in waiters if w.cost <= most), None))
        }
        client = self._clock.next_of(firsts)
        return None if client is None else firsts[client]

    def _remove(self, waiter: _Waiter[Place]) -> None:
        waiters = self._waiters[waiter.client]
        del waiters[waiter]
        self._waiting[waiter.client] -= waiter.cost
        if not waiters:
            del self._waiters[waiter.client], self._waiting[waiter.client]
