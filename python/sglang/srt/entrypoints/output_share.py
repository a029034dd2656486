"""A fair share of the front's time for streams with large events.

Building and sending large events (log probabilities, long cumulative answers) takes the
event loop that all streams share. Together they get a bounded byte rate; small events
are free. A stream that waits for its turn loses nothing: updates that arrive meanwhile
are merged into its next event.
"""

from __future__ import annotations

import asyncio

# About a quarter of the rate at which one core encodes the most expensive events.
BYTES_PER_SECOND = 16 << 20
# Larger than an event for one token with 20 alternatives.
SMALL_EVENT_BYTES = 4096


class OutputShare:
    """A byte rate that all streams of a server share evenly."""

    def __init__(self, bytes_per_second: float = BYTES_PER_SECOND) -> None:
        self._rate = bytes_per_second
        self._num_waiting = 0

    async def pay(self, size: int) -> None:
        """Wait until the event of `size` bytes just sent is paid for."""
        if size <= SMALL_EVENT_BYTES:
            return
        self._num_waiting += 1
        try:
            await asyncio.sleep(size * self._num_waiting / self._rate)
        finally:
            self._num_waiting -= 1
