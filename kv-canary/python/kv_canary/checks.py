"""Every check of the canary, declared once.

`CHECKS` determines the labels in logs, metrics and incident files, the diagnosis, what
healing gives up, the words of `explain`, the guide's tables
(`scripts/generate_canary_docs.py`) and the enumeration of the C++ ops
(`scripts/generate_canary_header.py`). Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum, IntEnum, IntFlag
from typing import TYPE_CHECKING, NamedTuple

from kv_canary.diagnosis import (
    Diagnosis,
    blames_write,
    goes_elsewhere,
    has_bytes_of_another_slot,
    is_aliased,
    is_copied_state,
    is_left_by_former_owner,
    is_never_written,
    is_of_state,
    is_other_state_slot,
    is_own_prefix,
    is_padded,
    is_still_unwritten,
    wrote_it_itself,
)
from kv_canary.evidence import is_state_group
from kv_canary.records import Launch

if TYPE_CHECKING:
    from kv_canary.evidence import Evidence


class Reason(IntFlag):
    """Bits of the findings. A bit never changes, because the C++ ops are built with it.
    The lower-case names are the labels in logs, metrics and files."""

    VERIFY_LINEAGE = 1 << 0
    VERIFY_POSITION = 1 << 1
    VERIFY_TOKEN = 1 << 2
    VERIFY_REAL_KV = 1 << 3
    VERIFY_TORN = 1 << 4
    VERIFY_FREED = 1 << 5
    READ_SET = 1 << 6
    READ_SCRATCH = 1 << 7
    WRITE_FOREIGN = 1 << 8
    WRITE_ALIAS = 1 << 9
    WRITE_SCRATCH = 1 << 10
    WRITE_TOKEN = 1 << 11
    WRITE_POSITION = 1 << 12
    PHASE = 1 << 13
    ROW_OWNER = 1 << 14
    TREE_SHAPE = 1 << 15
    ACCEPT_PATH = 1 << 16
    RESULT_TOKEN = 1 << 17
    WRITE_MISSING = 1 << 18
    CARRIED_STATE = 1 << 19
    HOST_RECORDS = 1 << 20
    LOGITS_ROW = 1 << 21
    GRAMMAR_MASK = 1 << 22
    LOGITS_NOT_FINITE = 1 << 23
    SAMPLED_TOKEN = 1 << 24
    STATE_FOLDS = 1 << 25
    TIER_BYTES = 1 << 26
    TIER_IDENTITY = 1 << 27
    TIER_INCOMPLETE = 1 << 28
    STATE_NOT_FINITE = 1 << 29


def reason_labels(reasons: int) -> list[str]:
    """Return the labels of the bits that are set, in the order of `Reason`."""
    return [r.name.lower() for r in Reason if r.name is not None and reasons & r]


EVERY_REASON = tuple(reason_labels(~0))
"""The labels of all reasons."""


class Severity(IntEnum):
    """What damage puts in doubt: tokens, or only drafts, which the target still
    judges."""

    DRAFTS = 1
    TOKENS = 2


class Blames(Enum):
    """Whom healing recomputes besides the request, in the guide's words. READER: only
    the request, whose slot is damaged if its row contains it."""

    READER = ""
    HOLDER = "whoever holds the slot"
    FORWARD = "every request of the forward"


class Shows(Enum):
    """The lines that `explain` adds. A violation with several reasons shows them in
    this order, and records only if nothing else is shown."""

    PHASE = 0
    STATE = 1
    FOLDS = 2
    MASK = 3
    INPUT = 4
    WRITE = 5
    ALIAS = 6
    UNIT = 7
    RECORD = 8


class Sources(NamedTuple):
    """Where two tokens that differ come from: the due one, and the one found."""

    due: str
    found: str


RECOMPUTES = 3
_DAMAGED = "the KV cache of this request was damaged"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check.

    Fields:
        reason: its bit, whose name is its label.
        meaning: the words of `explain`. of_state: for a recurrent state, if these
            words do not fit.
        detail: what the guide adds to the meaning.
        found_by: the launches that report it.
        diagnoses: the classes of fault that it points at. The first one that applies is
            reported, and one always applies.
        blames: whom healing recomputes.
        severity: what a finding in the draft's pool puts in doubt. In the target's pool
            it is always tokens.
        shows: the lines that `explain` adds. sources: for `Shows.INPUT`.
        recomputes: how often healing recomputes a request that gains no token.
        ends_alone: whether only the request is wrong, so that `raise` ends it and goes
            on.
        damage: what the client of a request that ends is told.
        since: the version of kv-canary that added it.
    """

    reason: Reason
    meaning: str
    of_state: str = ""
    detail: str = ""
    found_by: tuple[Launch, ...]
    diagnoses: tuple[Diagnosis, ...]
    blames: Blames = Blames.READER
    severity: Severity = Severity.DRAFTS
    shows: Shows = Shows.RECORD
    sources: Sources = Sources("as published", "in the forward's inputs")
    recomputes: int = RECOMPUTES
    ends_alone: bool = False
    damage: str = _DAMAGED
    since: str = "0.1.0"

    @property
    def label(self) -> str:
        return reason_labels(self.reason)[0]

    def means(self, group: str) -> str:
        """Return the words of `explain` for a slot of this group."""
        return (
            self.of_state if self.of_state and is_state_group(group) else self.meaning
        )


_READS = (Launch.VERIFY, Launch.SWEEP)
_DRAWN = Sources("by the announced parameters", "as sampled")

# Diagnoses of several checks.
_WRONG_WRITE_SLOT = Diagnosis(
    name="wrong write slot",
    when="attention reads the row's column, and the forward writes to another slot",
    look_at="out_cache_loc of this forward: the row's column names another slot",
    applies=blames_write,
)
_WRONG_READ_TABLE = Diagnosis(
    name="wrong read table",
    look_at="the attention backend's index list or page table, and its lengths and "
    "positions",
)
_WRONG_INPUT = Diagnosis(
    name="wrong input of the forward",
    look_at="the code that publishes tokens; the copy into a graph's static inputs",
)
_OWN_PREFIX = Diagnosis(
    name="own prefix out of order",
    when="the record is of another position and lies in the request's own cached "
    "prefix",
    look_at="the row of req_to_token, whose cached slots are not in their order",
    applies=is_own_prefix,
)
_ALIASED = Diagnosis(
    name="aliased with request {writer}",
    when="X wrote the record, for another position or into a slot that X and the "
    "reader do not share through the prefix cache",
    look_at="the allocator; the two requests' rows of req_to_token",
    applies=is_aliased,
)
_STALE = Diagnosis(
    name="stale record",
    when="the position is right, the history or the token is not; also a cached prefix "
    "of other tokens",
    look_at="a prefix hit of other tokens; a forward that skipped storing KV",
)

_WRONG_STATE_SLOT = Diagnosis(
    name="wrong state slot",
    when="a recurrent state, read in another slot than the row's",
    look_at="the state slots that the layers are given: the batch's rows, the static "
    "inputs of a graph",
    applies=is_other_state_slot,
)
_OTHER_STATE = Diagnosis(
    name="state of another prefix",
    when="a recurrent state in the row's own slot",
    look_at="which checkpoint was restored, and when it was taken; the last forward "
    "that wrote the state",
    applies=is_of_state,
)

_UNIT_DETAIL = "the unit is dropped before anything of it is read, and its tokens are \
computed; in every mode"

CHECKS: tuple[Check, ...] = (
    Check(
        reason=Reason.TIER_BYTES,
        meaning="a unit of KV has other bytes in the slots that it was copied to than "
        "it had when it left its sender's",
        detail=_UNIT_DETAIL,
        found_by=(Launch.TIER,),
        diagnoses=(
            Diagnosis(
                name="bytes changed on the way",
                look_at="what else writes to the tier's memory or files; copies that "
                "were cut short or left out a layer, a head or the scales; hardware",
            ),
        ),
        shows=Shows.UNIT,
        since="0.2.0",
    ),
    Check(
        reason=Reason.TIER_IDENTITY,
        meaning="a unit of KV holds other tokens than were asked for",
        detail=_UNIT_DETAIL,
        found_by=(Launch.TIER,),
        diagnoses=(
            Diagnosis(
                name="unit of other tokens",
                look_at="when the unit was stored: before its KV was computed, or when "
                "its slots had another owner; who else uses its key; the order of "
                "pages",
            ),
        ),
        shows=Shows.UNIT,
        since="0.2.0",
    ),
    Check(
        reason=Reason.TIER_INCOMPLETE,
        meaning="a unit of KV is incomplete, or of another layout",
        detail=_UNIT_DETAIL,
        found_by=(Launch.TIER,),
        diagnoses=(
            Diagnosis(
                name="unit cut short",
                look_at="who wrote it: a full disk, a writer that died, another "
                "version, model, page size or number of ranks",
            ),
        ),
        shows=Shows.UNIT,
        since="0.2.0",
    ),
    Check(
        reason=Reason.STATE_FOLDS,
        meaning="a layer has folded another number of tokens into its state than the "
        "row has",
        detail="the kernels count what they store; recurrent states only",
        found_by=(Launch.TAIL,),
        diagnoses=(
            Diagnosis(
                name="state of one layer behind or ahead",
                look_at="the layer's calls in this forward: one was skipped or made "
                "twice, for other rows, or with other lengths",
            ),
        ),
        shows=Shows.FOLDS,
    ),
    Check(
        reason=Reason.STATE_NOT_FINITE,
        meaning="the recurrent state that the forward left has a NaN or an infinity",
        detail="in the plugin for vLLM, in the words that are summed up",
        found_by=(Launch.TAIL,),
        diagnoses=(
            Diagnosis(
                name="state that is not finite",
                look_at="the state that the request began with, and its inputs; the "
                "kernel of the layer",
            ),
        ),
        since="0.2.0",
    ),
    Check(
        reason=Reason.PHASE,
        meaning="the canary's own launches ran out of order",
        found_by=(Launch.VERIFY, Launch.HEAD, Launch.TAIL),
        diagnoses=(
            Diagnosis(
                name="canary launches out of order",
                look_at="a CUDA graph that was captured or replayed in part",
            ),
        ),
        blames=Blames.FORWARD,
        shows=Shows.PHASE,
    ),
    Check(
        reason=Reason.ROW_OWNER,
        meaning="the row of the request table belongs to another request",
        of_state="another request wrote the state",
        found_by=(Launch.HEAD, Launch.VERIFY),
        diagnoses=(
            _WRONG_STATE_SLOT,
            Diagnosis(
                name="state of another request",
                when="a recurrent state in the row's own slot",
                look_at="who else had the row; the rows of the forward that wrote the "
                "state",
                applies=is_of_state,
            ),
            Diagnosis(
                name="row of another request",
                look_at="the order of rows when the batch was made, filtered or "
                "merged; who freed the row of req_to_token",
            ),
        ),
    ),
    Check(
        reason=Reason.RESULT_TOKEN,
        meaning="the host keeps another token, or at another place, than the device "
        "sampled",
        detail="compared before any of it is sent",
        found_by=(Launch.RESULT,),
        diagnoses=(
            Diagnosis(
                name="the host keeps other tokens than were sampled",
                look_at="the processing of the result: rows, accept lengths, the copy "
                "to the host; a prompt whose last tokens were never prefilled",
            ),
        ),
        shows=Shows.INPUT,
        sources=Sources("as the device sampled", "as the host keeps"),
    ),
    Check(
        reason=Reason.HOST_RECORDS,
        meaning="the host's own records of tokens or slots contradict each other",
        detail="the engine's own checks raised an error, which is in the log",
        found_by=(Launch.RESULT, Launch.IDLE),
        diagnoses=(
            Diagnosis(
                name="records of the host contradict each other",
                look_at="the error in the log before this report: what a result was "
                "given to, or who freed and took slots",
            ),
        ),
    ),
    Check(
        reason=Reason.ACCEPT_PATH,
        meaning="an accepted token does not follow from the tree and the target",
        detail="or the verification stopped where the tree goes on with the target's "
        "choice",
        found_by=(Launch.ACCEPT,),
        diagnoses=(
            Diagnosis(
                name="accepted tokens are no path of the tree",
                look_at="the verification: accept_index, parents, the target's choices",
            ),
        ),
        shows=Shows.INPUT,
        sources=Sources("as the target chose", "among the tokens gained"),
    ),
    Check(
        reason=Reason.CARRIED_STATE,
        meaning="a draft starts from another state than was computed for it",
        detail="drafts get worse, answers stay right",
        found_by=(Launch.CARRIED,),
        diagnoses=(
            Diagnosis(
                name="state of another row or iteration",
                look_at="what a draft leaves for its next forward: the relay's stash "
                "and gather, the rows of accepted nodes, the rows that the branches of "
                "a level follow",
            ),
        ),
        # The rows that the state comes from also choose the logprobs.
        severity=Severity.TOKENS,
        shows=Shows.STATE,
    ),
    Check(
        reason=Reason.LOGITS_ROW,
        meaning="the output head read another hidden state than the token is due from",
        detail="compared by sums of the rows",
        found_by=(Launch.DRAWN,),
        diagnoses=(
            Diagnosis(
                name="logits of another row",
                look_at="logits_rows of the batch; the rows that the head is given",
            ),
        ),
        severity=Severity.TOKENS,
        shows=Shows.STATE,
    ),
    Check(
        reason=Reason.LOGITS_NOT_FINITE,
        meaning="the logits of the row have a NaN or +inf, or -inf for the token",
        found_by=(Launch.DRAWN,),
        diagnoses=(
            Diagnosis(
                name="logits that are not finite",
                look_at="weights, the prompt's values, an attention kernel that read "
                "what it must not",
            ),
        ),
        severity=Severity.TOKENS,
        shows=Shows.INPUT,
        sources=_DRAWN,
        recomputes=1,
        ends_alone=True,
        damage="the logits of this request were not finite",
    ),
    Check(
        reason=Reason.GRAMMAR_MASK,
        meaning="the grammar mask belongs to another request or an earlier state, or "
        "forbids the token",
        detail="or it is missing",
        found_by=(Launch.DRAWN,),
        diagnoses=(
            Diagnosis(
                name="wrong grammar mask",
                look_at="the order of mask rows; when the mask was made",
            ),
        ),
        severity=Severity.TOKENS,
        shows=Shows.MASK,
    ),
    Check(
        reason=Reason.SAMPLED_TOKEN,
        meaning="the request's sampling parameters do not choose this token from the "
        "logits",
        detail="or the parameters belong to another request",
        found_by=(Launch.DRAWN,),
        diagnoses=(
            Diagnosis(
                name="token of other sampling parameters",
                look_at="rows of sampling parameters, seeds and positions; the "
                "sampler's choice",
            ),
        ),
        severity=Severity.TOKENS,
        shows=Shows.INPUT,
        sources=_DRAWN,
    ),
    Check(
        reason=Reason.TREE_SHAPE,
        meaning="a node's parent or what it attends to is not the tree's",
        detail="its parent is missing, follows it or is another request's; or it "
        "attends to anything but itself and what its parent attends to",
        found_by=(Launch.HEAD,),
        diagnoses=(
            Diagnosis(
                name="nodes that do not follow their tree",
                look_at="the builder of the tree: parents and tree_mask",
            ),
        ),
    ),
    Check(
        reason=Reason.WRITE_MISSING,
        meaning="the bytes of the slot were not stored by the model",
        detail="only with `all`, which fills new slots with a sentinel first",
        found_by=(Launch.TAIL,),
        diagnoses=(
            Diagnosis(
                name="K or V was not stored",
                look_at="the kernel that stores K and V; the slots that it is given",
            ),
        ),
        blames=Blames.FORWARD,
    ),
    Check(
        reason=Reason.VERIFY_FREED,
        meaning="the slot held nothing when it was read",
        detail="it was freed, or never written",
        found_by=_READS,
        diagnoses=(
            _WRONG_STATE_SLOT,
            Diagnosis(
                name="no state in the slot",
                when="a recurrent state in the row's own slot",
                look_at="the copy from the checkpoint before this prefill, and whether "
                "the checkpoint was ever taken; who freed the request's row",
                applies=is_of_state,
            ),
            Diagnosis(
                name="read of a slot that was never written",
                when="it held nothing since the start",
                look_at="the request's row of req_to_token; a forward that skipped "
                "storing KV",
                applies=is_never_written,
            ),
            Diagnosis(
                name="not written since it was allocated",
                when="by the host's records it belongs to this request alone, or to "
                "the prefix cache alone, and was freed before it got this owner",
                look_at="the forward, or the copy, that should have stored this "
                "position",
                applies=is_still_unwritten,
            ),
            Diagnosis(
                name="use after free",
                when="otherwise; the record names the last owner",
                look_at="who freed the slot: `found` has its last owner, and when",
            ),
        ),
    ),
    Check(
        reason=Reason.READ_SET,
        meaning="attention read a slot that the request's table does not name",
        of_state="the layers get another slot than the row's",
        detail="or it missed positions, or counted them wrongly",
        found_by=_READS,
        diagnoses=(_WRONG_STATE_SLOT, _WRONG_WRITE_SLOT, _WRONG_READ_TABLE),
    ),
    Check(
        reason=Reason.READ_SCRATCH,
        meaning="attention read the scratch page",
        found_by=_READS,
        diagnoses=(_WRONG_READ_TABLE,),
    ),
    Check(
        reason=Reason.WRITE_ALIAS,
        meaning="two tokens of one forward went to the same slot",
        found_by=(Launch.TAIL,),
        diagnoses=(
            Diagnosis(
                name="two tokens of one forward share a slot",
                look_at="the allocator; out_cache_loc of this forward",
            ),
        ),
        blames=Blames.HOLDER,
        shows=Shows.ALIAS,
    ),
    Check(
        reason=Reason.WRITE_FOREIGN,
        meaning="the forward wrote into a slot that it does not own",
        detail="another owner's slot, a slot of its own prefix, or another slot than "
        "the token's column names",
        found_by=(Launch.HEAD,),
        diagnoses=(
            dataclasses.replace(
                _WRONG_WRITE_SLOT,
                when="the token's column in req_to_token names another slot",
                applies=goes_elsewhere,
            ),
            Diagnosis(
                name="write of a padded row outside of the scratch page",
                when="no request wrote",
                look_at="the padding of out_cache_loc in a graph's static inputs",
                applies=is_padded,
            ),
            Diagnosis(
                name="write into the request's own prefix",
                when="the slot has a record of the same request",
                look_at="the allocator; the request's row of req_to_token",
                applies=wrote_it_itself,
            ),
            Diagnosis(
                name="freed slot was not poisoned",
                when="the slot has a live record of another request, but by the host's "
                "records belongs to the writing one alone",
                look_at="the hook that tells the canary of frees; a free that goes "
                "past it",
                applies=is_left_by_former_owner,
            ),
            Diagnosis(
                name="write into a slot of another owner",
                when="otherwise",
                look_at="the allocator: it gave one slot to two owners",
            ),
        ),
        blames=Blames.HOLDER,
        shows=Shows.WRITE,
    ),
    Check(
        reason=Reason.WRITE_SCRATCH,
        meaning="a live token was written to the scratch page",
        found_by=(Launch.HEAD,),
        diagnoses=(
            Diagnosis(
                name="write of a live token to the scratch page",
                look_at="the allocator; the size of the reserve for new tokens",
            ),
        ),
        blames=Blames.HOLDER,
        shows=Shows.WRITE,
    ),
    Check(
        reason=Reason.WRITE_TOKEN,
        meaning="the input token differs from the one that was published (the "
        "prompt's, then the sampled ones), or from the oracle's",
        found_by=(Launch.HEAD,),
        diagnoses=(_WRONG_INPUT,),
        shows=Shows.INPUT,
    ),
    Check(
        reason=Reason.WRITE_POSITION,
        meaning="the forward got another position than its row says",
        found_by=(Launch.HEAD,),
        diagnoses=(_WRONG_INPUT,),
        shows=Shows.INPUT,
    ),
    Check(
        reason=Reason.VERIFY_TORN,
        meaning="the write of this slot was never finished",
        detail="the two halves of the record, `head` and `tail`, differ",
        found_by=_READS,
        diagnoses=(
            Diagnosis(
                name="torn write",
                look_at="a forward or a transfer that did not finish",
            ),
        ),
    ),
    Check(
        reason=Reason.VERIFY_POSITION,
        meaning="the record is of another position",
        of_state="another number of tokens is folded into the state",
        found_by=_READS,
        diagnoses=(
            _WRONG_STATE_SLOT,
            _OTHER_STATE,
            _OWN_PREFIX,
            _ALIASED,
            Diagnosis(
                name="misplaced",
                when="otherwise",
                look_at="positions of the forward that wrote it; offsets within a page",
            ),
        ),
    ),
    Check(
        reason=Reason.VERIFY_TOKEN,
        meaning="the prefix is not the request's own tokens",
        found_by=_READS,
        diagnoses=(_OWN_PREFIX, _ALIASED, _STALE),
    ),
    Check(
        reason=Reason.VERIFY_LINEAGE,
        meaning="the token's history is not the one that this row expects",
        of_state="other tokens are folded into the state than the row has",
        found_by=_READS,
        diagnoses=(_WRONG_STATE_SLOT, _OTHER_STATE, _OWN_PREFIX, _ALIASED, _STALE),
    ),
    Check(
        reason=Reason.VERIFY_REAL_KV,
        meaning="the KV bytes changed after they were written",
        of_state="the bytes of the state changed after they were written or copied, or "
        "the copy differs from its source",
        found_by=(*_READS, Launch.ATTENTION),
        diagnoses=(
            Diagnosis(
                name="bytes of a copied state differ",
                when="a recurrent state that was copied since a forward wrote it",
                look_at="the copy between a checkpoint and the row's slot; what wrote "
                "to the checkpoint meanwhile",
                applies=is_copied_state,
            ),
            Diagnosis(
                name="moved without its record",
                when="the slot has the bytes that were recorded for another slot, in "
                "all layers; plugins, with `rotate` or `all`",
                look_at="who copied these blocks: a copy of bytes must be announced",
                applies=has_bytes_of_another_slot,
            ),
            Diagnosis(
                name="bytes changed in place",
                when="the record itself is right",
                look_at="writes to a wrong address: padded rows, copy kernels; "
                "hardware",
            ),
        ),
    ),
)
"""All checks. If a violation has several reasons, the first check decides the
diagnosis."""

CHECKS_BY_LABEL = {check.label: check for check in CHECKS}

DIAGNOSES: tuple[Diagnosis, ...] = tuple(
    {kind.name: kind for check in CHECKS for kind in check.diagnoses}.values()
)
"""The classes of fault, each once, in the order of the checks."""


def diagnose(violation: Evidence) -> Diagnosis:
    """Return the class of fault that a violation looks like."""
    # A ring in damaged memory may hold bits that belong to no check.
    last = CHECKS[-1]
    check = next((c for c in CHECKS if c.reason & violation.reasons), last)
    return next(kind for kind in check.diagnoses if kind.applies(violation))


def reasons_where(condition: Callable[[Check], bool]) -> Reason:
    """Return the bits of the checks that meet a condition."""
    bits = Reason(0)
    for check in CHECKS:
        if condition(check):
            bits |= check.reason
    return bits


def recomputes(reasons: int) -> int:
    """Return how often healing recomputes a request that gains no token."""
    counts = [check.recomputes for check in CHECKS if check.reason & reasons]
    return min(counts, default=RECOMPUTES)


def damage_of(reasons: int) -> str:
    """Return what the client of a request that ends is told."""
    found = (check.damage for check in CHECKS if check.reason & reasons)
    return next(found, _DAMAGED)
