"""The facts of one failed check, which determine its class of fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kv_canary.records import POISON_WORD, Provenance, unpack_word0

STATE = "state"
"""The group whose slots are recurrent states, each of a whole prefix."""


def is_state_group(name: str) -> bool:
    """Whether a group's slots are recurrent states. Engines with several groups number
    them."""
    return name.partition(" ")[0] == STATE


_UNKNOWN_TOKEN = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordWord:
    """Token and position of word 0, or None if it is poison or unknown."""

    token: int | None
    position: int | None

    @classmethod
    def of(cls, word: int) -> RecordWord:
        if word == POISON_WORD:
            return cls(token=None, position=None)
        token, position = unpack_word0(word)
        return cls(token=None if token == _UNKNOWN_TOKEN else token, position=position)


class Owner(NamedTuple):
    """The owner of a slot according to the host's records.

    Fields:
        text: the owner in words.
        is_shared: the prefix cache owns it, for any request.
        is_allocated: whether the allocator has given it out.
        claims: serials of the requests that hold it outside the prefix cache, one for
            each time it occurs in their rows.
        prefix_of: serials of the requests whose cached prefix contains it.
    """

    text: str
    is_shared: bool = False
    is_allocated: bool = False
    claims: tuple[int, ...] = ()
    prefix_of: frozenset[int] = frozenset()


class DraftBranch(NamedTuple):
    """A draft step, and one request's branch in it."""

    step: int
    branch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One failed check of a slot.

    Fields:
        reasons: bits of `Reason`.
        worker: "target" or "draft", whose pool it is; group: slot group, one of
            `violation.GROUPS`.
        launch: the canary's launch that found it.
        req_row, serial, rid: the request that read or wrote; rid is None if unknown or
            if there is none.
            none.
        slot, page, position: where; -1 if it does not apply.
        batch_row: row of the batch (requests x branches in a draft step), or -1 if
            there is none, as in a sweep.
        expected, found: the token and position that were due, and those in the record.
        expected_lineage, found_lineage: prefix hashes.
        writer: provenance of the found record; writer_rid: its request, if still known.
        forward: the forward that found it.
        expected_slot: slot by the device's table, or -1.
        found_fingerprint, computed_fingerprint: fingerprints of the slot's bytes.
        owner: owner of the slot.
        draft: step and branch, in a draft step.
        bytes_from: another slot that the bytes were recorded for, or -1 if unknown.
        blames_write: whether attention reads the row's column, but the forward writes
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
    bytes_from: int = -1
    blames_write: bool = False
