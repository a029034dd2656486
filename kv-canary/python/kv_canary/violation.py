"""A violation: a readable ring entry, its log line and its incident document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_canary.checks import Reason, Shows, diagnose, reason_labels, reasons_where
from kv_canary.evidence import STATE, Evidence, RecordWord, is_state_group
from kv_canary.records import (
    NO_HEAD,
    SERIAL_MASK,
    TAG_LAUNCH_MASK,
    TAG_POOL_SHIFT,
    Launch,
    Phase,
    Ring,
    WriterKind,
    unpack_place,
    unpack_word3,
)

if TYPE_CHECKING:
    from kv_canary.diagnosis import Diagnosis

_MASK64 = (1 << 64) - 1
# Reasons whose words are phases, not tokens and positions.
_OF_PHASES = reasons_where(lambda check: check.shows is Shows.PHASE)
# Reasons whose words are those of a mask row.
_OF_MASKS = reasons_where(lambda check: check.shows is Shows.MASK)
POOLS = ("target", "draft")
"""Worker names by the lowest bit of a pool's number."""
GROUPS = ("full", "swa", "latent", STATE)
"""Names of slot groups by the other bits."""


def pool_number(*, is_draft: bool, group: str) -> int:
    """Return the number of a pool in the tags of its findings."""
    return int(is_draft) + len(POOLS) * GROUPS.index(group)


def _split_pool_number(pool: int, groups: Sequence[str]) -> tuple[str, str]:
    """Return worker and group of a pool's number; an unknown number stays a number."""
    group, worker = divmod(pool, len(POOLS))
    if 0 <= group < len(groups):
        return POOLS[worker], groups[group]
    return str(pool), groups[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation(Evidence):
    """One failed check of a slot, in words."""

    @property
    def labels(self) -> list[str]:
        return reason_labels(self.reasons)

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        """The key of the damage, equal for all findings of one damage by one request:
        pool, slot, the forward that wrote it, the reader, and the position if no record
        was read."""
        where = -1 if self.writer.clock else self.position
        pool = f"{self.worker}.{self.group}"
        return (pool, self.slot, self.writer.clock, self.serial, where)

    @property
    def diagnosis(self) -> str:
        """The likely class of fault, with the writer's name."""
        return self._diagnosis.name.format(writer=self.writer_rid or "unknown")

    @property
    def diagnosis_name(self) -> str:
        """The likely class of fault, one of a fixed list of names."""
        return self._diagnosis.name

    @property
    def _diagnosis(self) -> Diagnosis:
        return diagnose(self)

    @property
    def place(self) -> dict[str, int]:
        """The group's layer and, if heads were compared, the rank's KV head whose bytes
        differ, or of a state that is not finite; the first if there are several, and
        only if whole layers or heads were compared."""
        is_placed = self.launch == Launch.ATTENTION.name.lower()
        if not (is_placed or self.reasons & Reason.STATE_NOT_FINITE):
            return {}
        layer, head = unpack_place(self.found_fingerprint)
        return {"layer": layer} | ({} if head == NO_HEAD else {"kv_head": head})

    @property
    def branch(self) -> int:
        """The branch of a draft step, or -1 outside draft steps."""
        return -1 if self.draft is None else self.draft.branch

    def public_line(self) -> str:
        """Return the line for clients, which names no request and no token."""
        return (
            f"kv_canary violation: launch_tag={self.worker}.{self.launch} "
            f"group={self.group} "
            f"fail_reason={'+'.join(self.labels)} slot_idx={self.slot} "
            f"position={self.position} forward={self.forward}"
        )

    def line(self, *, with_tokens: bool) -> str:
        """Return the stable `key=value` line of the log, with -1 for a token that is
        unknown or must not be shown."""
        found, expected = self.found.token, self.expected.token
        if not with_tokens:
            found = expected = None
        values: dict[str, object] = {
            "launch_tag": f"{self.worker}.{self.launch}",
            "group": self.group,
            "fail_reason": "+".join(self.labels),
            "rid": json.dumps(self.rid),
            "slot_idx": self.slot,
            "position": self.position,
            "page": self.page,
            "branch": self.branch,
            "batch_row": self.batch_row,
            "forward": self.forward,
            "stored_token": _number(found),
            "expected_token": _number(expected),
            "stored_position": _number(self.found.position),
            "stored_lineage": f"0x{self.found_lineage & _MASK64:016x}",
            "expected_lineage": f"0x{self.expected_lineage & _MASK64:016x}",
            "expected_slot": self.expected_slot,
            "writer": _kind_name(self.writer.kind),
            "writer_forward": self.writer.clock,
            "writer_rid": json.dumps(self.writer_rid),
            "diagnosis": json.dumps(self.diagnosis),
        }
        pairs = " ".join(f"{name}={value}" for name, value in values.items())
        return f"kv_canary violation: {pairs}"

    def document(self, *, with_tokens: bool) -> dict[str, Any]:
        """Return the JSON object of an incident, with token ids only if allowed."""

        def record(word: RecordWord) -> dict[str, int | str | None]:
            if self.reasons & _OF_PHASES:
                return {"phase": _phase_name(word.token), "position": None}
            if self.reasons & _OF_MASKS:
                words = {"mask_serial": word.token, "mask_accepted": word.position}
                return {**words, "position": None}
            tokens = {"token": word.token} if with_tokens else {}
            return {**tokens, "position": word.position}

        return {
            "worker": self.worker,
            "group": self.group,
            "launch": self.launch,
            "rid": self.rid,
            "request_row": self.req_row,
            "reasons": self.labels,
            "diagnosis": self.diagnosis,
            "look_at": self._diagnosis.look_at,
            "slot": self.slot,
            "page": self.page,
            "position": self.position,
            **self.place,
            "batch_row": self.batch_row,
            **({} if self.draft is None else {"step": self.draft.step}),
            "branch": self.branch,
            "forward": self.forward,
            "expected": {
                **record(self.expected),
                "slot": self.expected_slot,
                "lineage": f"0x{self.expected_lineage & _MASK64:016x}",
                "fingerprint": f"0x{self.computed_fingerprint & _MASK64:016x}",
            },
            "found": {
                **record(self.found),
                "lineage": f"0x{self.found_lineage & _MASK64:016x}",
                "fingerprint": f"0x{self.found_fingerprint & _MASK64:016x}",
                **({} if self.bytes_from < 0 else {"bytes_of_slot": self.bytes_from}),
            },
            "writer": {
                "kind": _kind_name(self.writer.kind),
                "forward": self.writer.clock,
                "rid": self.writer_rid,
            },
            "owner": self.owner.text,
        }


# Launches of a forward in the order they run; a sweep comes before it.
_LAUNCH_ORDER = (
    Launch.SWEEP,
    Launch.VERIFY,
    Launch.HEAD,
    Launch.ATTENTION,
    Launch.TAIL,
    Launch.DRAWN,
    Launch.ACCEPT,
    Launch.RESULT,
    Launch.CARRIED,
    Launch.IDLE,
    Launch.TIER,
)


def ring_order(entry: Sequence[int]) -> tuple[int, ...]:
    """Return a sort key by forward, launch, pool, row and position, because threads of
    one launch append their entries in any order."""
    tag = entry[Ring.TAG]
    return (
        entry[Ring.CLOCK],
        _LAUNCH_ORDER.index(Launch(tag & TAG_LAUNCH_MASK)),
        tag >> TAG_POOL_SHIFT,
        entry[Ring.BATCH_ROW],
        entry[Ring.POSITION],
        *entry,
    )


def parse_entry(
    entry: Sequence[int],
    *,
    page_size: int,
    rid_of: dict[int, str | None],
    groups: Sequence[str] = GROUPS,
) -> Violation:
    """Parse a ring entry.

    Args:
        rid_of: known request ids by serial modulo 2^24.
        groups: names of the slot groups.
    """
    tag = entry[Ring.TAG]
    worker, group = _split_pool_number(tag >> TAG_POOL_SHIFT, groups)
    slot = entry[Ring.SLOT]
    if is_state_group(group):
        page_size = 1
    writer = unpack_word3(entry[Ring.FOUND_WORD3])
    launch = tag & TAG_LAUNCH_MASK
    return Violation(
        reasons=entry[Ring.REASONS],
        worker=worker,
        group=group,
        launch=Launch(launch).name.lower(),
        req_row=entry[Ring.REQ_ROW],
        serial=entry[Ring.SERIAL],
        rid=rid_of.get(entry[Ring.SERIAL] & SERIAL_MASK),
        slot=slot,
        page=slot // page_size if slot >= 0 else -1,
        position=entry[Ring.POSITION],
        # A sweep's rows are runs of cached slots.
        batch_row=-1 if launch == Launch.SWEEP else entry[Ring.BATCH_ROW],
        expected=RecordWord.of(entry[Ring.EXPECTED_WORD0]),
        found=RecordWord.of(entry[Ring.FOUND_WORD0]),
        expected_lineage=entry[Ring.EXPECTED_LINEAGE],
        found_lineage=entry[Ring.FOUND_LINEAGE],
        writer=writer,
        writer_rid=rid_of.get(writer.serial),
        forward=entry[Ring.CLOCK],
        expected_slot=entry[Ring.EXPECTED_SLOT],
        found_fingerprint=entry[Ring.FOUND_FINGERPRINT],
        computed_fingerprint=entry[Ring.COMPUTED_FINGERPRINT],
    )


def _number(value: int | None) -> object:
    return -1 if value is None else value


def _kind_name(kind: WriterKind | int) -> str:
    return kind.name.lower() if isinstance(kind, WriterKind) else str(kind)


def _phase_name(number: int | None) -> str:
    names = {phase.value: phase.name.lower() for phase in Phase}
    return str(number) if number is None else names.get(number, str(number))
