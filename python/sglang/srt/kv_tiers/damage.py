"""What was wrong with a unit."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sglang.srt.kv_tiers.unit import UnitKey


class DamageKind(Enum):
    """The proof that failed: the bytes are not those that were sent; the records are
    of other tokens; something is missing or of another layout."""

    BYTES = "bytes"
    IDENTITY = "identity"
    INCOMPLETE = "incomplete"


class Damage(NamedTuple):
    """A unit that did not hold what its key says.

    Fields:
        tier: where it came from: host, storage or engine.
        sender: who put it there.
        group: name of the group.
        position: first position that was due from it. slot: where to, in the group, or
            -1 if it was noticed before.
    """

    kind: DamageKind
    tier: str
    sender: str
    group: str
    key: UnitKey
    position: int
    slot: int
