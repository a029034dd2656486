"""A connection between two engines: messages, and bytes that follow them.

A thread sends, and another one, the owner's, receives. Both sides send a `Beat` while
they have nothing to say, so silence means that the other side is stopped or cut off.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import msgspec

from sglang.srt.disaggregation.messages import MAX_MESSAGE_BYTES, Beat, encode

if TYPE_CHECKING:
    from sglang.srt.disaggregation.messages import ToReceiver, ToSender

M = TypeVar("M")

_LENGTH = struct.Struct("<I")
_BEAT = Beat()


class LinkLost(Exception):
    """The connection has ended; says why."""


class Pace(NamedTuple):
    """Seconds between two beats, and of silence after which a side is given up."""

    beat: float = 1.0
    silence: float = 5.0


class _Outgoing(NamedTuple):
    message: ToSender | ToReceiver
    payload: memoryview | None
    on_sent: Callable[[], None] | None


class Link(Generic[M]):
    """One side of a connection, which receives messages of type M.

    Args:
        decode: decodes a received message.
        peer: the other side, for errors.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        decode: Callable[[bytes], M],
        peer: str,
        pace: Pace,
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(pace.silence)
        self.peer = peer
        self._socket = connection
        self._decode = decode
        self._pace = pace
        self._outgoing: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    # -- sending -------------------------------------------------------------------

    def send(
        self,
        message: ToSender | ToReceiver,
        payload: memoryview | None = None,
        *,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send a message, with bytes behind it, in the background.

        Args:
            on_sent: called in another thread when `payload` is no longer read, also if
                it could not be sent.
        """
        self._outgoing.put(_Outgoing(message, payload, on_sent))

    def _write(self) -> None:
        while True:
            try:
                item = self._outgoing.get(timeout=self._pace.beat)
            except queue.Empty:
                item = _Outgoing(_BEAT, None, None)
            if item is None:
                break
            if not self._is_closed.is_set():
                self._write_one(item)
            if item.on_sent is not None:
                item.on_sent()

    def _write_one(self, item: _Outgoing) -> None:
        body = encode(item.message)
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
            if item.payload is not None:
                self._send_payload(item.payload)
        except OSError:
            self.close()

    def _send_payload(self, payload: memoryview) -> None:
        # The time-out is for progress, not for the whole.
        sent = 0
        while sent < len(payload):
            sent += self._socket.send(payload[sent:])

    # -- receiving -----------------------------------------------------------------

    def receive(self) -> M:
        """Wait for a message other than `Beat`.

        Raises:
            LinkLost: the other side has gone, is silent, or sent something else.
        """
        while True:
            head = bytearray(_LENGTH.size)
            self.receive_into(memoryview(head))
            (length,) = _LENGTH.unpack(head)
            if length > MAX_MESSAGE_BYTES:
                raise LinkLost(f"{self.peer} sent a message of {length} bytes")
            body = bytearray(length)
            self.receive_into(memoryview(body))
            try:
                message = self._decode(bytes(body))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise LinkLost(f"{self.peer} sent no valid message: {error}") from error
            if not isinstance(message, Beat):
                return message

    def receive_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes.

        Raises:
            LinkLost: they did not arrive.
        """
        filled = 0
        while filled < len(target):
            try:
                count = self._socket.recv_into(target[filled:])
            except TimeoutError as error:
                silence = self._pace.silence
                raise LinkLost(f"{self.peer} is silent for {silence:g} s") from error
            except OSError as error:
                raise LinkLost(f"{self.peer}: {error}") from error
            if not count:
                raise LinkLost(f"{self.peer} has closed the connection")
            filled += count

    def dispose(self) -> None:
        """End the connection and give it back; for the thread that receives. Before
        that, another connection could get its number."""
        self.close()
        self._writer.join()
        self._socket.close()

    def close(self) -> None:
        """End the connection; what was not sent is dropped. Any thread may do it."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        with contextlib.suppress(OSError):  # The other side may have been first.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._outgoing.put(None)
