"""A queue shared by clients: clients take turns, and each client's items keep order.

Knows nothing about its items.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

from sglang.srt.utils.fair_turns import FairClock, QueueFullError

Item = TypeVar("Item", bound=Hashable)


class FairQueue(Generic[Item]):
    """Items that wait for workers; may be used from any thread.

    An item may wait for several clients; it is taken once, in the first turn of any of
    them.

    Args:
        share: maximum number of workers that one client may hold at a time.
        max_per_client: maximum number of waiting items of one client.
    """

    def __init__(self, *, share: int, max_per_client: int) -> None:
        self._share = share
        self._max_per_client = max_per_client
        self._changed = threading.Condition()
        self._clock = FairClock()
        # Ordered sets.
        self._queues: dict[str, dict[Item, None]] = {}
        self._clients: dict[Item, list[str]] = {}
        self._held: Counter[str] = Counter()
        self._is_closed = False

    def put(self, client: str, item: Item) -> None:
        """Append a new item for `client`.

        Raises:
            QueueFullError: too many of the client's items are waiting.
        """
        with self._changed:
            self._append(client, item)

    def join(self, client: str, item: Item) -> None:
        """Add `client` to the clients waiting for `item`, if the item is still pending.

        Raises:
            QueueFullError: too many of the client's items are waiting.
        """
        with self._changed:
            if item in self._clients and client not in self._clients[item]:
                self._append(client, item)

    def take(self) -> tuple[str, Item] | None:
        """Wait for an item. Returns (the client whose turn it was, item), or None once
        closed.

        The caller must call `release` with the client when done.
        """
        with self._changed:
            while not self._is_closed:
                client = self._next_client()
                if client is not None:
                    item = next(iter(self._queues[client]))
                    self._clock.charge(client, 1)
                    self._remove(item)
                    self._held[client] += 1
                    return client, item
                self._changed.wait()
        return None

    def release(self, client: str) -> None:
        """Give back the worker that `client` held."""
        with self._changed:
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]
            self._changed.notify()

    def discard(self, item: Item) -> bool:
        """Remove `item`; returns False if it is not waiting (any more)."""
        with self._changed:
            return self._remove(item)

    def __len__(self) -> int:
        with self._changed:
            return len(self._clients)

    def close(self) -> None:
        """Make all workers end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _append(self, client: str, item: Item) -> None:
        queue = self._queues.get(client, {})
        if len(queue) >= self._max_per_client:
            raise QueueFullError(
                f"{len(queue)} grammars of this client wait for their compilation"
            )
        self._queues.setdefault(client, queue)[item] = None
        self._clients.setdefault(item, []).append(client)
        self._changed.notify()

    def _next_client(self) -> str | None:
        return self._clock.pick_next(
            c for c in self._queues if self._held[c] < self._share
        )

    def _remove(self, item: Item) -> bool:
        clients = self._clients.pop(item, None)
        for client in clients or ():
            del self._queues[client][item]
            if not self._queues[client]:
                del self._queues[client]
        return clients is not None
