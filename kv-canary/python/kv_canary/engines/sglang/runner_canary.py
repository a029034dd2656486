"""The canary of one model runner of SGLang: host and device, forward by forward.

```
announce(request), free(slots)   the scheduler's word, queued
begin(batch)                     applied in the forward's stream; whose rows these are
  before(batch), after()         inside of the model's forward, captured with it
end()                            findings on their way to the host
sampled(batch, tokens)           what the next inputs must be
collect(pending)                 waits for findings; reports, and raises
```
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kv_canary.accepted import SampledTokens
from kv_canary.engines.reporting import reporter_of
from kv_canary.engines.settings import Mode, Settings
from kv_canary.engines.sglang.batch import (
    IDLE,
    BatchRows,
    has_trees,
    lengths_of,
    mode_of,
    on_device,
    view_of,
)
from kv_canary.engines.sglang.pool_canary import RING_CAPACITY, PoolCanary
from kv_canary.engines.sglang.row_registry import Row, RowRegistry
from kv_canary.engines.sglang.tree import Trees
from kv_canary.evidence import Owner
from kv_canary.records import Counter
from kv_canary.reporter import as_error

if TYPE_CHECKING:
    from kv_canary.engines.sglang.pool import SeenPool
    from kv_canary.reporter import ViolationReporter
    from kv_canary.view import ForwardView
    from kv_canary.violation import Violation

logger = logging.getLogger(__name__)

_SUMMARY_FORWARDS = 10_000
_SPARE_ROWS = 512


class Pending(NamedTuple):
    """Findings of a forward on their way to the host.

    Fields:
        counts: on the host, once `event` has happened: entries of the ring, and
            forwards that were checked since the one before.
        mode: of the forward.
    """

    event: torch.cuda.Event | None
    counts: Tensor
    mode: str

    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()


class RunnerCanary:
    """Checks the forwards of one runner.

    Args:
        pool: its KV.
        req_to_token: int32 [rows, columns].
        allocator: of slots; asked for its free pages when something is found.
        tree_width: nodes of a verification; 0: there is none.
        target: whose draft model the pool belongs to; its requests and its reports are
            that canary's.

    Attributes:
        registry: whose the rows are.
        canary: of the pool.
        draft: of the draft model's pool.
        reporter: of everything found so far.
        forwards: that were checked.
    """

    def __init__(
        self,
        pool: SeenPool,
        settings: Settings,
        *,
        req_to_token: Tensor,
        allocator: Any = None,
        tree_width: int = 0,
        rank: int = 0,
        target: RunnerCanary | None = None,
    ) -> None:
        self._settings = settings
        self._device = pool.device
        self._allocator = allocator
        self._is_draft = target is not None
        self.registry: RowRegistry = (
            RowRegistry() if target is None else target.registry
        )
        self.draft: RunnerCanary | None = None
        self.canary = PoolCanary(
            pool, req_to_token, tree_width=tree_width, is_draft=self._is_draft
        )
        capacity = req_to_token.shape[0] + _SPARE_ROWS
        self.rows = BatchRows(capacity, self._device)
        self.trees = Trees(capacity, tree_width, self._device)
        self.reporter: ViolationReporter = (
            reporter_of(
                settings,
                page_size=pool.page_size,
                serials=self.registry.serials,
                ring_capacity=RING_CAPACITY,
                rank=rank,
            )
            if target is None
            else target.reporter
        )
        self.forwards = 0
        self._announced: dict[int, Row] = {}
        self._freed: list[Tensor] = []
        self._is_cleared = False
        self._view: ForwardView | None = None
        self._mode = IDLE
        self._clock = self.canary.state.clock.clone()
        self._pending: deque[Pending] = deque()

    def announce(self, request: Any) -> None:
        """A request is about to prefill, or to go on with it."""
        row = self.registry.announce(request)
        for canary in self._both():
            canary._announced[row.number] = row

    def free(self, slots: Tensor) -> None:
        """Slots [n] are given back; poisoned before the next forward, after those that
        still run."""
        if slots.numel():
            # The engine may hand over a view of its table.
            copy = slots.detach().clone()
            for canary in self._both():
                canary._freed.append(copy)

    def clear(self) -> None:
        """All slots are given back."""
        for canary in self._both():
            canary._freed, canary._is_cleared = [], True

    def move(self, *, dst: Tensor, src: Tensor) -> None:
        """The bytes of slots `src` were moved to `dst`, [n] each."""
        if dst.numel():
            self.canary.move(dst=dst.long(), src=src.long())

    def begin(self, batch: Any) -> None:
        """Before a forward of the runner, in its stream.

        Raises:
            RuntimeError: a row of it was never announced.
            CanaryViolation: mode `raise`, and an earlier forward found something.
        """
        self.poll()
        self._mode = mode_of(batch)
        if self._mode == IDLE or not batch.batch_size:
            self._mode = IDLE
            return
        self._apply()
        rows = self._rows_of(batch)
        self.rows.begin([row.serial for row in rows], [row.salt for row in rows])
        if has_trees(self._mode):
            spec = batch.spec_info
            self.trees.begin(
                getattr(spec, "custom_mask", None),
                lengths_of(batch).prefix[: len(rows)],
                int(spec.draft_token_num),
            )
        self._clock.copy_(self.canary.state.clock)

    def before(self, batch: Any) -> None:
        """Before the model's forward; in a capture, into the graph."""
        self._view = None
        if mode_of(batch) == IDLE:
            return
        self._view = view_of(
            batch, self.rows, self.trees, self.canary.table, self.canary.seeds
        )
        self.canary.before(self._view)

    def after(self) -> None:
        """After the model's forward."""
        view, self._view = self._view, None
        if view is not None:
            self.canary.after(view)

    def end(self) -> Pending | None:
        """After a forward of the runner; what it found, on its way.

        Raises:
            CanaryViolation: mode `raise`, on the CPU, where findings are there at once.
            RuntimeError: the forward went past the checks, likewise.
        """
        if self._mode == IDLE:
            return None
        self.rows.end()
        self.forwards += 1
        if self.forwards == 1:
            logger.warning("kv_canary: the first forward is checked")
        if self.forwards % _SUMMARY_FORWARDS == 0:
            logger.info("kv_canary: %s", self.summary())
        pending = self._send()
        if pending.event is None:
            self.collect(pending)
            return None
        self._pending.append(pending)
        return pending

    def sampled(self, batch: Any, tokens: Tensor) -> None:
        """The next inputs of the rows of the forward that has just run."""
        mode = mode_of(batch)
        if mode == IDLE or has_trees(mode) or tokens.numel() != batch.batch_size:
            return
        n = tokens.numel()
        lengths = lengths_of(batch)
        self.canary.note(
            SampledTokens(
                req_rows=batch.req_pool_indices[:n].long(),
                serials=self.rows.serials[:n].clone(),
                tokens=tokens.view(-1).long(),
                prefix_lens=lengths.prefix[:n].contiguous(),
                extend_lens=lengths.extend[:n].contiguous(),
            )
        )

    def poll(self) -> None:
        """Report what has arrived of earlier forwards; waits for nothing.

        Raises:
            CanaryViolation: mode `raise`, and there is something.
        """
        while self._pending and self._pending[0].has_arrived():
            self.collect(self._pending.popleft())

    def take_pending(self) -> list[Pending]:
        """Of this pool, in mode `raise`: to be collected before tokens may leave."""
        if self._settings.mode is not Mode.RAISE:
            return []
        taken = list(self._pending)
        self._pending.clear()
        return taken

    def collect(self, pending: Pending) -> list[Violation]:
        """Report what a forward found; waits for it.

        Raises:
            CanaryViolation: mode `raise`, and there is something.
            RuntimeError: the forward went past the checks.
        """
        if pending.event is not None:
            pending.event.synchronize()
        found, checked = pending.counts.tolist()
        if not checked:
            raise RuntimeError(
                f"kv_canary: a {pending.mode} forward ran that was not checked: the "
                "engine went past the model's forward, or captured it before"
            )
        if not found:
            return []
        state = self.canary.state
        count = int(state.ring_count)
        entries = state.ring[: min(count, RING_CAPACITY)].tolist()
        state.ring_count.zero_()
        state.verdict.zero_()
        reported = self.reporter.report(
            entries,
            dropped=max(count - RING_CAPACITY, 0),
            owner_of=self.owner,
            mode_of=lambda violation: pending.mode.lower(),
        )
        if reported and self._settings.mode is Mode.RAISE:
            raise as_error(reported, with_tokens=self._settings.report_tokens)
        return reported

    def found_now(self) -> list[Violation]:
        """Report what the forward found that has just run, in mode `log`; waits for the
        device. For self-tests, which call it before `end`."""
        return self.collect(self._send())

    def owner(self, slot: int) -> Owner:
        """The owner of a slot by the engine's tables; waits for the device."""
        size = self.canary.pool.page_size
        held = [row.rid for row in self.registry.rows() if self._holds(row, slot)]
        if held:
            names = " and ".join(repr(rid) for rid in held)
            return Owner(f"request {names}", is_allocated=True)
        free = getattr(self._allocator, "free_pages", None)
        if isinstance(free, Tensor) and bool((free == slot // size).any()):
            return Owner("nobody")
        return Owner("the prefix cache, or nobody", is_shared=True, is_allocated=True)

    def _holds(self, row: Row, slot: int) -> bool:
        return slot > 0 and bool((self.canary.table[row.number] == slot).any())

    def counters(self) -> list[int]:
        """`records.Counter` of all pools; waits for the device."""
        lists = [canary.canary.state.counters.tolist() for canary in self._both()]
        return [sum(values) for values in zip(*lists, strict=True)]

    def summary(self) -> str:
        return (
            f"{self.forwards} forwards checked, "
            f"{self.counters()[Counter.VERIFIED_SLOTS]} slot reads verified, "
            f"{self.reporter.total} violations"
        )

    def _both(self) -> list[RunnerCanary]:
        """This one, and that of the draft model's pool."""
        return [self] if self.draft is None else [self, self.draft]

    def _rows_of(self, batch: Any) -> Sequence[Row]:
        rids = batch.rids
        if rids is None or len(rids) != batch.batch_size:
            raise RuntimeError(
                f"kv_canary: looked for the ids of {batch.batch_size} requests in "
                f"ForwardBatch.rids, found {rids!r}"
            )
        return self.registry.rows_of(rids)

    def _apply(self) -> None:
        """Frees first: a slot that was freed may have a new owner in this forward."""
        state = self.canary.state
        if self._is_cleared:
            self.canary.poison(torch.arange(state.num_slots, device=self._device))
            self._is_cleared = False
        for slots in self._freed:
            if slots.is_cuda:
                slots.record_stream(torch.cuda.current_stream())
            self.canary.poison(slots.long())
        self._freed = []
        rows = list(self._announced.values())
        self._announced = {}
        if rows:
            numbers = on_device([[row.number for row in rows]], self._device)[0]
            begins = [r.shifted if self._is_draft else r.lineage for r in rows]
            values = [begins, [row.seed for row in rows]]
            values.append([row.serial for row in rows])
            self.canary.expect(numbers, on_device(values, self._device))

    def _send(self) -> Pending:
        state = self.canary.state
        counts = torch.cat((state.ring_count, state.clock - self._clock))
        if not counts.is_cuda:
            return Pending(None, counts, self._mode)
        host = torch.empty(2, dtype=torch.int64, pin_memory=True)
        host.copy_(counts, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Pending(event, host, self._mode)
