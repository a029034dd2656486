"""SGLang's canary: turns a runner's hooks and batches into the runtime's verbs.

```
announce(request), free(slots)   from the scheduler, queued
begin(batch)                     applies them in the forward's stream; sets its rows
  before(batch), after()         inside the model's forward, captured with it
end()                            sends findings to the host
sampled(batch, tokens)           what the next inputs must be
collect(pending)                 waits for findings, reports, and raises
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kv_canary import launches
from kv_canary.accepted import SampledTokens
from kv_canary.engines.reporting import create_worker_reporter
from kv_canary.engines.sglang.batch import (
    IDLE,
    BatchRows,
    forward_mode_name,
    has_trees,
    make_view,
    read_lengths,
)
from kv_canary.engines.sglang.row_registry import RegisteredRow, RowRegistry
from kv_canary.engines.sglang.tree import Trees
from kv_canary.engines.sglang.tree_histories import TreeHistories
from kv_canary.evidence import Owner
from kv_canary.pool_checks import PoolChecks
from kv_canary.records import UNKNOWN, Request
from kv_canary.runtime.group import CanaryGroup
from kv_canary.runtime.host import HostCapabilities
from kv_canary.runtime.runtime import Announcement, CanaryRuntime, Testimony
from kv_canary.runtime.uploads import upload_rows
from kv_canary.state import create_state
from kv_canary.violation import GROUPS, pool_number

if TYPE_CHECKING:
    from kv_canary.engines.settings import Settings
    from kv_canary.engines.sglang.pool import SeenPool
    from kv_canary.reporter import OwnerOf, ViolationReporter
    from kv_canary.runtime.pending import Pending
    from kv_canary.violation import Violation

RING_CAPACITY = 1024
_SPARE_ROWS = 512

SGLANG = HostCapabilities(can_sweep=False, captures_launches=True)
"""Its runners capture the model's forward, and the prefix cache has no hook for walking
it between two steps."""


class RunnerCanary:
    """Checks the forwards of one runner.

    Args:
        pool: the runner's KV.
        req_to_token: int32 [rows, columns], the engine's own table; row 0 is padding.
        allocator: allocator of slots; asked for its free pages when something is found.
        tree_width: nodes of a verification; 0 if there is none.
        target: the target's canary, if this is the pool of its draft model. It also
            keeps requests and reports for both.

    Attributes:
        registry: which request has which row.
        pool: the runner's KV.
        groups: groups of the pool.
        draft: the canary of the draft model's pool.
        reporter: reporter of everything found so far.
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
        self._device = pool.device
        self._allocator = allocator
        self._table = req_to_token
        self._is_draft = target is not None
        self.pool = pool
        self.registry: RowRegistry = (
            RowRegistry() if target is None else target.registry
        )
        self.draft: RunnerCanary | None = None
        self.reporter: ViolationReporter = (
            create_worker_reporter(
                settings,
                page_size=pool.page_size,
                serials=self.registry.serials,
                ring_capacity=RING_CAPACITY,
                rank=rank,
            )
            if target is None
            else target.reporter
        )
        self._group = _create_group(pool, req_to_token, is_draft=self._is_draft)
        self.groups = [self._group]
        self._runtime = CanaryRuntime(
            self.groups,
            host=SGLANG,
            mode=settings.mode,
            reporter=self.reporter,
            with_tokens=settings.report_tokens,
        )
        self._testimony = Testimony(owner_of=self._owner_lookup)
        capacity = req_to_token.shape[0] + _SPARE_ROWS
        self.rows = BatchRows(capacity, self._device)
        self.trees = Trees(capacity, tree_width, self._device)
        self._histories = TreeHistories(
            self._group.state, req_to_token, tree_width=tree_width
        )
        self._announced: dict[int, RegisteredRow] = {}
        self._mode = IDLE
        # Whether the open forward has trees; a capture has no `begin`.
        self._has_trees = False

    @property
    def forwards(self) -> int:
        """Number of forwards that were checked."""
        return self._runtime.forwards

    def announce(self, request: Any) -> None:
        """Register a request that is about to start or continue its prefill."""
        row = self.registry.announce(request)
        for canary in self._both():
            canary._announced[row.number] = row

    def free(self, slots: Tensor) -> None:
        """Note that slots [n] were freed. They are poisoned before the next forward and
        after those that still run."""
        if slots.numel():
            # The engine may hand over a view of its table.
            copy = slots.detach().clone().long()
            for canary in self._both():
                canary._group.free(copy)

    def clear(self) -> None:
        """Note that all slots were freed."""
        for canary in self._both():
            group = canary._group
            group.freed = [torch.arange(group.state.num_slots, device=canary._device)]

    def move(self, *, dst: Tensor, src: Tensor) -> None:
        """Note that the bytes of slots `src` were moved to `dst`, [n] each."""
        self._group.move(dst.long(), src.long())

    def begin(self, batch: Any) -> None:
        """Prepare for a forward of the runner, in its stream.

        Raises:
            RuntimeError: one of its rows was never announced.
            CanaryViolation: in mode `raise`, if an earlier forward found something.
        """
        self.poll()
        self._mode = forward_mode_name(batch)
        if self._mode == IDLE or not batch.batch_size:
            self._mode = IDLE
            return
        if self._announced:
            self._runtime.announce(self._announcement)
        self._runtime.begin()
        rows = self._batch_rows(batch)
        self.rows.begin([row.serial for row in rows], [row.salt for row in rows])
        if has_trees(self._mode):
            spec = batch.spec_info
            self.trees.begin(
                getattr(spec, "custom_mask", None),
                read_lengths(batch).prefix[: len(rows)],
                int(spec.draft_token_num),
            )

    def before(self, batch: Any) -> None:
        """Run before the model's forward; during a capture, become part of the
        graph."""
        mode = forward_mode_name(batch)
        if mode == IDLE:
            self._runtime.forward.abandon()
            return
        self._has_trees = has_trees(mode)
        view = make_view(batch, self.rows, self.trees, self._table, self._group.seeds)
        self._histories.before(view)
        self._runtime.forward.before([view])

    def after(self) -> None:
        """Run after the model's forward."""
        forward = self._runtime.forward
        if not forward.is_open:
            return
        (view,) = forward.after(advance=not self._has_trees)
        assert view is not None
        # Until the engine samples, the next input is unknown.
        requests = self._group.state.requests
        requests[:, Request.NEXT_WORD0].index_fill_(0, view.req_rows, UNKNOWN)
        self._histories.after(view)

    def end(self) -> None:
        """Send the findings of a forward of the runner to the host.

        Raises:
            CanaryViolation: in mode `raise` on the CPU, where findings are immediate.
            RuntimeError: on the CPU, if the forward was not checked.
        """
        if self._mode == IDLE:
            return
        self.rows.end()
        self._runtime.count()
        self._runtime.end(self._runtime.send(mode=self._mode), self._testimony)

    def sampled(self, batch: Any, tokens: Tensor) -> None:
        """Record the next inputs of the rows of the forward that has just run."""
        mode = forward_mode_name(batch)
        if mode == IDLE or has_trees(mode) or tokens.numel() != batch.batch_size:
            return
        n = tokens.numel()
        lengths = read_lengths(batch)
        launches.note_tokens(
            self._group.state,
            SampledTokens(
                req_rows=batch.req_pool_indices[:n].long(),
                serials=self.rows.serials[:n].clone(),
                tokens=tokens.view(-1).long(),
                prefix_lens=lengths.prefix[:n].contiguous(),
                extend_lens=lengths.extend[:n].contiguous(),
            ),
        )

    def poll(self) -> None:
        """See `CanaryRuntime.poll`."""
        self._runtime.poll(self._testimony)

    def take_pending(self) -> list[Pending]:
        """See `CanaryRuntime.take_pending`."""
        return self._runtime.take_pending()

    def collect(self, pending: Pending) -> list[Violation]:
        """See `CanaryRuntime.collect`."""
        return self._runtime.collect(pending, self._testimony)

    def found_now(self) -> list[Violation]:
        """In mode `log`, report what the last forward found. Waits for the device. For
        self-tests, which call it before `end`."""
        return self.collect(self._runtime.send(mode=self._mode))

    def owner(self, slot: int) -> Owner:
        """Return the owner of a slot by the engine's tables. Waits for the device."""
        held = [row.rid for row in self.registry.rows() if self._holds(row, slot)]
        if held:
            names = " and ".join(repr(rid) for rid in held)
            return Owner(f"request {names}", is_allocated=True)
        free = getattr(self._allocator, "free_pages", None)
        page = slot // self.pool.page_size
        if isinstance(free, Tensor) and bool((free == page).any()):
            return Owner("nobody")
        return Owner("the prefix cache, or nobody", is_shared=True, is_allocated=True)

    def requests(self) -> None:
        """Not counted: all are verified."""

    def healed(self) -> None:
        """SGLang takes no request back."""

    def counters(self) -> list[int]:
        """Return `records.Counter` of all pools. Waits for the device."""
        lists = [canary._runtime.counters() for canary in self._both()]
        return [sum(values) for values in zip(*lists, strict=True)]

    def summary(self) -> str:
        return self._runtime.summary()

    def _owner_lookup(self, group: CanaryGroup) -> OwnerOf:
        return self.owner

    def _holds(self, row: RegisteredRow, slot: int) -> bool:
        return slot > 0 and bool((self._table[row.number] == slot).any())

    def _both(self) -> list[RunnerCanary]:
        """Return this canary and the draft model's, if any."""
        return [self] if self.draft is None else [self, self.draft]

    def _batch_rows(self, batch: Any) -> Sequence[RegisteredRow]:
        rids = batch.rids
        if rids is None or len(rids) != batch.batch_size:
            raise RuntimeError(
                f"kv_canary: looked for the ids of {batch.batch_size} requests in "
                f"ForwardBatch.rids, found {rids!r}"
            )
        return self.registry.find_rows(rids)

    def _announcement(self) -> Announcement:
        rows, self._announced = list(self._announced.values()), {}
        numbers = upload_rows([[row.number for row in rows]], self._device)[0]
        begins = [row.shifted if self._is_draft else row.lineage for row in rows]
        values = [begins, [row.seed for row in rows], [row.serial for row in rows]]
        self._histories.forget(numbers)
        return Announcement(numbers, upload_rows(values, self._device))


def _create_group(
    pool: SeenPool, req_to_token: Tensor, *, is_draft: bool
) -> CanaryGroup:
    state = create_state(
        num_slots=pool.num_slots,
        req_rows=req_to_token.shape[0],
        ring_capacity=RING_CAPACITY,
        num_managers=1,
        device=pool.device,
        pool=pool_number(is_draft=is_draft, group=GROUPS[0]),
    )
    # A draft's slot holds the token after its position, so histories begin with a seed.
    rows = req_to_token.shape[0]
    return CanaryGroup(
        state=state,
        checks=PoolChecks(
            page_size=pool.page_size,
            fingerprint=pool.fingerprint,
            req_to_token=req_to_token,
        ),
        seeds=state.expected_lineage.new_zeros(rows) if is_draft else None,
        slot_bytes=pool.scattered,
    )
