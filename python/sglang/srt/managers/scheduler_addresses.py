"""Where the front and the scheduler process meet, and the frames on that wire.

Both ways are ZeroMQ PUSH -> PULL over ipc, unlimited in length (the front bounds the
requests in flight). The front binds, the scheduler connects. A ZeroMQ message holds one
or more frames; each frame is one msgspec message of `io_struct`, and requests that
belong together arrive as the frames of one message.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerAddresses:
    """ZeroMQ endpoints.

    Fields:
    request_endpoint: the front pushes, the scheduler pulls.
    response_endpoint: the scheduler pushes, the front pulls.
    """

    request_endpoint: str
    response_endpoint: str
