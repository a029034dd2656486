"""The last batches of KV events by sequence number, shared by two threads."""

from __future__ import annotations

from typing import NamedTuple


class LoggedBatch(NamedTuple):
    """An encoded batch.

    Fields:
        num_events: in it.
        events_before: in all batches before it.
    """

    seq: int
    payload: bytes
    num_events: int
    events_before: int


class EventLog:
    """A ring of batches; sequence numbers begin at 0 and have no gaps.

    One thread appends, others read; each step of either is atomic by itself.

    Args:
        size: batches that are kept.

    Attributes:
        end: the next sequence number.
        num_events: in all batches so far.
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
        # Last: a reader takes what is below it to be there.
        self.end += 1

    def get(self, seq: int) -> LoggedBatch | None:
        """The batch of a sequence number below `end`; None: it is kept no more."""
        batch = self._ring[seq % len(self._ring)]
        return batch if batch is not None and batch.seq == seq else None
