"""Accepts connections up to a limit and enforces their deadlines.

asyncio's own accept loop logs thousands of errors per second when descriptors run out;
this one pauses, logs it occasionally, and continues as soon as there is room.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import socket
from collections.abc import Callable

from sglang.srt.entrypoints.http_connection import (
    HEAD_SECONDS,
    ConnectionLimits,
    HttpConnection,
)
from sglang.srt.entrypoints.spare_place import SparePlace

logger = logging.getLogger(__name__)

# Connections accepted before the loop continues with other work.
BURST = 64
# Connections whose deadlines are checked before the loop continues.
CHECKS_PER_TURN = 512
MAX_TICK_SECONDS = 1.0
RETRY_SECONDS = 1.0
LOG_SECONDS = 30.0
# Connections beyond the limit: probes are answered on them, other requests wait for a
# place, or get a 503 if still more arrive.
SPARE_PLACES = 16
# A peer whose host has vanished is noticed after about two minutes.
KEEP_ALIVE_PROBES = (
    (socket.TCP_KEEPIDLE, 60),
    (socket.TCP_KEEPINTVL, 15),
    (socket.TCP_KEEPCNT, 4),
)


class Acceptor:
    """Accepts on one listening socket, inside the asyncio loop.

    Args:
        create: creates the protocol of a new connection, which calls the given callback
            when the connection has ended. Gets a place if the connection is not
            admitted yet.
        max_connections: maximum number of admitted connections.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        create: Callable[
            [Callable[[HttpConnection], None], SparePlace | None], HttpConnection
        ],
        max_connections: int,
        limits: ConnectionLimits,
    ) -> None:
        self._listener = listener
        self._create = create
        self._max_connections = max_connections
        self._tick_seconds = min(MAX_TICK_SECONDS, limits.shortest / 4)
        self._loop = asyncio.get_running_loop()
        self._connections: set[HttpConnection] = set()
        # Places of connections that are not admitted, in order of arrival.
        self._spare: dict[HttpConnection, SparePlace] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._is_accepting = False
        self._is_full = False
        self._watching: asyncio.Task[None] | None = None
        self._next_log = 0.0

    def start(self) -> None:
        """Start accepting."""
        self._listener.setblocking(False)
        self._resume()
        self._watching = self._loop.create_task(self._watch())

    def close(self) -> None:
        """Stop accepting; open connections stay open."""
        self._is_full = False
        self._pause()
        if self._watching is not None:
            self._watching.cancel()

    async def wait_closed(self) -> None:
        """Return immediately: after `close` there is nothing to wait for."""

    # -- accepting -----------------------------------------------------------------

    def _resume(self) -> None:
        if not self._is_accepting and self._listener.fileno() >= 0:
            self._is_accepting = True
            self._is_full = False
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _pause(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        for _ in range(BURST):
            if len(self._connections) >= self._max_connections + SPARE_PLACES:
                self._pause_while_full()
                return
            try:
                accepted, _ = self._listener.accept()
            except ConnectionAbortedError:
                continue
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._pause_for_resources(error)
                return
            self._add(accepted)

    def _add(self, accepted: socket.socket) -> None:
        is_admitted = len(self._connections) < self._max_connections
        place = None if is_admitted else SparePlace()
        connection = self._create(self._on_lost, place)
        self._connections.add(connection)
        if place is not None:
            self._spare[connection] = place
            if len(self._spare) == 1:
                self._say_full()
                self._make_room()
        task = self._loop.create_task(self._open(connection, accepted))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: HttpConnection, accepted: socket.socket) -> None:
        try:
            accepted.setblocking(False)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEP_ALIVE_PROBES:
                accepted.setsockopt(socket.IPPROTO_TCP, option, value)
            await self._loop.connect_accepted_socket(lambda: connection, accepted)
        except OSError as error:
            logger.debug("a connection failed at once: %s", error)
            accepted.close()
            self._on_lost(connection)

    def _on_lost(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        place = self._spare.pop(connection, None)
        if place is not None:
            place.settle(is_granted=False)
        if self._spare and self._num_admitted < self._max_connections:
            asking = (c for c, place in self._spare.items() if place.is_awaited)
            following = next(asking, next(iter(self._spare)))
            self._spare.pop(following).settle(is_granted=True)
        if self._is_full:
            self._resume()

    @property
    def _num_admitted(self) -> int:
        return len(self._connections) - len(self._spare)

    def _pause_while_full(self) -> None:
        """Wait for room. If there is none, reject waiting connections, so that a probe
        behind them gets through.
        """
        self._pause()
        self._is_full = True
        if not self._make_room():
            for place in self._spare.values():
                if place.is_awaited:
                    place.settle(is_granted=False)
        self._loop.call_later(HEAD_SECONDS, self._look_again)

    def _look_again(self) -> None:
        if self._is_full:
            self._make_room()
            self._resume()

    def _say_full(self) -> None:
        self._log(
            f"{self._max_connections} connections are open, as many as "
            "--max-connections admits: others wait"
        )

    def _pause_for_resources(self, error: OSError) -> None:
        """Wait until the system has descriptors or memory again."""
        self._pause()
        self._log(f"no connection can be accepted ({error.strerror}): new ones wait")
        self._loop.call_later(RETRY_SECONDS, self._resume)

    def _make_room(self) -> bool:
        """Close the connections that have been idle or have owed a request head
        longest, in favor of waiting ones with a request. Returns whether there were
        any.
        """
        now = self._loop.time()
        yielding = [
            (since, id(connection), connection)
            for connection in self._connections
            if (since := connection.yields_at()) < now
        ]
        for _, _, connection in heapq.nsmallest(BURST, yielding):
            connection.make_room()
        return bool(yielding)

    def _log(self, message: str) -> None:
        if self._loop.time() >= self._next_log:
            self._next_log = self._loop.time() + LOG_SECONDS
            logger.warning("%s", message)

    # -- deadlines -----------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._tick_seconds)
            for i, connection in enumerate(list(self._connections)):
                if i % CHECKS_PER_TURN == CHECKS_PER_TURN - 1:
                    await asyncio.sleep(0)
                if connection.transport is not None:
                    self._enforce(connection)
            if self._spare:
                self._make_room()

    def _enforce(self, connection: HttpConnection) -> None:
        try:
            connection.enforce(self._loop.time())
        except Exception:
            # One bad connection must not end the deadlines of all others.
            logger.exception("a connection's deadlines cannot be checked; it is closed")
            connection.transport.abort()
