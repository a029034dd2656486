"""The last batches of KV events by sequence number, shared by two threads."""

from __future__ import annotations

from typing import NamedTuple


class LoggedBatch(NamedTuple):
    """An encoded batch.

    Fields:
        num_events: number of events in it.
        events_before: number of events in all batches before it.
    """

    seq: int
    payload: bytes
    num_events: int
    events_before: int


class EventLog:
    """A ring of batches; sequence numbers begin at 0 and have no gaps.

    One thread appends, others read; each operation is atomic.

    Args:
        size: number of batches kept.

    Attributes:
        end: the next sequence number.
        num_events: number of events in all batches so far.
    """

    def __init__(self, size: int) -> None:
        self._ring: list[LoggedBatch | None] = [None] * size
        self.num_events = 0
        self.end = 0

    def append(self, payload: bytes, *, num_events: int) -> None:
        """Log the batch with the sequence number `end`."""
        batch = LoggedBatch(self.end, payload, num_events, self.num_events)
        self._ring[self.end % len(self._ring)] = batch
        self.num_events += num_events
        # Set last, because readers expect everything below it to exist.
        self.end += 1

    def get(self, seq: int) -> LoggedBatch | None:
        """Return the batch with a sequence number below `end`, or None if no longer
        kept.
        """
        batch = self._ring[seq % len(self._ring)]
        return batch if batch is not None and batch.seq == seq else None
