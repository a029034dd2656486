"""Statistics of healings: how many, of which diagnosis, how long until the next token,
and what each did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from kv_canary.checks import DIAGNOSES
from sglang.srt.managers.messages.io_struct import HistogramStats

if TYPE_CHECKING:
    from kv_canary.violation import Violation
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.messages.io_struct import SchedulerStats
    from sglang.srt.managers.scheduler.blame import Blame
    from sglang.srt.mem_cache.quarantine import Quarantine

RECOVERY_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
DEGRADED_SECONDS = 60.0
# Number of requests and pages listed in an incident.
MAX_LISTED = 64
ELSEWHERE = "found elsewhere"
"""Found by another rank or in the step before; this rank has no violation."""


def first_diagnosis(violations: Sequence[Violation]) -> str:
    """Return the label of a healing: the diagnosis of the first violation."""
    return _name(violations[0].diagnosis_name) if violations else ELSEWHERE


class HealStats:
    """Counts healings and times recoveries.

    Attributes:
        heals: healings by diagnosis of the first violation. All keys exist from the
            start, because a missing series cannot be monitored.
        healed_tokens: tokens of requests that were queued again.
        recoveries: seconds from a healing to the request's next token.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.heals = dict.fromkeys(EVERY_DIAGNOSIS, 0)
        self.healed_tokens = 0
        self.recoveries = HistogramStats.empty(RECOVERY_BUCKETS)
        self._last_heal: float | None = None
        # By serial: request, its number of tokens, and the time of the healing.
        self._recovering: dict[int, tuple[Req, int, float]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any healed request has not got a token since."""
        return bool(self._recovering)

    @property
    def is_recent(self) -> bool:
        """Whether something was healed in the last `DEGRADED_SECONDS`."""
        last = self._last_heal
        return last is not None and self._clock() - last < DEGRADED_SECONDS

    def on_heal(
        self, violations: Sequence[Violation], again: Sequence[Req], *, now: float
    ) -> None:
        """Count a healing that queued `again` again."""
        self.heals[first_diagnosis(violations)] += 1
        self.healed_tokens += sum(len(req.tokens) for req in again)
        self._last_heal = self._clock()
        for req in again:
            # Damaged again before its next token: it has waited since the first time.
            before = self._recovering.get(req.serial)
            since = now if before is None else before[2]
            self._recovering[req.serial] = req, len(req.tokens), since

    def note_tokens(self) -> None:
        """Record the recovery time of requests that got a token after a healing."""
        for serial, (req, length, since) in list(self._recovering.items()):
            if len(req.tokens) > length:
                self.recoveries.observe(self._clock() - since)
            elif not req.is_finished:
                continue
            del self._recovering[serial]

    def add_to(
        self,
        stats: SchedulerStats,
        quarantines: Sequence[Quarantine],
        *,
        num_pages: int,
    ) -> None:
        """Fill in the healing statistics.

        Args:
            num_pages: number of pages in the pool.
        """
        stats.kv_canary_heals_total = dict(self.heals)
        stats.kv_canary_healed_tokens_total = self.healed_tokens
        out_of_use = sum(quarantine.num_pages for quarantine in quarantines)
        stats.kv_canary_quarantined_pages = out_of_use
        stats.kv_canary_quarantined_share = out_of_use / num_pages
        stats.kv_canary_recovery_seconds = self.recoveries
        has_kept = any(len(q.kept) for q in quarantines)
        stats.kv_canary_is_degraded = self.is_recent or has_kept


def _name(diagnosis: str) -> str:
    """Return a diagnosis as a label, without the request that one of them names."""
    return diagnosis.replace(" with request {writer}", "")


EVERY_DIAGNOSIS = (*(_name(diagnosis.name) for diagnosis in DIAGNOSES), ELSEWHERE)
"""Labels of healings."""


def heal_outcome(
    again: Sequence[Req] = (),
    ended: Sequence[Req] = (),
    *,
    blame: Blame | None = None,
    num_cut: int,
) -> dict[str, Any]:
    """Return what a healing did, in the form of incidents."""
    rebuilt = () if blame is None else blame.rebuilt
    pages = [] if blame is None else blame.pages[:MAX_LISTED].tolist()
    checkpoints = [] if blame is None else sorted(blame.checkpoints)[:MAX_LISTED]
    return {
        "recomputed": [_about(req, rebuilt) for req in again[:MAX_LISTED]],
        "ended": [_about(req, rebuilt) for req in ended[:MAX_LISTED]],
        "num_recomputed": len(again),
        "num_ended": len(ended),
        "cached_tokens_cut": num_cut,
        "pages_watched": pages,
        "checkpoints_watched": checkpoints,
    }


def _about(req: Req, rebuilt: Collection[Req]) -> dict[str, Any]:
    """Describe a request in an incident; `sent` counts tokens its client has, which
    cannot be taken back.
    """
    return {
        "rid": req.rid,
        "pool": "draft" if req in rebuilt else "target",
        "tokens": len(req.tokens),
        "output_tokens": req.output_len,
        "sent": req.sent.tokens,
    }
