"""Transports for messages to and from the scheduler."""

from __future__ import annotations

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


class SchedulerIO(Protocol):
    def recv(self, *, wait_ms: int) -> list[SchedulerRequest]:
        """Return all messages that have arrived, waiting at most `wait_ms` for the
        first.
        """

    def send(self, message: SchedulerResponse) -> None:
        """Send a message; never blocks on a slow reader."""


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


class NullIO:
    """Transport of a rank that does not talk to the front: there are no messages."""

    def recv(self, *, wait_ms: int) -> list[SchedulerRequest]:
        return []

    def send(self, message: SchedulerResponse) -> None:
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

    def recv(self, *, wait_ms: int) -> list[SchedulerRequest]:
        received: list[SchedulerRequest] = []
        if wait_ms:
            self._requests.poll(wait_ms)
        while True:
            try:
                frames = self._requests.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return received
            received += map(decode_request, frames)

    def send(self, message: SchedulerResponse) -> None:
        self._responses.send(encode(message))

    def close(self) -> None:
        """Send queued messages for at most a second, then close."""
        self._requests.close(linger=0)
        self._responses.close(linger=1000)
        self._context.term()
