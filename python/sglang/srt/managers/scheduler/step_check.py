"""Checks a step of an engine that heals once more, by shorter ways.

The gate decides what was found, `blame.py` follows it through many records, and a
healing processes a result in parts. This module asks only what each row must have
gained or must not have gained, so no single mistake there can send a wrong token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kv_canary.checks import Blames, Severity, reasons_where
from kv_canary.findings import is_clean
from kv_canary.records import HALF_BITS
from sglang.srt.managers.scheduler.heal_check import HealingError
from sglang.srt.mem_cache.allocator import host_array

if TYPE_CHECKING:
    from sglang.srt.managers.batch.forward_result import GenerationBatchResult
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.schedule_batch import LaunchRecord, StepStart
    from sglang.srt.managers.scheduler.blame import StepDamage
    from sglang.srt.managers.scheduler.canary_gate import Sighting
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.page_ledger import IntArray

_TARGET = 0
_OF_TOKENS = reasons_where(lambda check: check.severity is Severity.TOKENS)
# Whoever holds the slot has read another owner's bytes.
_OVERWRITTEN = reasons_where(lambda check: check.blames is Blames.HOLDER)
_OF_ALL_ROWS = reasons_where(lambda check: check.blames is Blames.FORWARD)


class StepCheck:
    """The rows of a step before its result is processed.

    Args:
        before: the requests of the step at that time.
        cache: the cache that holds their memory, or None if the result has been
            processed: slots that were overwritten are then not known to anybody.
    """

    def __init__(
        self,
        launched: LaunchRecord,
        before: StepStart,
        cache: BasePrefixCache | None = None,
    ) -> None:
        self._launched = launched
        self._before = before
        self._pages: dict[int, IntArray] = {}
        self._page_size = 1
        if cache is not None:
            self._page_size = cache.page_size
            reqs = {row: launched.reqs[row] for row in before.live}
            self._pages = {row: _row_pages(req, cache) for row, req in reqs.items()}

    def check(
        self, damage: StepDamage, processed: Sequence[Req], withheld: Collection[int]
    ) -> None:
        """Check the step after its result was processed and the damage healed.

        Args:
            processed: requests whose news are sent.
            withheld: serials of the requests that wait for their news.

        Raises:
            HealingError: a request gained a doubtful token, or is in neither group.
        """
        doubtful = self._doubtful_rows(damage)
        sent = {req.serial for req in processed}
        for row in sorted(self._before.live):
            req = self._launched.reqs[row]
            has_gained = len(req.tokens) != self._before.lengths[row]
            if has_gained and row in doubtful:
                raise HealingError(f"request {req.rid} gained a token that is in doubt")
            if req.serial not in sent and req.serial not in withheld:
                raise HealingError(f"request {req.rid} would miss its part of the step")

    def _doubtful_rows(self, damage: StepDamage) -> set[int]:
        """Return the live rows whose token of the step cannot be trusted."""
        live, reqs = self._before.live, self._launched.reqs
        found = {
            row
            for pool, verdicts in enumerate(damage.verdicts)
            for row, reasons in enumerate(verdicts)
            if _doubts_tokens(pool, reasons)
        }
        facts = [f for f in damage.facts if _doubts_tokens(f.pool, f.reasons)]
        serials = {fact.serial for fact in facts}
        found |= {row for row in live if reqs[row].serial in serials}
        reasons = [fact.reasons for fact in facts]
        if any(each & _OF_ALL_ROWS for each in reasons):
            return set(live)
        slots = [fact.slot for fact in facts if fact.reasons & _OVERWRITTEN]
        pages = np.array(slots, dtype=np.int64) // self._page_size
        found |= {row for row, own in self._pages.items() if np.isin(own, pages).any()}
        return found


def _row_pages(req: Req, cache: BasePrefixCache) -> IntArray:
    slots = cache.req_to_token_pool.row_slots(req.req_pool_idx, 0, req.allocated_len)
    pages: IntArray = host_array(slots) // cache.page_size
    return pages


def _doubts_tokens(pool: int, reasons: int) -> bool:
    return bool(reasons) and (pool == _TARGET or bool(reasons & _OF_TOKENS))


def check_sighted(result: GenerationBatchResult, sighting: Sighting | None) -> None:
    """Check that the findings of a step were not overlooked.

    Raises:
        HealingError: there are some, but no damage is to be healed.
    """
    if sighting is None and not all(map(is_clean, result.findings)):
        raise HealingError("the findings of the step were overlooked")


def check_newest(
    launched: LaunchRecord, marks: tuple[list[int], list[int]] | None
) -> None:
    """Check that the newest token of each request that goes on is the one that the
    device recorded.

    Args:
        launched: a step whose result was processed and confirmed.
        marks: serials and words of its rows.

    Raises:
        HealingError: it is another one.
    """
    if marks is None:
        return
    dropped, is_chunked = launched.dropped, launched.is_chunked
    for row, (req, serial, word) in enumerate(zip(launched.reqs, *marks, strict=True)):
        tokens = req.tokens
        if word == len(tokens) - 1 << HALF_BITS | tokens[-1] and serial == req.serial:
            continue
        is_over = req.is_finished or req.serial in dropped
        if is_over or is_chunked[row] or req.grammar_failure is not None:
            continue
        raise HealingError(f"request {req.rid} keeps another token than was sampled")
