"""What a prefill engine and a decode engine say to each other.

```
decode --> prefill   Hello           Ask ...            Taken ...      Cancel
prefill --> decode   Welcome|Refusal       Unit Unit ... End
```
Each message is msgpack behind its length. Nothing else of what arrives is parsed: the
bytes of a unit are copied to where they were expected, or dropped.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from sglang.srt.kv_tiers.unit import UnitKey

PROTOCOL = 2
MAX_ROOM = (1 << 63) - 1
# An `Ask` has a key of 16 bytes for each unit of the longest context.
MAX_MESSAGE_BYTES = 1 << 22


class EngineIdentity(msgspec.Struct, kw_only=True, frozen=True):
    """What two engines must have in common for one to use the other's KV. What an
    engine of another protocol leaves out has a default, so that it is refused by name.

    Fields:
        model: digest of the weights. loading: how they are loaded.
        draft_pools: pools of drafts whose KV travels, too.
        unit_tokens: tokens of a unit; page sizes of which it is a multiple may differ.
        layout: digest of the bytes of a unit: groups, tensors, records.
        transport: how the bytes of units travel.
    """

    protocol: int
    model: str = ""
    loading: str = ""
    dtype: str = ""
    kv_dtype: str = ""
    draft_pools: int = 0
    unit_tokens: int = 0
    tp_size: int = 0
    kv_canary: str = ""
    layout: str = ""
    transport: str = ""


_NAMES = {
    "model": "the weights differ: model",
    "loading": "weights are loaded with",
    "dtype": "--dtype",
    "kv_dtype": "--kv-cache-dtype",
    "draft_pools": "--speculative-algorithm, pools of drafts:",
    "unit_tokens": "--page-size, tokens of a unit:",
    "tp_size": "--tp-size",
    "kv_canary": "--kv-canary",
    "layout": "the layout of units differs: digest",
    "transport": "--disaggregation-transfer-backend",
}
# It follows from the others, unless it alone differs.
_DERIVED = "layout"


def mismatch(own: EngineIdentity, other: EngineIdentity) -> str | None:
    """Return in words how another engine differs, or None if it does not."""
    found = {
        name: f"{_NAMES.get(name, name)} {getattr(other, name)} there, {value} here"
        for name, value in msgspec.structs.asdict(own).items()
        if getattr(other, name) != value
    }
    if len(found) > 1:
        found.pop(_DERIVED, None)
    return "; ".join(found.values()) or None


class EndReason(Enum):
    """Why a sender sends no more units of a transfer."""

    COMPLETE = "complete"
    CANCELLED = "cancelled"
    UNKNOWN_ROOM = "unknown room"
    OTHER_PROMPT = "other prompt"


class Hello(msgspec.Struct, tag="hello", kw_only=True):
    """The first message of a decode engine's rank."""

    identity: EngineIdentity
    rank: int


class Welcome(msgspec.Struct, tag="welcome", kw_only=True):
    """The answer: where the same rank of the prefill engine listens, 0 for here.

    `transport` is what the receiver needs to read units; opaque here.
    """

    port: int = 0
    transport: bytes = b""


class Refusal(msgspec.Struct, tag="refusal", kw_only=True):
    """The answer to an engine whose KV is of another kind."""

    reason: str


class Ask(msgspec.Struct, tag="ask", kw_only=True):
    """Ask for units of the request that comes with a room.

    `transfer` is the receiver's number. `keys` are those of consecutive units, the
    first of which is number `first`.
    """

    transfer: int
    room: int
    first: int
    keys: list[bytes]


class Cancel(msgspec.Struct, tag="cancel", kw_only=True):
    """Send no more of a transfer."""

    transfer: int


class Taken(msgspec.Struct, tag="taken", kw_only=True):
    """The receiver has the unit that was sent with this number, or does without."""

    number: int


class Unit(msgspec.Struct, tag="unit", kw_only=True):
    """A unit. Over TCP its bytes follow.

    `number` counts what a sender sends over a connection. The unit is the one of
    `group` with `key`, in place `position` of its sequence; it lies at `address` of the
    sender. `seal` is the digest of its sums: it binds the bytes to the key.
    """

    transfer: int
    number: int
    group: int
    position: int
    key: bytes
    size: int
    seal: bytes
    address: int = 0


class Spoiled(msgspec.Struct, tag="spoiled", kw_only=True):
    """A unit was replaced while it was sent: it has not arrived, and nothing is
    wrong."""

    transfer: int
    group: int
    key: bytes


class End(msgspec.Struct, tag="end", kw_only=True):
    """The sender sends no more of a transfer."""

    transfer: int
    reason: EndReason


class Beat(msgspec.Struct, tag="beat"):
    """The sender of this lives."""


ToSender = Hello | Ask | Cancel | Taken | Beat
ToReceiver = Welcome | Refusal | Unit | Spoiled | End | Beat

encode = msgspec.msgpack.Encoder().encode
decode_to_sender = msgspec.msgpack.Decoder(ToSender).decode
decode_to_receiver = msgspec.msgpack.Decoder(ToReceiver).decode


def is_valid(ask: Ask, *, key_bytes: int) -> bool:
    """Return whether the keys and numbers of an `Ask` can be meant."""
    keys: list[UnitKey] = ask.keys
    return ask.first >= 0 and all(len(key) == key_bytes for key in keys)
