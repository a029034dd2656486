"""The front's ZeroMQ connection to the scheduler, inside an asyncio loop.

Sends and receives `io_struct` messages. Knows nothing about their meaning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import zmq

from sglang.srt.managers.messages.io_struct import (
    SchedulerRequest,
    SchedulerResponse,
    decode_response,
    encode,
)

if TYPE_CHECKING:
    from sglang.srt.managers.messages.scheduler_addresses import SchedulerAddresses

logger = logging.getLogger(__name__)

# Messages handled before the loop continues with other work.
BURST = 64
LINGER_MS = 500


class SchedulerClient:
    """Both sockets; call all methods on the loop's thread.

    Watches the socket's descriptor directly: a message costs one callback, and an idle
    connection costs nothing.
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
        self._requests.connect(addresses.request_endpoint)
        self._responses = self._context.socket(zmq.PULL)
        self._responses.bind(addresses.response_endpoint)
        self._loop = asyncio.get_running_loop()
        self._descriptor = self._responses.fileno()
        self._loop.add_reader(self._descriptor, self._drain)
        # The descriptor signals changes only, so earlier messages must be polled.
        self._loop.call_soon(self._drain)

    def send(self, messages: Sequence[SchedulerRequest]) -> None:
        """Send `messages` as the frames of one ZeroMQ message; never blocks."""
        if messages:
            self._requests.send_multipart([encode(message) for message in messages])

    def close(self) -> None:
        """Stop watching and close, after giving sent messages a moment to arrive."""
        self._loop.remove_reader(self._descriptor)
        self._responses.close()
        self._requests.close(linger=LINGER_MS)
        self._context.term()

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
            logger.exception("a message from the scheduler cannot be read; dropped")
            return
        try:
            self._on_message(message)
        except Exception:
            # One bad message must not stop all other requests.
            logger.exception("a message from the scheduler was not handled")
