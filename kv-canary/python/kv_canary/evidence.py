"""The facts of one failed check, from which its class of fault is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kv_canary.records import POISON_WORD, Provenance, unpack_word0

_UNKNOWN_TOKEN = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordWord:
    """Token and position of word 0; None where it is poison or not known."""

    token: int | None
    position: int | None

    @classmethod
    def of(cls, word: int) -> RecordWord:
        if word == POISON_WORD:
            return cls(token=None, position=None)
        token, position = unpack_word0(word)
        return cls(token=None if token == _UNKNOWN_TOKEN else token, position=position)


class Owner(NamedTuple):
    """The owner of a slot by the host's records.

    Fields:
        text: in words.
        is_shared: the prefix cache, for any request.
        is_allocated: whether the allocator has given it out.
        claims: serials of the requests that hold it beside the prefix cache, one for
            each time that it is in their rows.
        prefix_of: serials of the requests in whose cached prefix it lies.
    """

    text: str
    is_shared: bool = False
    is_allocated: bool = False
    claims: tuple[int, ...] = ()
    prefix_of: frozenset[int] = frozenset()


class DraftBranch(NamedTuple):
    """A draft step, and a branch of a request in it."""

    step: int
    branch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One failed check of a slot.

    Fields:
        reasons: bits of `Reason`.
        worker: "target" or "draft": whose pool; group: of slots, of
            `violation.GROUPS`.
        launch: the canary's launch that found it.
        req_row, serial, rid: the request that read or wrote; rid None: not known, or
            none.
        slot, page, position: where; -1 where it does not apply.
        batch_row: row of the batch, requests x branches in a draft step; -1: none, as
            in a sweep.
        expected, found: token and position that were due and that the record holds.
        expected_lineage, found_lineage: prefix hashes.
        writer: provenance of the found record; writer_rid: its request, if still known.
        forward: the forward that found it.
        expected_slot: by the device's table, or -1.
        found_fingerprint, computed_fingerprint: of the slot's bytes.
        owner: of the slot.
        draft: in a draft step, which one and of which branch.
        blames_write: whether attention reads the row's column, and the forward writes
            to another slot.
    """

    reasons: int
    worker: str
    launch: str
    req_row: int
    serial: int
    rid: str | None
    slot: int
    page: int
    position: int
    batch_row: int
    expected: RecordWord
    found: RecordWord
    expected_lineage: int
    found_lineage: int
    writer: Provenance
    writer_rid: str | None
    forward: int
    expected_slot: int
    found_fingerprint: int
    computed_fingerprint: int
    group: str = "full"
    owner: Owner = Owner("unknown")
    draft: DraftBranch | None = None
    blames_write: bool = False
