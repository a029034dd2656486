"""The class of fault that a violation looks like, and what to look at next.

`DIAGNOSES` is the table of `docs/kv_canary.md`; the first one that applies is meant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_canary.records import SERIAL_MASK, Reason, WriterKind

if TYPE_CHECKING:
    from kv_canary.evidence import Evidence

_READ = Reason.READ_SET | Reason.READ_SCRATCH
_INPUT = Reason.WRITE_TOKEN | Reason.WRITE_POSITION
_WRONG_RECORD = Reason.VERIFY_POSITION | Reason.VERIFY_TOKEN | Reason.VERIFY_LINEAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A class of fault.

    Fields:
        name: in words; `{writer}` is the request that wrote the record.
        look_at: where the fault may be.
        applies: whether a violation looks like it.
    """

    name: str
    look_at: str
    applies: Callable[[Evidence], bool]


def diagnose(violation: Evidence) -> Diagnosis:
    """The first of `DIAGNOSES` that applies."""
    return next(kind for kind in DIAGNOSES if kind.applies(violation))


def _has(reasons: Reason) -> Callable[[Evidence], bool]:
    return lambda violation: bool(violation.reasons & reasons)


def _both(
    reasons: Reason, also: Callable[[Evidence], bool]
) -> Callable[[Evidence], bool]:
    return lambda violation: bool(violation.reasons & reasons) and also(violation)


def _is_never_written(violation: Evidence) -> bool:
    return not violation.writer.clock


def _is_of_reader(violation: Evidence) -> bool:
    """Whether the record's request is the one that reads or writes."""
    return violation.writer.serial == violation.serial & SERIAL_MASK


def _is_held_once(violation: Evidence) -> bool:
    """Whether by the host's records the slot belongs to this request alone, or to the
    prefix cache alone."""
    owner = violation.owner
    due = () if owner.is_shared else (violation.serial,)
    return owner.is_allocated and owner.claims == due


def _is_still_unwritten(violation: Evidence) -> bool:
    """Whether the slot was freed before it got its present owner. It was not where it
    was freed just before this forward: only what a draft step reads may have been
    allocated since then, for a copy."""
    is_old = violation.writer.clock < violation.forward or violation.draft is not None
    return is_old and _is_held_once(violation)


def _goes_elsewhere(violation: Evidence) -> bool:
    """Whether the token belongs into another slot by the row's columns."""
    return 0 <= violation.expected_slot != violation.slot


def _is_padded(violation: Evidence) -> bool:
    return violation.req_row == 0


def _is_of_former_owner(violation: Evidence) -> bool:
    """Whether a live record lies in a slot that the host has given to the writing
    request alone: its owner had freed it."""
    kinds = (WriterKind.NONE, WriterKind.POISON)
    is_live = violation.writer.kind not in kinds
    return is_live and not violation.owner.is_shared and _is_held_once(violation)


def _is_own_prefix(violation: Evidence) -> bool:
    """Whether the record, of another position, lies in the reader's cached prefix."""
    has_moved = violation.found.position != violation.position
    return has_moved and violation.serial in violation.owner.prefix_of


def _is_aliased(violation: Evidence) -> bool:
    """Whether the record is another request's, in a slot that the two do not share.
    They share slots of the prefix cache, unless the writer wrote the record for another
    position or into another slot than the table names."""
    if not violation.serial or not violation.writer.serial or _is_of_reader(violation):
        return False
    has_moved = violation.found.position != violation.position
    is_elsewhere = violation.slot != violation.expected_slot
    return has_moved or is_elsewhere or not violation.owner.is_shared


DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis(
        name="canary launches out of order",
        look_at="a CUDA graph that was captured or replayed in part",
        applies=_has(Reason.PHASE),
    ),
    Diagnosis(
        name="row of another request",
        look_at="the order of rows when the batch was made, filtered or merged; who "
        "freed the row of req_to_token",
        applies=_has(Reason.ROW_OWNER),
    ),
    Diagnosis(
        name="the host keeps other tokens than were sampled",
        look_at="the processing of the result: rows, accept lengths, the copy to the "
        "host; a prompt whose last tokens were never prefilled",
        applies=_has(Reason.RESULT_TOKEN),
    ),
    Diagnosis(
        name="accepted tokens are no path of the tree",
        look_at="the verification: accept_index, parents, the target's choices",
        applies=_has(Reason.ACCEPT_PATH),
    ),
    Diagnosis(
        name="state of another row or iteration",
        look_at="what a draft leaves for its next forward: the relay's stash and "
        "gather, the rows of accepted nodes",
        applies=_has(Reason.CARRIED_STATE),
    ),
    Diagnosis(
        name="nodes that do not follow their tree",
        look_at="the builder of the tree: parents and tree_mask",
        applies=_has(Reason.TREE_SHAPE),
    ),
    Diagnosis(
        name="K or V was not stored",
        look_at="the kernel that stores K and V; the slots that it is given",
        applies=_has(Reason.WRITE_MISSING),
    ),
    Diagnosis(
        name="read of a slot that was never written",
        look_at="the request's row of req_to_token; a forward that skipped storing KV",
        applies=_both(Reason.VERIFY_FREED, _is_never_written),
    ),
    Diagnosis(
        name="not written since it was allocated",
        look_at="the forward, or the copy, that should have stored this position",
        applies=_both(Reason.VERIFY_FREED, _is_still_unwritten),
    ),
    Diagnosis(
        name="use after free",
        look_at="who freed the slot: `found` has its last owner, and when",
        applies=_has(Reason.VERIFY_FREED),
    ),
    Diagnosis(
        name="wrong write slot",
        look_at="out_cache_loc of this forward: the row's column names another slot",
        applies=lambda v: (
            v.blames_write
            or (bool(v.reasons & Reason.WRITE_FOREIGN) and _goes_elsewhere(v))
        ),
    ),
    Diagnosis(
        name="wrong read table",
        look_at="the attention backend's index list or page table, and its lengths",
        applies=_has(_READ),
    ),
    Diagnosis(
        name="two tokens of one forward share a slot",
        look_at="the allocator; out_cache_loc of this forward",
        applies=_has(Reason.WRITE_ALIAS),
    ),
    Diagnosis(
        name="write of a padded row outside of the scratch page",
        look_at="the padding of out_cache_loc in a graph's static inputs",
        applies=_both(Reason.WRITE_FOREIGN, _is_padded),
    ),
    Diagnosis(
        name="write into the request's own prefix",
        look_at="the allocator; the request's row of req_to_token",
        applies=_both(Reason.WRITE_FOREIGN, _is_of_reader),
    ),
    Diagnosis(
        name="freed slot was not poisoned",
        look_at="the hook that tells the canary of frees; a free that goes past it",
        applies=_both(Reason.WRITE_FOREIGN, _is_of_former_owner),
    ),
    Diagnosis(
        name="write into a slot of another owner",
        look_at="the allocator: it gave one slot to two owners",
        applies=_has(Reason.WRITE_FOREIGN),
    ),
    Diagnosis(
        name="write of a live token to the scratch page",
        look_at="the allocator; the size of the reserve for new tokens",
        applies=_has(Reason.WRITE_SCRATCH),
    ),
    Diagnosis(
        name="wrong input of the forward",
        look_at="the code that publishes tokens; the copy into a graph's static inputs",
        applies=_has(_INPUT),
    ),
    Diagnosis(
        name="torn write",
        look_at="a forward or a transfer that did not finish",
        applies=_has(Reason.VERIFY_TORN),
    ),
    Diagnosis(
        name="own prefix out of order",
        look_at="the row of req_to_token, whose cached slots are not in their order",
        applies=_both(_WRONG_RECORD, _is_own_prefix),
    ),
    Diagnosis(
        name="aliased with request {writer}",
        look_at="the allocator; the two requests' rows of req_to_token",
        applies=_both(_WRONG_RECORD, _is_aliased),
    ),
    Diagnosis(
        name="misplaced",
        look_at="positions of the forward that wrote it; offsets within a page",
        applies=_has(Reason.VERIFY_POSITION),
    ),
    Diagnosis(
        name="stale record",
        look_at="a prefix hit of other tokens; a forward that skipped storing KV",
        applies=_has(_WRONG_RECORD),
    ),
    Diagnosis(
        name="bytes changed in place",
        look_at="writes to a wrong address: padded rows, copy kernels; hardware",
        applies=lambda violation: True,
    ),
)
"""All of them, the first that applies first."""
