"""Addresses between the front and the scheduler process, and the frames on that wire.

Both directions are ZeroMQ PUSH -> PULL over ipc, with unlimited queues (the front
bounds the requests in flight). The receiver binds and the sender connects, so a message
sent before the other side is up waits in the sender. A ZeroMQ message holds one or more
frames; each frame is one msgspec message of `io_struct`, and requests that belong
together arrive as the frames of one message.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerAddresses:
    """ZeroMQ endpoints.

    Fields:
        request_endpoint: the scheduler binds a PULL socket, the front connects a PUSH.
        response_endpoint: the front binds a PULL socket, the scheduler connects a PUSH.

    Under tensor parallelism "the scheduler" is the process of rank 0.
    """

    request_endpoint: str
    response_endpoint: str

    @property
    def folder(self) -> Path:
        """The private folder that holds the sockets."""
        return Path(self.request_endpoint.removeprefix("ipc://")).parent
