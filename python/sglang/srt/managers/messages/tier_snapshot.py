"""KV outside of the device at one moment, for the inspector.

Plain data between scheduler and front.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

MAX_TRANSFERS = 100


class PlaceState(IntEnum):
    """What a place of host memory is doing: nothing; it holds a unit; which is copied
    to the device; which is still being copied here."""

    FREE = 0
    HOLDING = 1
    LOADING = 2
    WRITING = 3


class HostView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Host memory of one group of slots: its places, of `unit_bytes` each, by what they
    do. `cells` has a `PlaceState` per place, a byte each; compressed on the way to a
    page."""

    group: str
    unit_bytes: int
    free: int
    holding: int
    loading: int
    writing: int
    cells: bytes = b""


class FilesView(msgspec.Struct, kw_only=True):
    """Files of one group: their number and bytes, and the seconds since the one that
    goes next was used; units that wait to be written, of all groups."""

    group: str
    units: int
    bytes: int
    max_bytes: int
    oldest_seconds: float
    waiting: int


class TransferView(msgspec.Struct, kw_only=True):
    """Units of one request on their way between two engines.

    `room` is a number of up to 63 bits, of which a page would keep 53, so it is a text.
    `peer` is the other engine; `is_sent` tells whether this one sends. `bytes` have
    arrived, or were sent, of `total_bytes` in the first group of slots. `state` is in
    words.
    """

    room: str
    peer: str
    is_sent: bool
    state: str
    bytes: int
    total_bytes: int
    seconds: float


class TierSnapshot(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Host memory, files and transfers of rank 0; `transfers` are the first of
    `num_transfers`."""

    unit_tokens: int
    host: list[HostView] = []
    files: list[FilesView] = []
    transfers: list[TransferView] = []
    num_transfers: int = 0
