"""The front's end of the ZeroMQ wire to the scheduler, inside an asyncio loop.

Sends and receives `io_struct` messages. Knows nothing of what they mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec
import zmq

from sglang.srt.managers.io_struct import (
    SchedulerRequest,
    SchedulerResponse,
    decode_response,
    encode,
)
from sglang.srt.managers.scheduler_addresses import SchedulerAddresses

logger = logging.getLogger(__name__)

# Messages handled before other work of the loop gets its turn.
BURST = 64
RETRY_SECONDS = 0.05


class SchedulerClient:
    """Both sockets. All methods belong to the thread of the loop.

    Watches the socket's descriptor directly: a message costs one callback, and an idle
    wire costs nothing.
    """

    def __init__(
        self,
        addresses: SchedulerAddresses,
        *,
        on_message: Callable[[SchedulerResponse], None],
    ) -> None:
        self._on_message = on_message
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._context.setsockopt(zmq.SNDHWM, 0)
        self._context.setsockopt(zmq.RCVHWM, 0)
        self._requests = self._context.socket(zmq.PUSH)
        self._requests.bind(addresses.request_endpoint)
        self._backlog: list[list[bytes]] = []
        self._responses = self._context.socket(zmq.PULL)
        self._responses.bind(addresses.response_endpoint)
        self._loop = asyncio.get_running_loop()
        self._descriptor = self._responses.fileno()
        self._loop.add_reader(self._descriptor, self._drain)
        # The descriptor signals changes only: what came before the watch is asked for.
        self._loop.call_soon(self._drain)

    def send(self, messages: Sequence[SchedulerRequest]) -> None:
        """Send `messages` as the frames of one ZeroMQ message; never blocks."""
        if messages:
            self._backlog.append([encode(message) for message in messages])
            self._flush()

    async def close(self, *, linger_seconds: float = 1.0) -> None:
        """Stop watching, deliver what was sent where that is possible, close."""
        self._loop.remove_reader(self._descriptor)
        self._responses.close()
        self._requests.setsockopt(zmq.LINGER, int(linger_seconds * 1000))
        self._requests.close()
        await asyncio.to_thread(self._context.term)

    def _flush(self) -> None:
        """Messages wait here while the scheduler's socket is not connected yet."""
        while self._backlog and not self._requests.closed:
            try:
                self._requests.send_multipart(self._backlog[0], zmq.NOBLOCK)
            except zmq.Again:
                self._loop.call_later(RETRY_SECONDS, self._flush)
                return
            del self._backlog[0]

    def _drain(self) -> None:
        if self._responses.closed:
            return
        for _ in range(BURST):
            try:
                frames = self._responses.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for frame in frames:
                self._handle(frame)
        self._loop.call_soon(self._drain)

    def _handle(self, frame: bytes) -> None:
        try:
            message = decode_response(frame)
        except msgspec.DecodeError:
            logger.exception("a message of the scheduler cannot be read; dropped")
            return
        try:
            self._on_message(message)
        except Exception:
            # One bad message must not stop the wire of all other requests.
            logger.exception("a message of the scheduler was not handled")
