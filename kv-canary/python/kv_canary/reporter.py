"""Turns ring entries into log lines, incidents and counts, once per damage."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter as CountsOf
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kv_canary.checks import Reason
from kv_canary.evidence import DraftBranch, Owner
from kv_canary.incident_folder import IncidentFolder
from kv_canary.records import SERIAL_MASK, Ring, unpack_word3
from kv_canary.report_log import ReportLog
from kv_canary.violation import GROUPS, Violation, parse_entry, ring_order

if TYPE_CHECKING:
    from kv_canary.serials import SerialMap

logger = logging.getLogger(__name__)

KEPT_INCIDENTS = 64
# More violations are only counted in the document; each has its line in the log.
VIOLATIONS_PER_INCIDENT = 64
REMEMBERED_KEYS = 65_536

# Returns the owner of a slot according to the host's records.
OwnerOf = Callable[[int], Owner]
# Returns the slot that a slot's bytes were recorded for, or -1.
SourceOf = Callable[[int], int]
# Returns a forward's mode by name, or "sweep", or None if it is no longer known.
ModeOf = Callable[[Violation], str | None]
# Returns the branch whose draft step found it, or None outside draft steps.
BranchOf = Callable[[Violation], DraftBranch | None]


class RecordOf(Protocol):
    def __call__(self, *, is_new_kind: bool) -> bytes | None:
        """Return the record of an incident that has just been found, or None."""


class Finding(NamedTuple):
    """A violation, and what is known about it when it is found.

    Fields:
        forward_mode: mode of the forward that found it, or None if no longer known.
        details: fields of an incident that only the host can add.
    """

    violation: Violation
    forward_mode: str | None
    details: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """How violations are reported.

    Fields:
        mode, real_data: names for incident documents.
        is_repaired: whether damage is repaired when found, so that it is not found
            twice.
        folder: receives one JSON file per incident, or None.
        with_tokens: whether reports include token ids. tokens_option: its name for
            users, if it is not the engine's flag.
        request_lines: see `ReportLog`.
        max_files: most files of this process; 0 for no limit. max_files_option: its
            name for users.
        replay_command: command that replays an incident, given its file's name.
        ring_capacity: entries of the ring. ring_capacity_option: its name for users.
    """

    mode: str = "log"
    real_data: str = "partial"
    is_repaired: bool = False
    folder: Path | None = None
    with_tokens: bool = False
    tokens_option: str = ""
    request_lines: int = 0
    max_files: int = 1000
    max_files_option: str = "max_files"
    replay_command: str = ""
    ring_capacity: int = 0
    ring_capacity_option: str = "ring_capacity"

    def incident_folder(self, rank: int) -> IncidentFolder | None:
        """Return the folder that the process of `rank` writes to, or None."""
        if self.folder is None:
            return None
        return IncidentFolder(
            self.folder,
            rank=rank,
            max_files=self.max_files,
            max_files_option=self.max_files_option,
            replay_command=self.replay_command,
        )


class CanaryViolation(RuntimeError):
    """An error of the KV cache. Its text is the report.

    Attributes:
        public: the part that any client may see; empty if another rank found it.
        is_alone: whether this rank failed alone, in the middle of a step. The other
            ranks then need not stop in the same step.
    """

    def __init__(self, text: str, *, public: str, is_alone: bool = False) -> None:
        super().__init__(text)
        self.public = public
        self.is_alone = is_alone


def _no_record(*, is_new_kind: bool) -> bytes | None:
    return None


class ViolationReporter:
    """Reports the violations of this process, once per damage.

    Args:
        page_size: slots of a page.
        serials: requests by serial.
        rank: rank of this process among those that serve one model.
        groups: names of the slot groups, by the numbers of their pools.

    Attributes:
        counts: violations by reason label.
        total: number of all violations.
        incidents: the newest documents, newest last.
        record: makes the record, written next to an incident's file, that replays it.
    """

    def __init__(
        self,
        options: ReportOptions,
        *,
        page_size: int,
        serials: SerialMap,
        rank: int = 0,
        groups: Sequence[str] = GROUPS,
    ) -> None:
        self._groups = groups
        self._options = options
        self._page_size = page_size
        self._serials = serials
        self.rank = rank
        self.record: RecordOf = _no_record
        self._seen: OrderedDict[tuple[str, int, int, int, int], None] = OrderedDict()
        self.counts: CountsOf[str] = CountsOf()
        self.total = 0
        self._num_incidents = 0
        self._log = ReportLog(
            with_tokens=options.with_tokens, request_lines=options.request_lines
        )
        self._folder = options.incident_folder(rank)
        self.incidents: deque[dict[str, Any]] = deque(maxlen=KEPT_INCIDENTS)

    def report(
        self,
        entries: Iterable[Sequence[int]],
        *,
        dropped: int = 0,
        owner_of: OwnerOf = lambda slot: Owner("unknown"),
        mode_of: ModeOf = lambda violation: None,
        branch_of: BranchOf = lambda violation: None,
        details: Callable[[Violation], dict[str, Any]] = lambda violation: {},
    ) -> list[Violation]:
        """Run `examine` and `publish`: log, count and keep the new violations, and
        return them."""
        found = self.examine(
            entries,
            owner_of=owner_of,
            mode_of=mode_of,
            branch_of=branch_of,
            details=details,
        )
        self.publish(found, dropped=dropped)
        return [finding.violation for finding in found]

    def examine(
        self,
        entries: Iterable[Sequence[int]],
        *,
        owner_of: OwnerOf,
        mode_of: ModeOf,
        branch_of: BranchOf,
        details: Callable[[Violation], dict[str, Any]],
        source_of: SourceOf = lambda slot: -1,
    ) -> list[Finding]:
        """Return the new violations, with what the host knows about them now.

        Args:
            entries: rows of the ring, in any order.
            owner_of: returns a slot's owner according to the host's records.
            mode_of: returns the mode of the forward that found a violation.
            branch_of: returns the branch of the draft step that found it.
            details: returns fields of an incident that only the host can add.
            source_of: returns the slot that a slot's bytes were recorded for, or -1.
        """
        if self._options.is_repaired:
            # A later finding is about another damage.
            self._seen.clear()
        found = [self._parse(entry) for entry in sorted(entries, key=ring_order)]
        stray = {_place(v, v.expected_slot, v.slot) for v in found if _is_stray(v)}
        fresh = [
            dataclasses.replace(
                violation,
                owner=owner_of(violation.slot),
                draft=branch_of(violation),
                bytes_from=source_of(violation.slot),
                blames_write=bool(violation.reasons & Reason.READ_SET)
                and _place(violation, violation.slot, violation.expected_slot) in stray,
            )
            for violation in found
            if self._is_new(violation)
        ]
        return [Finding(v, mode_of(v), details(v)) for v in fresh]

    def publish(
        self,
        found: Sequence[Finding],
        *,
        dropped: int = 0,
        outcome: dict[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Log, count and keep violations as one incident. Returns its document, or None
        if there are none.

        Args:
            found: result of `examine`.
            dropped: entries that did not fit the ring.
            outcome: what was done about them, for the document.
        """
        fresh = [finding.violation for finding in found]
        is_new_kind = self._log.violations(fresh)
        for violation in fresh:
            self.total += 1
            self.counts.update(violation.labels)
        if dropped:
            logger.error(
                "kv_canary: %d more violations did not fit the ring (%s=%d)",
                dropped,
                self._options.ring_capacity_option,
                self._options.ring_capacity,
            )
        if not fresh:
            return None
        incident = self._document(found, dropped, outcome)
        self.incidents.append(incident)
        file = None
        if self._folder is not None:
            beside = partial(self.record, is_new_kind=is_new_kind)
            file = self._folder.write(incident, beside=beside)
        if is_new_kind:
            self._log.explain(incident, file)
        return incident

    @property
    def next_number(self) -> int:
        """Return the number of this process's next incident."""
        return self._num_incidents + 1

    def _parse(self, entry: Sequence[int]) -> Violation:
        serials = (entry[Ring.SERIAL], unpack_word3(entry[Ring.FOUND_WORD3]).serial)
        known = {s & SERIAL_MASK: self._serials.rid(s) for s in serials}
        return parse_entry(
            entry, page_size=self._page_size, rid_of=known, groups=self._groups
        )

    def _is_new(self, violation: Violation) -> bool:
        if violation.key in self._seen:
            return False
        self._seen[violation.key] = None
        if len(self._seen) > REMEMBERED_KEYS:
            self._seen.popitem(last=False)
        return True

    def _document(
        self,
        found: Sequence[Finding],
        dropped: int,
        outcome: dict[str, Any] | None,
    ) -> dict[str, Any]:
        with_tokens, option = self._options.with_tokens, self._options.tokens_option
        first = found[0]
        self._num_incidents += 1
        return {
            "number": self._num_incidents,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "mode": self._options.mode,
            "real_data": self._options.real_data,
            "rank": self.rank,
            "forward": first.violation.forward,
            "forward_mode": first.forward_mode,
            "dropped": dropped + max(len(found) - VIOLATIONS_PER_INCIDENT, 0),
            **({"tokens_option": option} if option else {}),
            **({} if outcome is None else {"healing": outcome}),
            "violations": [
                {
                    **finding.violation.document(with_tokens=with_tokens),
                    "forward_mode": finding.forward_mode,
                    **finding.details,
                }
                for finding in _for_incident(found)
            ],
        }


def _is_stray(violation: Violation) -> bool:
    """Whether it is a write into a slot other than the row's column names."""
    wrote = violation.reasons & (Reason.WRITE_FOREIGN | Reason.WRITE_SCRATCH)
    return bool(wrote) and 0 <= violation.expected_slot != violation.slot


def _place(violation: Violation, column: int, written: int) -> tuple[object, ...]:
    """Identify a forward's new token by the slots of its row's column and of its
    write."""
    pool = (violation.worker, violation.group)
    row = (*pool, violation.forward, violation.batch_row)
    return (*row, column, written)


def _for_incident(found: Sequence[Finding]) -> list[Finding]:
    """Select those that an incident holds: the first of each request, then others."""
    firsts: dict[int, Finding] = {}
    for finding in found:
        firsts.setdefault(finding.violation.serial, finding)
    chosen = list(firsts.values())
    taken = {id(finding) for finding in chosen}
    chosen += [finding for finding in found if id(finding) not in taken]
    return chosen[:VIOLATIONS_PER_INCIDENT]


def as_error(
    violations: Sequence[Violation], *, with_tokens: bool, is_alone: bool = False
) -> CanaryViolation:
    """Return the error of mode `raise`. Without violations, another rank found some."""
    if not violations:
        return CanaryViolation(
            "kv_canary violation: found by another rank; see its log", public=""
        )
    first, others = violations[0], len(violations) - 1
    more = f" ({others} more violation(s))" if others else ""
    return CanaryViolation(
        first.line(with_tokens=with_tokens) + more,
        public=first.public_line() + more,
        is_alone=is_alone,
    )
