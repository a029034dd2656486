"""Inspects the KV canary's findings of a step before any of its tokens is used."""

from __future__ import annotations

import logging
import time
from collections import Counter as CountsOf
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec

from kv_canary.checks import EVERY_REASON, damage_of, reasons_where
from kv_canary.findings import RING, parse_verdicts
from kv_canary.records import Counter, Ring
from kv_canary.reporter import CanaryViolation, as_error
from kv_canary.violation import POOLS
from sglang.srt.kv_canary.config import CanaryMode
from sglang.srt.kv_canary.runner.details import MAX_NAMESPACES, HostBooks
from sglang.srt.managers.scheduler.blame import Fact, StepDamage
from sglang.srt.managers.scheduler.heal_stats import heal_outcome
from sglang.srt.managers.scheduler.result_faults import (
    find_result_faults,
    idle_fault,
)
from sglang.srt.managers.scheduler.shared_pattern import SharedPattern
from sglang.srt.managers.scheduler.slot_owners import SlotOwners

if TYPE_CHECKING:
    from kv_canary.reporter import Finding
    from kv_canary.violation import Violation
    from sglang.srt.distributed.parallel_state import TensorParallelGroup
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.managers.batch.forward_result import GenerationBatchResult
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import LaunchRecord, StepStart
    from sglang.srt.managers.messages.io_struct import SchedulerStats
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.groups.slots import GroupSlots
    from sglang.srt.mem_cache.quarantine import SlotPattern

logger = logging.getLogger(__name__)

_ALONE = reasons_where(lambda check: check.ends_alone)

_Seen = tuple[list[Fact], bool, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Damage to be healed.

    Fields:
        found: unreported violations of this rank. dropped: number of entries beyond
            them.
        damage: findings of all ranks.
        rows: rows of the step whose requests got other tokens than were sampled.
        seconds: time on rank 0's clock.
    """

    found: list[Finding]
    dropped: int
    damage: StepDamage
    rows: tuple[int, ...] = ()
    seconds: float

    @property
    def violations(self) -> list[Violation]:
        return [finding.violation for finding in self.found]


def _are_alone(reasons: Iterable[int]) -> bool:
    """Whether these findings, if any, only end their requests."""
    return not any(found & ~_ALONE for found in reasons)


class CanaryGate:
    """Stops a step's tokens from being used if the canary found a violation.

    Args:
        managers: canary managers of the target's pool and of the draft's, if any; they
            share serials and reporter.
        requests: all unfinished requests.
        group: the ranks. Each checks its own part of the KV cache. `incidents` and
            `add_stats` cover all ranks, so all ranks must call them.
    """

    def __init__(
        self,
        managers: Sequence[CanaryManager],
        *,
        cache: BasePrefixCache,
        requests: Callable[[], Iterable[Req]],
        group: TensorParallelGroup,
    ) -> None:
        self.manager = managers[0]
        self._managers = managers
        self._cache = cache
        self._requests = requests
        self._group = group
        # The newest last. Every engine has KV that everybody shares.
        self._namespaces: dict[str | None, None] = {None: None}
        for manager in managers:
            manager.attach_radix_cache(cache)

    def admit(self, req: Req) -> None:
        """Register a request so that a report can name it."""
        self.manager.serials.add(req.serial, req.rid)
        self._namespaces.pop(req.namespace, None)
        self._namespaces[req.namespace] = None
        if len(self._namespaces) > MAX_NAMESPACES:
            del self._namespaces[next(iter(self._namespaces))]

    @property
    def heals(self) -> bool:
        """Whether findings that can be healed are returned for healing."""
        return self.manager.config.mode is CanaryMode.HEAL

    def inspect(self, result: GenerationBatchResult) -> Sighting | None:
        """Inspect the findings of a step before any of its tokens is used.

        Returns:
            The damage to heal, in `heal`. In `raise`, damage that only ends its
            requests (`end_alone`). Otherwise None.

        Raises:
            CanaryViolation: any other violation was found and the mode is `raise`.
        """
        # A prefill's result does not have the draft's findings yet.
        findings = self._united(result.findings)
        found = []
        for manager, words in zip(self._managers, findings, strict=False):
            if manager.take(words):
                found.append(manager)
        if not found:
            return None
        verdicts = [parse_verdicts(words) for words in findings]
        if self.heals:
            return self._sight(verdicts)
        is_raise = self.manager.config.mode is CanaryMode.RAISE
        if is_raise and _are_alone(chain.from_iterable(verdicts)):
            return self._sight_alone(verdicts)
        self._report(found)
        return None

    def _united(self, findings: list[list[int]]) -> list[list[int]]:
        """Unite the findings of all ranks, which must decide alike: on the host, for on
        the device a collective of its own would delay every step."""
        if self._group.size == 1 or not findings:
            return findings
        own = [word for words in findings for word in words[RING:]]
        united = iter(self._group.bitwise_or(own))
        return [
            words[:RING] + list(islice(united, len(words) - RING)) for words in findings
        ]

    def _sight_alone(self, verdicts: list[list[int]]) -> Sighting | None:
        """
        Raises:
            CanaryViolation: there is more than the verdicts say.
        """
        sighting = self._sight(verdicts)
        if not _are_alone(fact.reasons for fact in sighting.damage.facts):
            raise self.report_violation(sighting)
        # With overlap everything may have been read with the step before.
        return sighting if sighting.damage.facts or any(verdicts[0]) else None

    def end_alone(
        self, launched: LaunchRecord, sighting: Sighting
    ) -> list[tuple[Req, str]]:
        """Report damage that only ends its requests, and return the live ones of the
        step, each with the error that it ends with."""
        verdicts = sighting.damage.verdicts[0]
        ended = [
            (launched.reqs[row], self.why_ended(sighting, verdicts[row]))
            for row in launched.live_rows()
            if verdicts[row]
        ]
        outcome = heal_outcome(ended=[req for req, _ in ended], num_cut=0)
        self.publish(sighting, outcome)
        return ended

    def why_ended(
        self, sighting: Sighting, reasons: int, *, recomputed: int = 0
    ) -> str:
        """Return the error of a request that ends because of damage that has yet to be
        published.

        Args:
            recomputed: how often it was recomputed in vain.
        """
        what, times = damage_of(reasons), f"{recomputed} times"
        if recomputed == 1:
            times = "once"
        again = f" again after it was recomputed {times}" if recomputed else ""
        where = ""
        if sighting.found:
            where = f"; see incident {self.manager.reporter.next_number}"
        return f"kv_canary: {what}{again}{where}"

    def confirm(
        self,
        launched: LaunchRecord,
        result: GenerationBatchResult,
        before: StepStart,
        failures: Mapping[int, Exception],
    ) -> Sighting | None:
        """Compare the tokens that requests keep from a step with the device's record,
        before any of them is sent.

        Args:
            launched: the step, after its result was processed.
            before: the step's requests before that.
            failures: errors of the host by the row whose processing raised them.

        Returns:
            As `inspect`. Its rows exclude requests that had ended before the step:
            faults in their records are reported, but they stay unchanged.

        Raises:
            CanaryViolation: a token differs and the mode is `raise`, or `heal` with
                several ranks: each host keeps its own tokens, and the other hosts do
                not know this one's.
            Exception: the first of `failures`, if it is not healed and the mode does
                not stop the engine.
        """
        for row, error in failures.items():
            logger.error(
                "kv_canary: the result of request %s could not be processed",
                launched.reqs[row].rid,
                exc_info=error,
            )
        marks = result.marks
        if marks is None:
            for error in failures.values():
                raise error
            return None
        entries = find_result_faults(launched, result, before, failures, *marks)
        if not entries:
            return None
        if self.heals and self._group.size == 1:
            rows = (entry[Ring.BATCH_ROW] for entry in entries)
            live = tuple(row for row in rows if row in before.live)
            return self._sight([], host_entries=entries, rows=live)
        owners = self._slot_owners()
        self.manager.report(
            owner_of=owners.owner_of,
            books=self._books(),
            host_entries=entries,
        )
        # The mode is `log`: half a result must not be served.
        for error in failures.values():
            raise error
        return None

    def sight_at_idle(self) -> Sighting | None:
        """Return the damage when the host's records contradict each other while nothing
        runs, or None if it is not healed.

        It is not healed with several ranks, because the other ranks' records may be
        right.
        """
        if not self.heals or self._group.size > 1:
            return None
        # The newest forward has ended and the next one has not begun.
        entry = idle_fault(forward=self.manager.clock - 1)
        return self._sight([], host_entries=[entry])

    def _sight(
        self,
        verdicts: list[list[int]],
        *,
        host_entries: Sequence[Sequence[int]] = (),
        rows: tuple[int, ...] = (),
    ) -> Sighting:
        """Read everything in the rings of all pools, on all ranks."""
        owners = self._slot_owners()
        found: list[Finding] = []
        facts: list[Fact] = []
        dropped = 0
        for manager in self._managers:
            examined = manager.examine(
                owner_of=owners.owner_of,
                books=self._books(),
                host_entries=host_entries if manager is self.manager else (),
            )
            found += examined.found
            dropped += examined.dropped
            facts += [
                Fact(
                    POOLS.index(v.worker),
                    v.reasons,
                    v.serial,
                    manager.full_slot(v),
                    manager.checkpoint_of(v),
                )
                for v in (finding.violation for finding in examined.found)
            ]
        own: _Seen = (facts, dropped > 0, time.monotonic())
        every = [
            msgspec.msgpack.decode(seen, type=_Seen)
            for seen in self._group.all_gather_bytes(msgspec.msgpack.encode(own))
        ]
        return Sighting(
            found=found,
            dropped=dropped,
            damage=StepDamage(
                facts=list(dict.fromkeys(fact for seen in every for fact in seen[0])),
                verdicts=verdicts,
                has_overflowed=any(seen[1] for seen in every),
            ),
            rows=rows,
            seconds=every[0][2],
        )

    def publish(self, sighting: Sighting, outcome: dict[str, Any]) -> None:
        """Report healed damage and what was done."""
        self.manager.reporter.publish(
            sighting.found, dropped=sighting.dropped, outcome=outcome
        )

    def report_violation(self, sighting: Sighting) -> CanaryViolation:
        """Report damage that is not healed and return its error."""
        self.manager.reporter.publish(sighting.found, dropped=sighting.dropped)
        with_tokens = self.manager.config.report_tokens
        return as_error(sighting.violations, with_tokens=with_tokens)

    def forget_rows(self, req_rows: Sequence[int]) -> None:
        """See `CanaryManager.forget_rows`."""
        for manager in self._managers:
            manager.forget_rows(req_rows)

    def patterns(self, group: GroupSlots | None) -> list[SlotPattern]:
        """Return patterns for a group's slots in all pools that have it, identical on
        every rank.

        Args:
            group: the group, or None for the primary group.
        """
        patterns = (manager.slot_pattern(group) for manager in self._managers)
        return [SharedPattern(p, self._group) for p in patterns if p is not None]

    # -- other tiers ---------------------------------------------------------------

    def settle(self) -> None:
        """Mark what was freed so far, in stream order."""
        for manager in self._managers:
            manager.settle()

    def _report(self, managers: list[CanaryManager]) -> None:
        errors, owners = [], self._slot_owners()
        for manager in managers:
            try:
                manager.report(owner_of=owners.owner_of, books=self._books())
            except CanaryViolation as error:
                # The findings in the other pool must also be reported.
                errors.append(error)
        if errors:
            # This rank's own findings come first.
            raise min(errors, key=lambda error: not error.public)

    def fail(self, error: Exception) -> None:
        """Report the findings that `error` kept from reaching the host, for example
        because the damage itself made a forward fail. A violation is already reported.

        Raises:
            CanaryViolation: there were findings and the mode is not `log`; its cause is
                `error`.
        """
        if isinstance(error, CanaryViolation):
            return
        found, config = self._drain_after(error), self.manager.config
        if found and config.mode is not CanaryMode.LOG:
            raise as_error(
                found, with_tokens=config.report_tokens, is_alone=True
            ) from error

    def _drain_after(self, error: Exception) -> list[Violation]:
        """Report the findings in all pools, if the device still answers."""
        found: list[Violation] = []
        owners = self._slot_owners()
        for manager in self._managers:
            try:
                found += manager.drain(owner_of=owners.owner_of, books=self._books())
            except Exception as lost:
                # The failure itself must be shown, and the other pool must still be
                # read.
                logger.error(
                    "kv_canary: what was found before %r cannot be read: %s",
                    error,
                    lost,
                )
        return found

    def own_incidents(self) -> list[dict[str, Any]]:
        """Return the newest incidents of this rank, oldest first."""
        return list(self.manager.reporter.incidents)

    def incidents(self) -> list[dict[str, Any]]:
        """Return the newest incidents of every rank, oldest first."""
        own = msgspec.msgpack.encode(self.own_incidents())
        found: list[dict[str, Any]] = []
        for of_rank in self._group.all_gather_bytes(own):
            found += msgspec.msgpack.decode(of_rank)
        return sorted(found, key=itemgetter("time"))

    def add_stats(self, stats: SchedulerStats) -> None:
        """Fill in the canary's numbers: violations of all ranks, but tokens and passes
        of this rank only, because every rank checks the same ones.
        """
        counters = [manager.counters for manager in self._managers]
        stats.kv_canary_protected_tokens_total = sum(
            of_pool[Counter.VERIFIED_SLOTS] for of_pool in counters
        )
        stats.kv_canary_swept_tokens_total = sum(
            of_pool[Counter.SWEPT_SLOTS] for of_pool in counters
        )
        stats.kv_canary_sweep_passes_total = sum(
            manager.num_sweep_passes for manager in self._managers
        )
        stats.kv_canary_violations_total = self._violations()

    def _violations(self) -> dict[str, int]:
        """Return violations by reason, including zeros: a missing series cannot be
        monitored.
        """
        own = msgspec.msgpack.encode(dict(self.manager.reporter.counts))
        counts: CountsOf[str] = CountsOf(dict.fromkeys(EVERY_REASON, 0))
        for of_rank in self._group.all_gather_bytes(own):
            counts.update(msgspec.msgpack.decode(of_rank, type=dict[str, int]))
        return dict(counts)

    def _slot_owners(self) -> SlotOwners:
        return SlotOwners(self._cache, self._requests)

    def _books(self) -> HostBooks:
        return HostBooks(reader_of=self._reader_of, namespaces=tuple(self._namespaces))

    def _reader_of(self, serial: int) -> Req | None:
        return next((req for req in self._requests() if req.serial == serial), None)
