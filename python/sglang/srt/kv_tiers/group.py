"""A group of slots as the tiers see it: its bytes, its records, and its places."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from sglang.srt.kv_tiers.unit import SlotTensor, UnitLayout

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.kv_tiers.places import Places
    from sglang.srt.mem_cache.page_ledger import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """A sequence from position 0 on.

    Fields:
        tokens: int64 [n], and one more than there are slots if a slot depends on the
            next token.
        salt: salt of its namespace in lineages.
    """

    tokens: IntArray
    salt: int


class SlotRecords(Protocol):
    """What a canary knows of a group's slots, in one pool.

    Attributes:
        words: int64 [slots, words] on the device.
        identity_mask: the bits of a record's first word that must be as expected.
    """

    words: Tensor
    identity_mask: int

    def expected(self, history: TokenHistory, length: int) -> IntArray:
        """Return the first two words of the records of positions 0 .. length - 1,
        int64 [length, 2]."""

    def adopt(self, slots: Tensor, words: Tensor) -> None:
        """Make `words` [k, words] the records of slots [k] int64, in stream order, as
        if they had been written there now."""


@dataclass(frozen=True)
class TierGroup:
    """Slots with one lifetime, in all pools that share them.

    Fields:
        name: name of the group, for reports.
        places: which slots a unit has.
        tensors: everything that is stored in its slots.
        records: records of its slots, one per pool; none without a canary.
    """

    name: str
    places: Places
    tensors: tuple[SlotTensor, ...]
    records: tuple[SlotRecords, ...] = ()

    @cached_property
    def layout(self) -> UnitLayout:
        records = [
            SlotTensor("records", own.words, has_layers=False) for own in self.records
        ]
        return UnitLayout(self.places.per_unit, self.tensors, tuple(records))
