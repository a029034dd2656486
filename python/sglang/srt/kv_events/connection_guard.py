"""Controls who may connect to ZeroMQ sockets, and counts the connections.

ZeroMQ asks its guard (ZAP, RFC 27) in the handshake, before a peer gets a queue. If
there is a guard, ZeroMQ itself rejects peers of its first protocols, in which any bytes
are a greeting. Knows nothing about the sockets' purpose.
"""

from __future__ import annotations

import ipaddress
import logging
import struct
from collections.abc import Sequence

import zmq

from sglang.srt.utils.malloc import return_free_pages

logger = logging.getLogger(__name__)

# Maximum for all sockets together, including incomplete handshakes.
MAX_CONNECTIONS = 256
# When this many connections close, they leave holes in the heap.
CROWD = 64
# A peer that does not complete its handshake in this time is dropped.
HANDSHAKE_MS = 2_000
_DOMAIN = b"sglang"
_ZAP_ENDPOINT, _ZAP_VERSION = "inproc://zeromq.zap.01", b"1.0"
_EVENT = struct.Struct("=Hi")


class ConnectionGuard:
    """The guard of a context's sockets, for one thread.

    Create it before the sockets are bound, and call `turn` when one of `sockets` is
    readable.

    Args:
        allow: networks whose peers may connect by TCP; if empty, all may.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allow: Sequence[str]):
        self._context = context
        self._networks = [ipaddress.ip_network(network) for network in allow]
        self._zap = context.socket(zmq.REP)
        self._zap.bind(_ZAP_ENDPOINT)
        self._watched: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        # Descriptors of each socket.
        self._open: list[set[int]] = []
        self._is_full = False
        self._most = 0

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Guard a socket before it is bound."""
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        name = f"inproc://guard-{len(self._monitors)}"
        socket.monitor(name, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        monitor = self._context.socket(zmq.PAIR)
        # A full queue would stop ZeroMQ's own thread.
        monitor.set_hwm(0)
        monitor.connect(name)
        self._watched.append(socket)
        self._monitors.append(monitor)
        self._open.append(set())

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._zap, *self._monitors]

    @property
    def num_connections(self) -> int:
        """Number of open connections; may be called from any thread."""
        return sum(map(len, self._open))

    def turn(self) -> None:
        """Count connections, admit or reject waiting peers, and free closed
        connections.
        """
        for monitor, descriptors in zip(self._monitors, self._open, strict=True):
            while _is_readable(monitor):
                event, descriptor = _EVENT.unpack(monitor.recv_multipart()[0])
                if event == zmq.EVENT_ACCEPTED:
                    descriptors.add(descriptor)
                else:
                    descriptors.discard(descriptor)
        while _is_readable(self._zap):
            self._answer(self._zap.recv_multipart())
        # A socket that sends nothing keeps the queues of peers that have left.
        for socket in self._watched:
            socket.getsockopt(zmq.EVENTS)
        self._most = max(self._most, self.num_connections)
        if self._most >= CROWD and self.num_connections < CROWD // 2:
            self._most = 0
            return_free_pages()

    def close(self) -> None:
        """Close the guard's own sockets, after the guarded ones are closed."""
        for socket in self.sockets:
            socket.close(linger=0)

    def _answer(self, question: list[bytes]) -> None:
        _, number, _, address, *_ = question
        is_full = self.num_connections > MAX_CONNECTIONS
        if is_full and not self._is_full:
            logger.warning(
                "more than %d connections to the sockets of KV events: new ones are "
                "refused",
                MAX_CONNECTIONS,
            )
        self._is_full = is_full
        is_welcome = not is_full and self._is_allowed(address.decode())
        status = b"200" if is_welcome else b"400"
        self._zap.send_multipart([_ZAP_VERSION, number, status, b"", b"", b""])

    def _is_allowed(self, address: str) -> bool:
        """Whether a peer may connect; peers on ipc sockets have no address."""
        if not self._networks or not address:
            return True
        peer = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(peer, ipaddress.IPv6Address):
            peer = peer.ipv4_mapped or peer
        return any(peer in network for network in self._networks)


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(socket.poll(0, zmq.POLLIN))
