"""The KV canary's findings of a step, seen before any of its tokens is used."""

from __future__ import annotations

import json
import logging
from collections import Counter as CountsOf
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kv_canary.evidence import Owner
from kv_canary.records import Counter, Reason, reason_labels
from kv_canary.reporter import CanaryViolation, as_error
from sglang.srt.kv_canary.config import CanaryMode
from sglang.srt.managers.scheduler_components.result_faults import (
    find_result_faults,
)
from sglang.srt.mem_cache.allocator import host_array

if TYPE_CHECKING:
    from kv_canary.violation import Violation
    from sglang.srt.distributed.parallel_state import TensorParallelGroup
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.managers.io_struct import SchedulerStats
    from sglang.srt.managers.req import Req
    from sglang.srt.managers.schedule_batch import LaunchRecord
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

logger = logging.getLogger(__name__)

EVERY_REASON = [label for reason in Reason for label in reason_labels(reason)]


class SlotOwners:
    """The owner of each slot by the host's records, as of the first question."""

    def __init__(
        self, cache: BasePrefixCache, requests: Callable[[], Iterable[Req]]
    ) -> None:
        self._cache = cache
        self._requests = requests

    def owner_of(self, slot: int) -> Owner:
        """The owner of `slot`: requests, the cache, or nobody."""
        allocator = self._cache.allocator
        if slot < 0:
            return Owner("none")
        if slot < allocator.page_size:
            return Owner("scratch page")
        if slot >= len(self._is_cached):
            return Owner("outside the pool")
        is_cached = bool(self._is_cached[slot])
        is_owned = slot // allocator.page_size in self._owned_pages
        claims = self._claims.get(slot, [])
        holders = [f"request {json.dumps(req.rid)}" for req in dict.fromkeys(claims)]
        if is_cached:
            holders.append("prefix cache")
        nobody = "owned, holder unknown" if is_owned else "free"
        return Owner(
            ", ".join(holders) or nobody,
            is_shared=is_cached,
            is_allocated=is_owned,
            claims=tuple(req.serial for req in claims),
            prefix_of=frozenset(self._readers.get(slot, ())),
        )

    @cached_property
    def _running(self) -> list[Req]:
        return [req for req in self._requests() if req.req_pool_idx]

    @cached_property
    def _claims(self) -> dict[int, list[Req]]:
        """The running requests that hold a slot beside the prefix cache, each as often
        as its row has the slot."""
        found: dict[int, list[Req]] = {}
        for req in self._running:
            for slot in self._own_slots(req).tolist():
                found.setdefault(slot, []).append(req)
        return found

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        """Serials of the running requests in whose prefix a cached slot lies, by the
        cache's own records and not by the requests' rows."""
        found: dict[int, list[int]] = {}
        for req in self._running:
            node = req.last_node
            while node is not None:
                for slot in node.slots.tolist():
                    found.setdefault(slot, []).append(req.serial)
                node = node.parent
        return found

    def _own_slots(self, req: Req) -> Tensor:
        return self._cache.req_to_token_pool.row_slots(
            req.req_pool_idx, req.cache_protected_len, req.allocated_len
        )

    @cached_property
    def _is_cached(self) -> NDArray[np.bool_]:
        """[slots of the pool], True where the prefix cache holds the slot."""
        allocator = self._cache.allocator
        mask = np.zeros(allocator.size + allocator.page_size, dtype=np.bool_)
        mask[host_array(self._cache.cached_slots())] = True
        return mask

    @cached_property
    def _owned_pages(self) -> frozenset[int]:
        return frozenset(self._cache.allocator.owned_pages().tolist())


class CanaryGate:
    """Stops a step's tokens from being used where the canary found a violation.

    Args:
        managers: of the target's pool and, where there is one, of the draft's; they
            share serials and reporter.
        requests: all requests that are not finished.
        group: the ranks. Each checks its own part of the KV cache; `incidents` and
            `add_stats` cover all of them, so that all of them must call these.
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
        for manager in managers:
            manager.attach_radix_cache(cache)

    def admit(self, req: Req) -> None:
        """Remember a request, so that a report can name it."""
        self.manager.serials.add(req.serial, req.rid)

    def inspect(self, result: GenerationBatchResult) -> None:
        """Look at the findings of a step before any of its tokens is used.

        Raises:
            CanaryViolation: something is wrong and the mode is `raise`.
        """
        # A prefill's result has no findings of the draft yet.
        found = []
        for manager, words in zip(self._managers, result.findings, strict=False):
            if manager.take(words):
                found.append(manager)
        if found:
            self._report(found)

    def confirm(self, launched: LaunchRecord, result: GenerationBatchResult) -> None:
        """Compare what requests keep of a step with what the device noted of it, before
        any of its tokens is sent.

        Args:
            launched: the step, its result processed.

        Raises:
            CanaryViolation: something differs and the mode is `raise`.
        """
        marks = result.marks
        if marks is None:
            return
        found = find_result_faults(launched, result, *marks)
        if found:
            owners = self._slot_owners()
            self.manager.report(
                owner_of=owners.owner_of,
                tokens_of=self._tokens_of,
                host_entries=found,
            )

    def _report(self, managers: list[CanaryManager]) -> None:
        errors, owners = [], self._slot_owners()
        for manager in managers:
            try:
                manager.report(owner_of=owners.owner_of, tokens_of=self._tokens_of)
            except CanaryViolation as error:
                # The findings in the other pool must be reported, too.
                errors.append(error)
        if errors:
            # This rank's own findings come first.
            raise min(errors, key=lambda error: not error.public)

    def fail(self, error: Exception) -> None:
        """Report the findings that `error` kept from reaching the host, as when a
        forward failed over the damage itself. A violation was reported already.

        Raises:
            CanaryViolation: there was something and the mode is `raise`; its cause is
                `error`.
        """
        if isinstance(error, CanaryViolation):
            return
        found, config = self._drain_after(error), self.manager.config
        if found and config.mode is CanaryMode.RAISE:
            raise as_error(
                found, with_tokens=config.report_tokens, is_alone=True
            ) from error

    def _drain_after(self, error: Exception) -> list[Violation]:
        """Report the findings in all pools, as far as the device still answers."""
        found: list[Violation] = []
        owners = self._slot_owners()
        for manager in self._managers:
            try:
                found += manager.drain(
                    owner_of=owners.owner_of, tokens_of=self._tokens_of
                )
            except Exception as lost:
                # The failure itself must be seen, and the other pool be read.
                logger.error(
                    "kv_canary: what was found before %r cannot be read: %s",
                    error,
                    lost,
                )
        return found

    def own_incidents(self) -> list[dict[str, Any]]:
        """The newest incidents of this rank, oldest first."""
        return list(self.manager.reporter.incidents)

    def incidents(self) -> list[dict[str, Any]]:
        """The newest incidents of every rank, oldest first."""
        own = msgspec.msgpack.encode(self.own_incidents())
        found: list[dict[str, Any]] = []
        for of_rank in self._group.all_gather_bytes(own):
            found += msgspec.msgpack.decode(of_rank)
        return sorted(found, key=itemgetter("time"))

    def add_stats(self, stats: SchedulerStats) -> None:
        """Fill in the canary's numbers: violations of all ranks, and tokens and passes
        of this one, because every rank checks the same ones."""
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
        """By reason: a series that does not exist yet cannot be watched."""
        own = msgspec.msgpack.encode(dict(self.manager.reporter.counts))
        counts: CountsOf[str] = CountsOf(dict.fromkeys(EVERY_REASON, 0))
        for of_rank in self._group.all_gather_bytes(own):
            counts.update(msgspec.msgpack.decode(of_rank, type=dict[str, int]))
        return dict(counts)

    def _slot_owners(self) -> SlotOwners:
        return SlotOwners(self._cache, self._requests)

    def _tokens_of(self, serial: int) -> Sequence[int] | None:
        return next(
            (req.tokens for req in self._requests() if req.serial == serial), None
        )
