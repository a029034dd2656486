"""Chooses the batch of the next step: a prefill, a chunk of one, or a decode step.

Owns the queue and the batches between two steps. Knows nothing about messages, forwards
or results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.managers.batch.schedule_batch import BatchEnvironment, ScheduleBatch
from sglang.srt.managers.scheduler.client_shares import (
    in_turns,
    is_decode_due,
    who_yields,
)
from sglang.srt.managers.scheduler.retraction import retract_for_decode
from sglang.srt.managers.scheduler.schedule_policy import (
    SCHEDULE_POLICIES,
    Admission,
    NewTokenRatio,
    PrefillAdder,
    PrefillBudget,
    SlotNeed,
    order_by_priority,
)
from sglang.srt.mem_cache.common import release_req

if TYPE_CHECKING:
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.scheduler.stats import StatsTracker
    from sglang.srt.managers.scheduler.tier_loads import TierLoads
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

LAPSED_TOKEN = 4
"""Tokens of a draft's catching up that cost as much as a token of a prefill."""


@dataclass(frozen=True, kw_only=True)
class SavedBatch:
    """Unfinished requests of a batch, in row order, and their lengths."""

    serials: list[int]
    seq_lens: list[int]


@dataclass(frozen=True, kw_only=True)
class SavedBatches:
    """The queue and the batches between two steps, with requests by serial.

    Attributes:
        is_decode_due: whether the running requests decode before the next prefill.
    """

    waiting: list[int]
    running: SavedBatch | None
    last_prefill: SavedBatch | None
    chunked: int | None
    new_token_ratio: float
    is_decode_due: bool = False


def _save_batch(batch: ScheduleBatch | None) -> SavedBatch | None:
    if batch is None:
        return None
    lens = batch.seq_lens_cpu.tolist()
    rows = [i for i, req in enumerate(batch.reqs) if not req.is_finished]
    return SavedBatch(
        serials=[batch.reqs[i].serial for i in rows],
        seq_lens=[lens[i] for i in rows],
    )


class BatchSelector:
    """Prefills come first. The running requests decode once between two chunks of a
    long prompt, and between two prefills if one of their clients had no part in the
    first.

    Args:
        resolve: processes the results in flight, so that requests that end in them give
            their slots back; returns whether there were any.
        on_dropped: called with a request that was aborted between two chunks of its
            prompt or before a retraction, after its memory is released.
        loads: KV in other tiers, or None without any.

    Attributes:
        waiting: the queue; these requests hold no memory.
        running: the batch that decodes.
        last_prefill: the batch of the last step, if that was a prefill.
        chunked: the request whose prompt is partly prefilled.
        shape: shape of the drafts of the next decode step, or None.
    """

    def __init__(
        self,
        env: BatchEnvironment,
        *,
        server_args: ServerArgs,
        stats: StatsTracker,
        resolve: Callable[[], bool],
        on_dropped: Callable[[Req], None],
        loads: TierLoads | None = None,
    ) -> None:
        self._loads = loads
        assert server_args.chunked_prefill_size is not None
        self._env = env
        self._cache = env.cache
        self._max_prefill_tokens = server_args.max_prefill_tokens
        chunk_tokens = server_args.chunked_prefill_size
        self._chunk_tokens = chunk_tokens if chunk_tokens > 0 else None
        self._policy = SCHEDULE_POLICIES[server_args.schedule_policy]
        self._has_priorities = server_args.enable_priority_scheduling
        self._low_first = server_args.schedule_low_priority_values_first
        self._new_token_ratio = NewTokenRatio(server_args.schedule_conservativeness)
        self._stats = stats
        self._resolve = resolve
        self._on_dropped = on_dropped
        self.waiting: list[Req] = []
        self.running: ScheduleBatch | None = None
        self.last_prefill: ScheduleBatch | None = None
        self.chunked: Req | None = None
        self.shape = env.shape
        # Decided at a prefill, because its requests may all be gone by the next step.
        self._is_decode_due = False

    def queue(self, req: Req) -> None:
        """Add a new request to the end of the queue."""
        self.waiting.append(req)
        if self._loads is not None:
            self._loads.on_queued(req)

    def decoding(self) -> list[Req]:
        """Return the requests that decode, or are about to."""
        batches = (self.running, self.last_prefill)
        return [
            req
            for batch in batches
            if batch is not None
            for req in batch.reqs
            if req.decodes_on
        ]

    def behind(self) -> int:
        """Return the tokens of the decoding requests that drafts must catch up; one
        that has to be prefilled again counts as several."""
        env = self._env
        return sum(
            req.behind * (LAPSED_TOKEN if env.has_lapsed(req) else 1)
            for req in self.decoding()
        )

    def has_requests(self) -> bool:
        """Whether any request is waiting or in a batch."""
        return bool(
            self.waiting
            or self.chunked is not None
            or self.last_prefill is not None
            or self.running is not None
        )

    def on_idle(self) -> None:
        """Reset the expected number of new tokens to its initial value."""
        self._new_token_ratio.on_idle()

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Return the next batch with its slots taken, or None if nothing can run."""
        prefilled = self.last_prefill is not None
        self._merge_last_prefill()
        if self.shape is not None:
            self.restart_lapsed()
        is_due, self._is_decode_due = self._is_decode_due, False
        if is_due or (prefilled and self.chunked is not None):
            batch = self._get_decode_batch()
            if batch is not None:
                return batch
        batch = self._get_new_prefill_batch()
        if batch is not None:
            self.last_prefill = batch
            return batch
        return self._get_decode_batch()

    def _merge_last_prefill(self) -> None:
        """Let requests whose prompt is complete start to decode."""
        batch, self.last_prefill = self.last_prefill, None
        if batch is None:
            return
        batch.filter(
            [
                i
                for i, req in enumerate(batch.reqs)
                if req.decodes_on and not req.is_chunked
            ]
        )
        if not batch.reqs:
            return
        if self.running is not None:
            self.running.filter_decoding()
        if self.running is None or not self.running.reqs:
            self.running = batch
            batch.sort_for_decode()
        else:
            self.running.merge(batch)

    # -- prefill -------------------------------------------------------------------

    def _get_new_prefill_batch(self) -> ScheduleBatch | None:
        if self.chunked is not None and self.chunked.abort_message is not None:
            self._drop_chunked()
        if self.chunked is None and not self.waiting:
            return None
        if self.waiting and self._num_free_rows == 0:
            self._yield_places()
        adder = self._fill_prefill_adder()
        if not adder.reqs:
            return None
        if self._env.adapters is not None:
            self._env.adapters.hold(adder.adapters)
        batch = ScheduleBatch.prepare_for_extend(
            adder.reqs, adder.extend_lens, self._env
        )
        if batch is None:
            self._undo_admission(adder)
            return None
        self.chunked = adder.chunked
        running = [] if self.running is None else self.running.reqs
        self._is_decode_due = not self._has_priorities and is_decode_due(
            adder.reqs, [req for req in running if req.decodes_on]
        )
        added = {req.serial for req in adder.reqs}
        self.waiting = [req for req in self.waiting if req.serial not in added]
        for req in adder.reqs:
            if not req.was_admitted:
                req.was_admitted = True
                self._stats.on_admitted(req)
        self._stats.on_prefill(
            batch.reqs, sum(adder.extend_lens), waiting=len(self.waiting)
        )
        return batch

    def _drop_chunked(self) -> None:
        """End an aborted request between two chunks of its prompt."""
        req, self.chunked = self.chunked, None
        assert req is not None
        req.finish_if_aborted()
        release_req(req, cache=self._cache)
        self._on_dropped(req)

    def slot_needs(self, limit: int) -> list[SlotNeed]:
        """Return the needs that admission compares, for the first `limit` waiting
        requests.
        """
        adder = self._new_adder()
        return [adder.slot_need(req) for req in self.waiting[:limit]]

    def _new_adder(self) -> PrefillAdder:
        running = [] if self.running is None else self.running.reqs
        slots = self._env.adapters
        return PrefillAdder(
            cache=self._cache,
            running=[req for req in running if req.decodes_on],
            new_token_ratio=self._new_token_ratio.value,
            budget=PrefillBudget(
                max_prefill_tokens=self._max_prefill_tokens,
                chunk_tokens=self._chunk_tokens,
                max_new_reqs=self._num_free_rows + (self.chunked is not None),
                decode_reserve=self._env.decode_reserve,
                max_adapters=0 if slots is None else slots.num_slots,
            ),
            loads=self._loads,
            adapters=filter(None, (r.running_adapter for r in self._holders())),
        )

    def _fill_prefill_adder(self) -> PrefillAdder:
        adder = self._new_adder()
        if self.chunked is not None:
            adder.add_chunked(self.chunked)
        self.waiting = self._policy(self.waiting, self._cache)
        if self._has_priorities:
            self.waiting = order_by_priority(self.waiting, low_first=self._low_first)
        for req in self._in_turns():
            if adder.add(req) is Admission.NO_BUDGET:
                break
        return adder

    @property
    def _num_free_rows(self) -> int:
        return self._cache.req_to_token_pool.available_size()

    def _holders(self) -> list[Req]:
        """The requests that have a row."""
        running = [] if self.running is None else self.running.reqs
        return running if self.chunked is None else [*running, self.chunked]

    def _in_turns(self) -> Iterable[Req]:
        """Return the queue in admission order. Priorities apply across all clients."""
        if self._has_priorities:
            return self.waiting
        return in_turns(self.waiting, self._holders())

    def _ready(self) -> list[Req]:
        """Return the queue without requests that wait for another tier."""
        if self._loads is None:
            return self.waiting
        return [req for req in self.waiting if not self._loads.is_loading(req)]

    def _yield_places(self) -> None:
        """If one client holds rows for which another waits, queue some of its requests
        again; their KV stays in the prefix cache.

        Processes the results in flight first: requests that end in them give rows back.
        """
        batch = self.running
        if batch is None or self._has_priorities:
            return
        if not who_yields(self._ready(), batch.reqs):
            return
        if self._resolve():
            batch.filter_decoding()
        if self._num_free_rows:
            return
        self._queue_again(who_yields(self._ready(), batch.reqs))

    def _queue_again(self, reqs: Sequence[Req]) -> None:
        """Take requests out of the batches and queue them before all others."""
        for req in reversed(reqs):
            self.withdraw(req)
            if req.finish_if_aborted():
                self._on_dropped(req)
            else:
                self.waiting.insert(0, req)
        self._stats.on_retract(len(reqs))

    def _undo_admission(self, adder: PrefillAdder) -> None:
        """Give back the locks and the memory of the partly prefilled prompt, because
        there were not enough slots after all.
        """
        for req in adder.reqs:
            if req is self.chunked:
                continue
            assert req.last_node is not None
            self._cache.dec_lock_ref(req.last_node)
            self._cache.mark_released(req)
            req.is_chunked = False
        self._resolve()
        if self.chunked is not None:
            self._requeue(self.chunked)
            self.chunked = None

    # -- decode --------------------------------------------------------------------

    def _get_decode_batch(self) -> ScheduleBatch | None:
        batch = self.running
        if batch is None:
            return None
        batch.filter_decoding()
        batch.shape = self.shape
        if batch.reqs and not batch.prepare_for_decode():
            self._make_room(batch)
        if not batch.reqs:
            self.running = None
            return None
        self._new_token_ratio.on_decode()
        self._stats.on_decode(len(batch), len(self.waiting))
        return batch

    def _make_room(self, batch: ScheduleBatch) -> None:
        """Retract requests until the others can decode.

        Processes the results in flight first: requests that end in them give slots
            back.
        """
        if self._resolve():
            batch.filter_decoding()
            if not batch.reqs or batch.prepare_for_decode():
                return
        retracted = retract_for_decode(batch, chunked=self.chunked)
        for req in reversed(retracted):
            if req is self.chunked:
                self.chunked = None
            self._requeue(req)
        self._new_token_ratio.on_retract(batch.reqs)
        self._stats.on_retract(len(retracted))
        logger.warning(
            "KV cache is full: retracted %d request(s), %d go on; a larger "
            "--schedule-conservativeness admits fewer",
            len(retracted),
            len(batch),
        )

    def restart_lapsed(self) -> None:
        """Queue requests whose drafts have lapsed before all others: a prefill computes
        what both models lack."""
        batch = self.running
        if batch is None or not any(self._env.has_lapsed(r) for r in batch.reqs):
            return
        self._resolve()
        batch.filter_decoding()
        self._queue_again([r for r in batch.reqs if self._env.has_lapsed(r)])

    def _requeue(self, req: Req) -> None:
        """Put a request at the front of the queue, releasing its memory if needed; if
        it was aborted meanwhile, end it.
        """
        self._release(req)
        if req.finish_if_aborted():
            self._on_dropped(req)
            return
        self.waiting.insert(0, req)

    def retract_all(self) -> None:
        """Queue all running requests before the others, in order of arrival, and
        release their memory; aborted ones end. No result may be in flight.
        """
        running = {}
        for batch in (self.running, self.last_prefill):
            for req in [] if batch is None else batch.reqs:
                if not req.is_finished:
                    running[req.serial] = req
        if self.chunked is not None:
            running[self.chunked.serial] = self.chunked
        self.running = self.last_prefill = self.chunked = None
        for serial in sorted(running, reverse=True):
            req = running[serial]
            # A forward may have written KV for tokens that the request does not keep.
            req.committed_len = min(req.committed_len, len(req.tokens))
            self._requeue(req)

    def take_out(self, reqs: Collection[Req]) -> None:
        """Take requests out of the batches between two steps; they keep their memory,
        and the caller queues them again."""
        gone = {req.serial for req in reqs}
        for batch in (self.running, self.last_prefill):
            if batch is not None:
                kept = [i for i, r in enumerate(batch.reqs) if r.serial not in gone]
                batch.filter(kept)
        if self.chunked is not None and self.chunked.serial in gone:
            self.chunked = None

    def put_first(self, reqs: Sequence[Req]) -> None:
        """Queue requests that hold no memory before all others, in this order."""
        self.waiting[:0] = reqs

    def withdraw(self, req: Req) -> None:
        """Take a request out of the batches between two steps; its memory goes to the
        prefix cache. The caller queues it again."""
        self.take_out([req])
        # The forward has written KV for tokens that the request does not keep.
        req.committed_len = min(req.committed_len, len(req.tokens))
        self._release(req)

    # -- checkpoints ---------------------------------------------------------------

    def save(self) -> SavedBatches:
        """Return the queue and the batches; nothing may be in flight."""
        return SavedBatches(
            waiting=[req.serial for req in self.waiting],
            running=_save_batch(self.running),
            last_prefill=_save_batch(self.last_prefill),
            chunked=None if self.chunked is None else self.chunked.serial,
            new_token_ratio=self._new_token_ratio.value,
            is_decode_due=self._is_decode_due,
        )

    def load(self, saved: SavedBatches, reqs: Mapping[int, Req]) -> None:
        """Restore saved batches; `reqs` maps saved serials to requests."""
        self.waiting = [reqs[serial] for serial in saved.waiting]
        self.running = self._load_batch(saved.running, reqs)
        self.last_prefill = self._load_batch(saved.last_prefill, reqs)
        self.chunked = None if saved.chunked is None else reqs[saved.chunked]
        self._new_token_ratio.value = saved.new_token_ratio
        self._is_decode_due = saved.is_decode_due

    def _load_batch(
        self, saved: SavedBatch | None, reqs: Mapping[int, Req]
    ) -> ScheduleBatch | None:
        if saved is None or not saved.serials:
            return None
        batch = ScheduleBatch([reqs[serial] for serial in saved.serials], self._env)
        batch.seq_lens_cpu = np.array(saved.seq_lens, dtype=np.int64)
        return batch

    def _release(self, req: Req) -> None:
        """Prepare for another prefill; the memory may already be released."""
        if req.req_pool_idx:
            release_req(req, cache=self._cache)
            req.req_pool_idx = 0
        req.prepare_again()
