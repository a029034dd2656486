"""Copies of adapters to slots that graphs read, beside the forwards in progress."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch


class SlotCopies:
    """Orders copies to slots and forwards that read them. The host never waits.

    Copies have a stream of their own: one begins when the forwards that read its slot
    are done, beside forwards that read other slots, and the next forward that reads the
    slot waits for it.
    """

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream(device)
        # What is done with the slots now is behind their allocation.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._read: dict[int, torch.cuda.Event] = {}
        self._written: dict[int, torch.cuda.Event] = {}

    @contextmanager
    def writing(self, slot: int) -> Iterator[None]:
        """Scope whose work changes a slot."""
        read = self._read.pop(slot, None)
        if read is not None:
            self._stream.wait_event(read)
        with torch.cuda.stream(self._stream):
            yield
        self._written[slot] = self._stream.record_event()

    @contextmanager
    def reading(self, slots: Collection[int]) -> Iterator[None]:
        """Scope whose work on the current stream reads slots."""
        stream = torch.cuda.current_stream(self._stream.device)
        for slot in slots:
            written = self._written.pop(slot, None)
            if written is not None:
                stream.wait_event(written)
        yield
        self._read.update(dict.fromkeys(slots, stream.record_event()))
