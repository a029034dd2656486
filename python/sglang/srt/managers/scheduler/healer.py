"""Heals a damaged KV cache: contain, recompute, go on.

```
blame      who is touched: requests, cached runs, pages (blame.py)
withhold   no token of theirs is used; what was launched for them is dropped
cut        their slots are freed uncached; touched runs leave the cache
quarantine damaged pages are watched before anybody gets them    (quarantine.py)
again      they are queued first, with all the tokens that they have
bound      too often without a new token (`Check.recomputes`): an error; too often in
           all: as `raise`
```
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kv_canary.checks import recomputes
from kv_canary.reporter import CanaryViolation
from sglang.srt.managers.scheduler.blame import Blame, find_blame
from sglang.srt.managers.scheduler.heal_check import HealCheck
from sglang.srt.managers.scheduler.heal_stats import (
    HealStats,
    first_diagnosis,
    heal_outcome,
)
from sglang.srt.managers.scheduler.result_processor import ProcessedBatch
from sglang.srt.managers.scheduler.step_check import (
    StepCheck,
    check_newest,
    check_sighted,
)
from sglang.srt.mem_cache.allocator import host_array
from sglang.srt.mem_cache.common import start_over
from sglang.srt.mem_cache.quarantine import Quarantine

if TYPE_CHECKING:
    from sglang.srt.managers.batch.forward_result import GenerationBatchResult
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import LaunchRecord, StepStart
    from sglang.srt.managers.messages.io_struct import SchedulerStats
    from sglang.srt.managers.scheduler.batch_selector import BatchSelector
    from sglang.srt.managers.scheduler.canary_gate import CanaryGate, Sighting
    from sglang.srt.managers.scheduler.request_intake import RequestIntake
    from sglang.srt.managers.scheduler.result_processor import BatchResultProcessor
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.page_ledger import IntArray

logger = logging.getLogger(__name__)

WINDOW_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealLimits:
    """Bounds of healing; beyond them the engine stops as in `raise`.

    Fields:
        heals_per_minute: maximum healings per minute, or 0 for no limit.
        quarantine_share: share of the pool that may stay out of use.
        decode_reserve: slots that a request needs beyond its tokens.
    """

    heals_per_minute: int
    quarantine_share: float
    decode_reserve: int = 0


class Healer:
    """Removes damage from the engine between two steps.

    Args:
        requests: all unfinished requests.
        launches: launched batches whose results are not processed yet.
        num_forwards: returns the number of batches launched so far.

    Attributes:
        quarantine: quarantine of the primary group's damaged pages.
        group_quarantines: the same for each secondary group.
        checkpoint_quarantine: the same for checkpoints of recurrent state, if any.
        stats: statistics of healings.
    """

    def __init__(
        self,
        *,
        gate: CanaryGate,
        cache: BasePrefixCache,
        batches: BatchSelector,
        intake: RequestIntake,
        results: BatchResultProcessor,
        limits: HealLimits,
        requests: Callable[[], Iterable[Req]],
        launches: Callable[[], Iterable[LaunchRecord]],
        num_forwards: Callable[[], int],
    ) -> None:
        self._gate = gate
        self._cache = cache
        self._batches = batches
        self._intake = intake
        self._results = results
        self._limits = limits
        self._requests = requests
        self._launches = launches
        self._num_forwards = num_forwards
        self._heal_times: deque[float] = deque()
        self.quarantine = Quarantine(cache.allocator, gate.patterns(None))
        self.group_quarantines = [
            Quarantine(group, gate.patterns(group))
            for group in cache.allocator.secondary
        ]
        self.checkpoint_quarantine: Quarantine | None = None
        if cache.checkpoints is not None:
            states = cache.checkpoints.slots
            self.checkpoint_quarantine = Quarantine(states, gate.patterns(states))
        self.stats = HealStats()

    # -- a damage ------------------------------------------------------------------

    def process(
        self,
        launched: LaunchRecord,
        result: GenerationBatchResult,
        sighting: Sighting | None,
    ) -> ProcessedBatch:
        """Process the result of a step and heal the damage found in it.

        Args:
            sighting: damage found before any of the step's tokens was used.

        Raises:
            CanaryViolation: the damage cannot be healed within the limits.
            HealingError: damage was overlooked.
        """
        check_sighted(result, sighting)
        before = launched.before_result()
        failures: dict[int, Exception] = {}
        on_error, withheld = failures.__setitem__, set[int]()
        if sighting is None:
            processed = self._results.process(launched, result, on_error=on_error)
        else:
            check = HealCheck(launched, before, self._requests())
            step_check = StepCheck(launched, before, self._cache)
            with self._as_violation(sighting):
                processed, withheld = self._contain(
                    launched, result, sighting, check, on_error=on_error
                )
                step_check.check(sighting.damage, processed.reqs, withheld)
        wrong = self._gate.confirm(launched, result, before, failures)
        if wrong is None:
            check_newest(launched, result.marks)
            return processed
        with self._as_violation(wrong):
            return self._take_back(launched, processed, wrong, before, withheld)

    @contextmanager
    def _as_violation(self, sighting: Sighting) -> Iterator[None]:
        """If a healing fails, end the engine with the findings, because the host's own
        records may also be damaged.
        """
        try:
            yield
        except CanaryViolation:
            raise
        except Exception as error:
            raise self._gate.report_violation(sighting) from error

    def _contain(
        self,
        launched: LaunchRecord,
        result: GenerationBatchResult,
        sighting: Sighting,
        check: HealCheck,
        *,
        on_error: Callable[[int, Exception], None],
    ) -> tuple[ProcessedBatch, set[int]]:
        """Process a result without the touched requests, and heal them.

        Returns:
            What was processed, and the serials of the requests that were left out.
        """
        blame = self._blame(sighting, launched)
        if blame.is_empty and not sighting.found:
            # All of it was found with the previous step, after this one had been
            # launched.
            return self._results.process(launched, result, on_error=on_error), set()
        self._admit(sighting)
        # The target decides the output, so these tokens are right.
        rebuilt = {req.serial for req in blame.rebuilt}
        for req in blame.rebuilt:
            req.no_cache = True
        rows = launched.live_rows()
        early = self._results.process(
            launched,
            result,
            [row for row in rows if launched.reqs[row].serial in rebuilt],
            on_error=on_error,
        )
        check.keep_tokens(blame.rebuilt)
        withheld = {req.serial for req in blame.withheld}
        launched.dropped.update(withheld)
        if not launched.is_decode:
            blame = self._with_restored(blame)
        self._heal(blame, sighting, check)
        late = self._results.process(
            launched,
            result,
            [
                row
                for row in launched.live_rows()
                if launched.reqs[row].serial not in rebuilt
            ],
            on_error=on_error,
        )
        check.check_withheld(blame.withheld)
        processed = ProcessedBatch(
            reqs=early.reqs + late.reqs,
            num_generated=early.num_generated + late.num_generated,
        )
        return processed, withheld

    def _with_restored(self, blame: Blame) -> Blame:
        """Blame the checkpoints of recurrent state that withheld requests began from,
        too: a prefill in doubt may have restored the damage."""
        runs = self._cache.checkpoints
        if runs is None:
            return blame
        nodes = [req.last_node for req in blame.withheld]
        restored = [
            runs.slot_at(node)
            for node in nodes
            if node is not None and runs.has_checkpoint(node)
        ]
        return replace(blame, checkpoints=blame.checkpoints.union(restored))

    def _take_back(
        self,
        launched: LaunchRecord,
        processed: ProcessedBatch,
        sighting: Sighting,
        before: StepStart,
        withheld: Collection[int],
    ) -> ProcessedBatch:
        """Take back a processed step's tokens from requests that got other tokens than
        were sampled, or whose processing failed.

        Requests that had ended before the step were already answered and are not among
        the rows.

        Args:
            withheld: serials of requests that were left out of the result.
        """
        self._admit(sighting)
        check = HealCheck(launched, before, ())
        blame = self._blame(sighting, launched)
        # Their drafts alone are in doubt.
        check.keep_tokens(blame.rebuilt)
        # Others may rely on a cached prefix that has to go, such as the outputs of one
        # prompt.
        wrong = {launched.reqs[row].serial for row in sighting.rows}
        wrong |= {req.serial for req in blame.withheld}
        revived = []
        for row in sorted(before.live):
            req = launched.reqs[row]
            if req.serial not in wrong:
                continue
            if req.is_finished and not self._intake.is_unanswered(req):
                self._intake.revive(req)
                revived.append(req)
            req.rewind(min(before.lengths[row], len(req.tokens)))
        self._heal(blame, sighting, check, others=revived)
        reqs = [req for req in processed.reqs if req.serial not in wrong]
        StepCheck(launched, before).check(sighting.damage, reqs, wrong.union(withheld))
        return processed._replace(reqs=reqs)

    def heal_idle(self, error: RuntimeError) -> None:
        """Free everything while there are no requests, because the host's records
        contradict each other.

        Args:
            error: describes the contradiction.

        Raises:
            RuntimeError: `error`, if it cannot be healed.
            CanaryViolation: the limit is exceeded.
        """
        sighting = self._gate.sight_at_idle()
        if sighting is None:
            raise error
        logger.error("kv_canary: %s", error)
        self._admit(sighting)
        num_cached = self._cache.total_size()
        start_over(self._cache)
        for quarantine in self._quarantines:
            quarantine.take_again()
        self.stats.on_heal(sighting.violations, [], now=sighting.seconds)
        self._gate.publish(sighting, heal_outcome(num_cut=num_cached))
        _log(sighting, [], [], num_cached)

    def _admit(self, sighting: Sighting) -> None:
        """Count a healing against the limit.

        Raises:
            CanaryViolation: the limit is exceeded.
        """
        times, limit = self._heal_times, self._limits.heals_per_minute
        times.append(sighting.seconds)
        while times[0] <= sighting.seconds - WINDOW_SECONDS:
            times.popleft()
        if limit and len(times) > limit:
            logger.error(
                "kv_canary: more than %d healings in a minute (--kv-canary-heal-limit)"
                ": the engine stops",
                limit,
            )
            raise self._gate.report_violation(sighting)

    def _blame(self, sighting: Sighting, launched: LaunchRecord) -> Blame:
        return find_blame(
            sighting.damage,
            launched,
            requests=self._requests(),
            cache=self._cache,
            rows=sighting.rows,
        )

    # -- the steps -----------------------------------------------------------------

    def _heal(
        self,
        blame: Blame,
        sighting: Sighting,
        check: HealCheck,
        *,
        others: Sequence[Req] = (),
    ) -> None:
        """Cut, quarantine, queue again and report.

        Args:
            others: further requests to queue again, which hold no memory.
        """
        touched = [
            req
            for req in (*blame.withheld, *blame.rebuilt)
            if req.req_pool_idx and not req.is_finished
        ]
        gone = [*touched, *others]
        for launched in self._launches():
            launched.dropped.update(req.serial for req in gone)
        self._batches.take_out(gone)
        check.note_slots(blame.withheld, self._cache.req_to_token_pool)
        num_cut = self._release(touched, blame)
        again, ended = self._queue_again(gone, sighting)
        check.check(again, ended, batches=self._batches, intake=self._intake)
        manager = self._gate.manager
        check.check_cache(self._cache, manager.read_heads)
        manager.expect_again(check.noted(again).items())
        self.stats.on_heal(sighting.violations, again, now=sighting.seconds)
        self._gate.publish(
            sighting, heal_outcome(again, ended, blame=blame, num_cut=num_cut)
        )
        _log(sighting, again, ended, num_cut)

    def _release(self, touched: Sequence[Req], blame: Blame) -> int:
        """Free the memory of touched requests and cached runs, and watch the damaged
        pages and checkpoints. Returns the number of cached tokens dropped.
        """
        cache = self._cache
        secondary = cache.allocator.secondary
        in_groups = [group.map_pages(blame.pages) for group in secondary]
        self._gate.forget_rows([req.req_pool_idx for req in touched])
        own = [host_array(cache.let_go(req)) for req in touched]
        cut = host_array(cache.cut(blame.nodes))
        self._free_pages(np.concatenate([*own, cut]))
        allocator = cache.allocator
        is_free = ~allocator.owns(blame.pages)
        self.quarantine.add(blame.pages[is_free], num_forwards=self._num_forwards())
        for group, pages, quarantine in zip(
            secondary, in_groups, self.group_quarantines, strict=True
        ):
            free = pages[(pages > 0) & ~group.owns(pages)]
            quarantine.add(free, num_forwards=self._num_forwards())
        self._watch_checkpoints(blame.checkpoints)
        return len(cut)

    def _watch_checkpoints(self, damaged: Collection[int]) -> None:
        runs = self._cache.checkpoints
        if runs is None or not damaged:
            return
        runs.drop(damaged)
        slots = np.array(sorted(damaged), dtype=np.int64)
        free = slots[~runs.slots.owns(slots)]
        if self.checkpoint_quarantine is not None:
            self.checkpoint_quarantine.add(free, num_forwards=self._num_forwards())

    def _free_pages(self, slots: IntArray) -> None:
        """Free the pages of `slots` unless already free: if the host's records are
        damaged, pages may be free already or held twice.
        """
        allocator = self._cache.allocator
        is_held = np.zeros(allocator.num_pages + 1, dtype=np.bool_)
        is_held[slots // allocator.page_size] = True
        pages = np.flatnonzero(is_held)
        pages = pages[allocator.owns(pages)]
        if len(pages):
            allocator.free(torch.from_numpy(allocator.page_slots(pages)))

    def _queue_again(
        self, reqs: Collection[Req], sighting: Sighting
    ) -> tuple[list[Req], list[Req]]:
        """Queue requests before all others, in their old order.

        Returns:
            (those that are queued, those that ended).
        """
        again: list[Req] = []
        ended: list[Req] = []
        for req in sorted(reqs, key=lambda req: req.serial):
            req.prepare_again()
            req.heals.add(len(req.tokens))
            reasons = sighting.damage.reasons_of(req.serial)
            limit = recomputes(reasons)
            if not req.finish_if_aborted() and req.heals.count > limit:
                why = self._gate.why_ended(sighting, reasons, recomputed=limit)
                req.abort(why, status_code=500)
            (ended if req.is_finished else again).append(req)
        for req in ended:
            self._intake.end(req)
        self._intake.queue_first(again)
        return again, ended

    # -- afterwards ----------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether `after_step` has work to do."""
        watching = any(quarantine.is_watching for quarantine in self._quarantines)
        return watching or self.stats.is_waiting

    @property
    def _quarantines(self) -> list[Quarantine]:
        paged = [self.quarantine, *self.group_quarantines]
        states = self.checkpoint_quarantine
        return paged if states is None else [*paged, states]

    @property
    def fenced(self) -> list[int]:
        """Slots that are neither free nor cached, for the primary group and each group
        of the cache.
        """
        return [quarantine.num_slots for quarantine in self._quarantines]

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add the healings and the pages out of use to `stats`."""
        num_pages = self._cache.allocator.num_pages
        self.stats.add_to(stats, self._quarantines, num_pages=num_pages)

    @property
    def num_kept(self) -> int:
        """Number of pages in all groups that stay out of use."""
        return sum(len(quarantine.kept) for quarantine in self._quarantines)

    def after_step(self, *, has_launched: bool) -> None:
        """Record which requests got a new token, and inspect watched pages.

        Raises:
            CanaryViolation: too many pages stay out of use.
        """
        self.stats.note_tokens()
        self._look(self._num_forwards() if has_launched else None)

    def release_watched(self) -> bool:
        """Inspect all watched pages now, because requests need memory and nothing is in
        flight. Returns whether there were any.

        Raises:
            CanaryViolation: as `after_step`.
        """
        is_watching = any(quarantine.is_watching for quarantine in self._quarantines)
        self._look(None)
        return is_watching

    def _look(self, num_forwards: int | None) -> None:
        num_kept = self.num_kept
        for quarantine in self._quarantines:
            quarantine.look(num_forwards=num_forwards)
        if self.num_kept > num_kept:
            self._shrink()

    def _shrink(self) -> None:
        """Continue with fewer pages.

        Raises:
            CanaryViolation: too few pages are left.
        """
        allocator, states = self._cache.allocator, self.checkpoint_quarantine
        num_states = 0 if states is None else len(states.kept)
        self._bound_kept(self.num_kept - num_states, allocator.num_pages, "pages")
        if states is not None:
            assert self._cache.checkpoints is not None
            size = self._cache.checkpoints.slots.size
            self._bound_kept(num_states, size, "checkpoints of recurrent state")
        gone = len(self.quarantine.kept) * allocator.page_size
        slots = allocator.size - gone
        # The last sampled token needs no slot.
        self._intake.limit_length(slots - self._limits.decode_reserve + 1)

    def _bound_kept(self, kept: int, of: int, what: str) -> None:
        share = self._limits.quarantine_share
        if kept > share * of:
            text = (
                f"kv_canary: {kept} of {of} {what} are damaged again and again, more "
                f"than --kv-canary-quarantine-limit {share:g}"
            )
            raise CanaryViolation(text, public=text)


def _log(
    sighting: Sighting, again: Sequence[Req], ended: Sequence[Req], num_cut: int
) -> None:
    logger.warning(
        'kv_canary healed: diagnosis="%s" recomputed=%d tokens=%d ended=%d '
        "cached_tokens_cut=%d",
        first_diagnosis(sighting.violations),
        len(again),
        sum(len(req.tokens) for req in again),
        len(ended),
        num_cut,
    )
