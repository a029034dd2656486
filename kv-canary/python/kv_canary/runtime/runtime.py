"""The canary of one pool: the same verbs in every host.

```
group.free, group.move, announce   the host's word, kept until the next forward
begin                              poison, then announcements, in stream order
  forward.before                   check what is read and where is written
  (the model)
  forward.after                    record what was stored
end                                findings start their way to the host
collect                            examine them, publish them, stop in mode `raise`
```

Groups are a list, and nothing here asks what kind a group is. A host whose findings
travel with its own results uses `examine` and `publish` instead of `end` and `collect`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import torch
from torch import Tensor

from kv_canary.native_check import check_native_kernels
from kv_canary.records import NUM_COUNTERS, Counter
from kv_canary.reporter import BranchOf, Finding, ModeOf, OwnerOf, as_error
from kv_canary.runtime.forward import ForwardLaunches, GroupT
from kv_canary.runtime.mode import Mode
from kv_canary.runtime.pending import GroupFindings, Pending, send_counts

if TYPE_CHECKING:
    from kv_canary.reporter import ViolationReporter
    from kv_canary.runtime.host import HostCapabilities
    from kv_canary.violation import Violation

logger = logging.getLogger(__name__)

_SUMMARY_FORWARDS = 10_000


class Announcement(NamedTuple):
    """Rows [R] int64 that a forward continues, and `values` [len(Expected), R] int64;
    see `launches.expect_rows`. `then`, if any, enqueues what the host does next with
    these rows."""

    rows: Tensor
    values: Tensor
    then: Callable[[], None] | None = None


class Examined(NamedTuple):
    """The findings in all rings; `dropped` counts those that did not fit."""

    found: list[Finding]
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Testimony(Generic[GroupT]):
    """What the host knows about a finding.

    Fields:
        owner_of: the owner of a slot of a group.
        mode_of: the kind of forward that found it; `Pending.mode` comes first.
        branch_of: the branch of the draft step that found it.
        details: further fields of the incident.
    """

    owner_of: Callable[[GroupT], OwnerOf]
    mode_of: ModeOf = lambda violation: violation.launch
    branch_of: BranchOf = lambda violation: None
    details: Callable[[Violation], dict[str, Any]] = lambda violation: {}


class CanaryRuntime(Generic[GroupT]):
    """Checks the groups of one pool.

    Args:
        groups: in the order of the host.
        host: what the host can do.
        mode: the reaction to a violation.
        reporter: a draft's runtime shares its target's.
        with_tokens: whether errors may hold token ids.
        heal: called with what `collect` has found, in mode `heal`.

    Raises:
        ValueError: the host cannot carry out the mode.

    Attributes:
        forward: the launches around a forward, for hosts that run one at a time.
        forwards: number of forwards that were checked.
    """

    def __init__(
        self,
        groups: Sequence[GroupT],
        *,
        host: HostCapabilities,
        mode: Mode,
        reporter: ViolationReporter,
        with_tokens: bool,
        heal: Callable[[Sequence[Violation]], None] | None = None,
    ) -> None:
        if mode not in host.modes:
            known = ", ".join(known.value for known in host.modes)
            raise ValueError(f"mode {mode.value}: this host can do {known}")
        if groups[0].state.arena.is_cpu:
            check_native_kernels()
        self.groups = groups
        self.mode = mode
        self.reporter = reporter
        self.forward = ForwardLaunches(groups)
        self.forwards = 0
        self._host = host
        self._with_tokens = with_tokens
        self._heal = heal
        self._announced: Callable[[], Announcement] | None = None
        self._pending: deque[Pending] = deque()
        # All groups count the same forwards.
        self._clock = groups[0].state.clock
        self._begun = self._clock.clone()

    # -- before a forward ----------------------------------------------------------

    def announce(self, make: Callable[[], Announcement]) -> None:
        """Remember rows of the next forward; `make` runs when they are due."""
        self._announce()
        self._announced = make

    def settle(self) -> None:
        """Enqueue what is due on the current stream: first frees, because a freed slot
        may have a new owner, then announcements."""
        for group in self.groups:
            # Asked here: a call would cost a small step more than what it finds.
            if group.freed:
                group.settle()
        if self._announced is not None:
            self._announce()

    def _announce(self) -> None:
        if self._announced is None:
            return
        make, self._announced = self._announced, None
        rows, values, then = make()
        for group in self.groups:
            group.expect(rows, values)
        if then is not None:
            then()

    def begin(self) -> None:
        """Begin a forward, in its stream."""
        self.settle()
        if self._host.captures_launches:
            self._begun.copy_(self._clock)

    def forget_rows(self, rows: Tensor) -> None:
        """Clear the verdicts of request rows [n] int64 whose requests lose them."""
        for group in self.groups:
            group.forget(rows)

    # -- after a forward -----------------------------------------------------------

    def count(self) -> None:
        """Count a forward that was checked; log the first, and a summary at times."""
        self.forwards += 1
        if self.forwards == 1:
            logger.warning("kv_canary: the first forward is checked")
        if self.forwards % _SUMMARY_FORWARDS == 0:
            logger.info("kv_canary: %s", self.summary())

    def send(
        self, *, mode: str | None = None, found: Sequence[GroupFindings] = ()
    ) -> Pending:
        """Start the findings of the forward on their way to the host.

        Args:
            mode: the kind of forward.
            found: further findings about bytes, of sweeps.
        """
        every = [
            GroupFindings(group, findings)
            for group in self.groups
            for findings in group.take_found()
        ]
        every += found
        counts = [group.state.ring_count for group in self.groups]
        counts += [findings.count.view(1) for _, findings in every]
        if self._host.captures_launches:
            counts.append(self._clock - self._begun)
        event, on_host = send_counts(torch.cat(counts))
        return Pending(event, on_host, every, self.forwards, mode)

    def end(self, pending: Pending, testimony: Testimony[GroupT]) -> None:
        """Keep what `send` returned until it arrives. On the CPU it is there at once.

        Raises:
            CanaryViolation: mode `raise`, and there are findings.
        """
        if pending.event is None:
            self.collect(pending, testimony)
        else:
            self._pending.append(pending)

    # -- findings ------------------------------------------------------------------

    def poll(self, testimony: Testimony[GroupT]) -> None:
        """Collect what has arrived of earlier forwards, without waiting.

        Raises:
            CanaryViolation: mode `raise`, and there are findings.
        """
        while self._pending and self._pending[0].has_arrived():
            self.collect(self._pending.popleft(), testimony)

    def take_pending(self) -> list[Pending]:
        """Take what must be collected before tokens may leave, in strict modes."""
        if not self.mode.is_strict:
            return []
        taken = list(self._pending)
        self._pending.clear()
        return taken

    def collect(
        self, pending: Pending, testimony: Testimony[GroupT]
    ) -> list[Violation]:
        """Report what a forward found; waits for it.

        Raises:
            CanaryViolation: mode `raise`, and there are findings.
            RuntimeError: the forward's launches did not run.
        """
        if pending.event is not None:
            pending.event.synchronize()
        counts = pending.counts
        if self._host.captures_launches:
            if not int(counts[-1]):
                raise RuntimeError(
                    f"kv_canary: a {pending.mode} forward ran that was not checked: "
                    "the engine went past the model's forward, or captured it before"
                )
            counts = counts[:-1]
        if not bool(counts.any()):
            return []
        # The clock ticks at the end of each forward.
        late = self.forwards - pending.forward + 1
        for group, findings in pending.found:
            if findings.count:
                findings.report(group.state, clock_offset=-late)
        if pending.mode is not None:
            name = pending.mode.lower()
            testimony = dataclasses.replace(testimony, mode_of=lambda violation: name)
        violations = self.publish(self.examine(testimony))
        for group in self.groups:
            group.state.verdict.zero_()
        if violations and self.mode is Mode.RAISE:
            raise self.as_error(violations)
        if violations and self.mode is Mode.HEAL and self._heal is not None:
            self._heal(violations)
        return violations

    def examine(
        self,
        testimony: Testimony[GroupT],
        host_entries: Sequence[Sequence[int]] = (),
    ) -> Examined:
        """Empty all rings and examine their entries; waits for the device.

        Args:
            host_entries: findings of the host, as entries of the first group's ring.
        """
        found: list[Finding] = []
        dropped, others = 0, list(host_entries)
        for group in self.groups:
            entries, more = group.take_entries()
            source_of = group.find_sources(entries)
            found += self.reporter.examine(
                [*entries, *others],
                owner_of=testimony.owner_of(group),
                mode_of=testimony.mode_of,
                branch_of=testimony.branch_of,
                details=testimony.details,
                source_of=source_of,
            )
            dropped, others = dropped + more, []
        return Examined(found, dropped)

    def publish(self, examined: Examined) -> list[Violation]:
        """Log, count and keep findings as one incident; returns their violations."""
        self.reporter.publish(examined.found, dropped=examined.dropped)
        return [finding.violation for finding in examined.found]

    def as_error(self, violations: Sequence[Violation]) -> Exception:
        """The error with which a mode stops the host."""
        return as_error(violations, with_tokens=self._with_tokens)

    # -- numbers -------------------------------------------------------------------

    def counters(self) -> list[int]:
        """`records.Counter` summed over the groups; waits for the device."""
        totals = [0] * NUM_COUNTERS
        for group in self.groups:
            for index, value in enumerate(group.state.counters.tolist()):
                totals[index] += value
        return totals

    def summary(self) -> str:
        return (
            f"{self.forwards} forwards checked, "
            f"{self.counters()[Counter.VERIFIED_SLOTS]} slot reads verified, "
            f"{self.reporter.total} violations"
        )
