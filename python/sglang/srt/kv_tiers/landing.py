"""Host memory in which units of other engines, or of files, arrive.

A range is lent to one transfer. It is free again when the transfer's receiver has let
it go and nothing can be written to it any more, whichever comes last.
"""

from __future__ import annotations

import queue
import threading
import weakref
from bisect import insort
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.utils.memory import host_bytes

if TYPE_CHECKING:
    from torch import Tensor

# Ranges begin where any word and a cache line do.
_ALIGNMENT = 64


class Range(NamedTuple):
    """Bytes [begin, end) of the landing memory."""

    begin: int
    end: int


class LandingMemory:
    """Memory of `size` bytes, lent in ranges; any thread may take and give.

    Args:
        is_pinned: whether a GPU copies from it.
        advice: what to change if it cannot be pinned.

    Attributes:
        memory: uint8 [size].

    Raises:
        OSError: there is not enough memory.
        RuntimeError: the driver cannot pin it.
    """

    def __init__(
        self,
        size: int,
        *,
        is_pinned: bool,
        advice: str = "use a smaller --disaggregation-landing-size",
    ) -> None:
        self.size = size
        self.memory = host_bytes(
            size,
            pinned_for=self if is_pinned else None,
            advice=advice,
        )
        self._lock = threading.Lock()
        self._free = [Range(0, size)]
        self._returned: queue.SimpleQueue[Range] = queue.SimpleQueue()

    @property
    def free_bytes(self) -> int:
        """Bytes that are lent to nobody."""
        self._take_returned()
        with self._lock:
            return sum(free.end - free.begin for free in self._free)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is lent."""
        return self.free_bytes == self.size

    def take(self, size: int) -> Range | None:
        """Lend `size` bytes, or return None if no free range has them."""
        self._take_returned()
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            for number, free in enumerate(self._free):
                if free.end - free.begin < size:
                    continue
                taken = Range(free.begin, free.begin + size)
                rest = Range(taken.end, free.end)
                self._free[number : number + 1] = (
                    [rest] if rest.end > rest.begin else []
                )
                return taken
        return None

    def give(self, taken: Range) -> None:
        """Take a lent range back.

        Raises:
            RuntimeError: part of it is free.
        """
        with self._lock:
            insort(self._free, taken)
            at = self._free.index(taken)
            begin, end = taken
            first, last = at, at + 1
            if at and self._free[at - 1].end >= begin:
                first, begin = at - 1, self._free[at - 1].begin
                if self._free[at - 1].end > taken.begin:
                    raise RuntimeError(f"{taken} of the landing memory is free already")
            if last < len(self._free) and self._free[last].begin <= end:
                if self._free[last].begin < end:
                    raise RuntimeError(f"{taken} of the landing memory is free already")
                end, last = self._free[last].end, last + 1
            self._free[first:last] = [Range(begin, end)]

    def lend_until(self, end_of: object, place: Range) -> None:
        """Take a lent range back when an object is gone."""
        # Objects go anywhere, also where the lock is held.
        weakref.finalize(end_of, self._returned.put, place)

    def _take_returned(self) -> None:
        while True:
            try:
                place = self._returned.get_nowait()
            except queue.Empty:
                return
            self.give(place)

    def view(self, place: Range) -> Tensor:
        """Return the bytes of a range: uint8 [n]."""
        return self.memory[place.begin : place.end]
