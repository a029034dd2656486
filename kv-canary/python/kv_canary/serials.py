"""Request ids by the serial numbers in records."""

from __future__ import annotations

from kv_canary.records import SERIAL_MASK

REMEMBERED = 65_536


class SerialMap:
    """The last `REMEMBERED` requests, by serial modulo 2^24."""

    def __init__(self) -> None:
        self._rids: dict[int, str] = {}

    def add(self, serial: int, rid: str) -> None:
        """Remember a request. The oldest one goes when the map is full."""
        key = serial & SERIAL_MASK
        self._rids.pop(key, None)
        self._rids[key] = rid
        if len(self._rids) > REMEMBERED:
            del self._rids[next(iter(self._rids))]

    def clear(self) -> None:
        """Forget all requests."""
        self._rids.clear()

    def rid(self, serial: int) -> str | None:
        """Return the request's id, or None if it is no longer known."""
        return self._rids.get(serial & SERIAL_MASK)
