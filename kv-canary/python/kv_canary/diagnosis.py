"""Classes of fault, and the facts that tell them apart.

`kv_canary.checks` says which classes each check points at. This file knows no check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_canary.evidence import is_state_group
from kv_canary.records import SERIAL_MASK, WriterKind

if TYPE_CHECKING:
    from kv_canary.evidence import Evidence


def always(violation: Evidence) -> bool:
    """Apply to everything that the earlier diagnoses left."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A class of fault.

    Fields:
        name: its name; `{writer}` is the request that wrote the record.
        look_at: where the fault may be.
        when: the guide's words for `applies`; empty if the reason alone decides.
        applies: whether a violation looks like it.
    """

    name: str
    look_at: str
    when: str = ""
    applies: Callable[[Evidence], bool] = always


def is_never_written(violation: Evidence) -> bool:
    return not violation.writer.clock


def wrote_it_itself(violation: Evidence) -> bool:
    """Whether the reading or writing request wrote the record."""
    return violation.writer.serial == violation.serial & SERIAL_MASK


def is_held_once(violation: Evidence) -> bool:
    """Whether the host gave the slot only to this request, or only to the prefix
    cache."""
    owner = violation.owner
    due = () if owner.is_shared else (violation.serial,)
    return owner.is_allocated and owner.claims == due


def is_still_unwritten(violation: Evidence) -> bool:
    """Whether the slot was freed before its present owner got it.

    A slot that was freed just before this forward cannot have a new owner yet, unless a
    draft step reads it: slots for its copies are allocated after the free.
    """
    is_old = violation.writer.clock < violation.forward or violation.draft is not None
    return is_old and is_held_once(violation)


def blames_write(violation: Evidence) -> bool:
    return violation.blames_write


def goes_elsewhere(violation: Evidence) -> bool:
    """Whether the row's columns name another slot for the token."""
    return 0 <= violation.expected_slot != violation.slot


def is_padded(violation: Evidence) -> bool:
    return violation.req_row == 0


def is_left_by_former_owner(violation: Evidence) -> bool:
    """Whether a live record lies in a slot that the host gave only to the writing
    request, so that its former owner must have freed it."""
    kinds = (WriterKind.NONE, WriterKind.POISON)
    is_live = violation.writer.kind not in kinds
    return is_live and not violation.owner.is_shared and is_held_once(violation)


def is_own_prefix(violation: Evidence) -> bool:
    """Whether a record of another position lies in the reader's cached prefix."""
    has_moved = violation.found.position != violation.position
    return has_moved and violation.serial in violation.owner.prefix_of


def is_aliased(violation: Evidence) -> bool:
    """Whether another request wrote the record, in a slot that the two do not share.

    They share slots of the prefix cache, unless the record is for another position or
    lies in a slot other than the table names.
    """
    if not (violation.serial and violation.writer.serial):
        return False
    if wrote_it_itself(violation):
        return False
    has_moved = violation.found.position != violation.position
    is_elsewhere = violation.slot != violation.expected_slot
    return has_moved or is_elsewhere or not violation.owner.is_shared


def has_bytes_of_another_slot(violation: Evidence) -> bool:
    return violation.bytes_from >= 0


def is_of_state(violation: Evidence) -> bool:
    return is_state_group(violation.group)


def is_other_state_slot(violation: Evidence) -> bool:
    """Whether a recurrent state was read in another slot than the row's."""
    return is_of_state(violation) and violation.slot != violation.expected_slot


def is_copied_state(violation: Evidence) -> bool:
    return is_of_state(violation) and violation.writer.kind is WriterKind.MOVE
