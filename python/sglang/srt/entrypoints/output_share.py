"""A fair share of the front's time for streams with large events.

Building and sending large events (log probabilities, long cumulative answers) takes the
event loop that all streams share. Together they get a bounded rate of bytes; small
events pay nothing. A stream that waits for its turn loses nothing: what arrives
meanwhile is merged into its next event.
"""

from __future__ import annotations

import asyncio

# About a quarter of what one core encodes of the costliest kind of event.
BYTES_PER_SECOND = 16 << 20
# Larger than an event of one token with 20 alternatives.
SMALL_EVENT_BYTES = 4096


class OutputShare:
    """The rate that all streams of a server share evenly."""

    def __init__(self, bytes_per_second: float = BYTES_PER_SECOND) -> None:
        self._rate = bytes_per_second
        self._num_waiting = 0

    async def pay(self, size: int) -> None:
        """Wait until an event of `size` bytes, which was just sent, is paid for."""
        if size <= SMALL_EVENT_BYTES:
            return
        self._num_waiting += 1
        try:
            await asyncio.sleep(size * self._num_waiting / self._rate)
        finally:
            self._num_waiting -= 1
