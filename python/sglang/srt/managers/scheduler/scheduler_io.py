"""Transports for messages to and from the scheduler."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING, Protocol

import zmq

from sglang.srt.managers.messages.io_struct import (
    SchedulerRequest,
    SchedulerResponse,
    decode_request,
    encode,
)

if TYPE_CHECKING:
    from sglang.srt.managers.messages.scheduler_addresses import SchedulerAddresses


_PIPE_BYTES = 1 << 16


class SchedulerIO(Protocol):
    def recv(self, *, wait_ms: int) -> list[SchedulerRequest]:
        """Return all messages that have arrived, waiting at most `wait_ms` for the
        first.
        """

    def send(self, message: SchedulerResponse) -> None:
        """Send a message; never blocks on a slow reader."""

    def wake(self) -> None:
        """End a `recv` that waits, or the next one; any thread may call it."""


class ListIO:
    """In-process transport: a test fills `requests` and reads `responses`."""

    def __init__(self) -> None:
        self.requests: deque[SchedulerRequest] = deque()
        self.responses: list[SchedulerResponse] = []

    def recv(self, *, wait_ms: int) -> list[SchedulerRequest]:
        received = list(self.requests)
        self.requests.clear()
        return received

    def send(self, message: SchedulerResponse) -> None:
        self.responses.append(message)

    def wake(self) -> None:
        pass


class NullIO:
    """Transport of a rank that does not talk to the front: there are no messages."""

    def recv(self, *, wait_ms: int) -> list[SchedulerRequest]:
        return []

    def send(self, message: SchedulerResponse) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class ZmqIO:
    """ZeroMQ PULL for requests (bound here) and PUSH for responses (connected)."""

    def __init__(self, addresses: SchedulerAddresses) -> None:
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PULL)
        self._requests.set_hwm(0)
        self._requests.bind(addresses.request_endpoint)
        self._responses = self._context.socket(zmq.PUSH)
        self._responses.set_hwm(0)
        self._responses.connect(addresses.response_endpoint)
        # A pipe, because a ZeroMQ socket belongs to one thread.
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._poller = zmq.Poller()
        self._poller.register(self._requests, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)

    def recv(self, *, wait_ms: int) -> list[SchedulerRequest]:
        received: list[SchedulerRequest] = []
        if wait_ms:
            self._poller.poll(wait_ms)
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, _PIPE_BYTES)
        while True:
            try:
                frames = self._requests.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return received
            received += map(decode_request, frames)

    def send(self, message: SchedulerResponse) -> None:
        self._responses.send(encode(message))

    def wake(self) -> None:
        # A full pipe wakes as well; a closed one has nobody to wake.
        with contextlib.suppress(OSError):
            os.write(self._waker, b"1")

    def close(self) -> None:
        """Send queued messages for at most a second, then close."""
        self._requests.close(linger=0)
        self._responses.close(linger=1000)
        # The pipe stays: a thread may still wake whoever would get its number.
        self._context.term()
