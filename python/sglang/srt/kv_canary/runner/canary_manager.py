"""The canary of one worker: scopes around launches and forwards, and their findings.

```
with_ops_outside_graph            poison what was freed, lineages, sweep
  with_active_single_forward_manager(i)      one model forward, captured or not
    pre_ops_maybe_inside_graph    verify and head
    (the model)                   in the order of `launch_order`
    post_ops_maybe_inside_graph   tail: records, lineages, findings
ends.send_step                    findings travel with the tokens, in one copy
take, report                      on the host: `raise` mode stops
```
What is due and what was found is the runtime's (`kv_canary.runtime`); the slots of each
group are the groups' (`groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kv_canary.findings import is_clean, parse_counters
from kv_canary.layout import FingerprintMode
from kv_canary.records import FIRST_CLOCK, NOBODY, NUM_COUNTERS, Counter, Expected
from kv_canary.runtime.host import HostCapabilities
from kv_canary.runtime.mode import Mode
from kv_canary.runtime.runtime import (
    Announcement,
    CanaryRuntime,
    Examined,
    Testimony,
)
from kv_canary.runtime.uploads import upload
from kv_canary.serials import SerialMap
from kv_canary.violation import POOLS, Violation
from sglang.srt.forward.context import get_forward_context
from sglang.srt.forward.scopes import context_tuple
from sglang.srt.kv_canary.attention_calls import AttentionCalls
from sglang.srt.kv_canary.draft_state import DraftState
from sglang.srt.kv_canary.draws import DrawCheck, announced_words
from sglang.srt.kv_canary.lineages import PrefixLineages
from sglang.srt.kv_canary.runner.details import HostBooks, details
from sglang.srt.kv_canary.runner.health_checker import HealthChecker
from sglang.srt.kv_canary.runner.launch_log import LaunchLog
from sglang.srt.kv_canary.runner.launch_order import LaunchOrder
from sglang.srt.kv_canary.runner.scopes import ForwardScope, LaunchScope
from sglang.srt.kv_canary.runner.slot_pattern import PoolPattern
from sglang.srt.kv_canary.runner.state_sweep import StateSweeper
from sglang.srt.kv_canary.runner.stats_logger import StatsLogger
from sglang.srt.kv_canary.runner.step_end import StepEnd
from sglang.srt.kv_canary.runner.sweep import Sweeper
from sglang.srt.kv_canary.runner.violation_reporter import create_reporter
from sglang.srt.kv_canary.single_forward_manager.manager import (
    CanaryTarget,
    SingleForwardManager,
)
from sglang.srt.mem_cache.radix_cache import RadixCache

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kv_canary.reporter import OwnerOf, ViolationReporter
    from kv_canary.view import KVReadView
    from sglang.srt.configs.draft_layout import TreeShape
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.forward.state_plan import DueCheckpoints
    from sglang.srt.kv_canary.config import CanaryConfig
    from sglang.srt.kv_canary.groups import EngineGroup
    from sglang.srt.kv_canary.lineages import KnownTokens, TokenOwner
    from sglang.srt.kv_canary.state_group import StateGroup
    from sglang.srt.layers.attention.window_tables import WindowForward
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.groups.slots import GroupSlots

    # Gets a forward and what its attention is about to read.
    Probe = Callable[[ForwardBatch, Sequence[KVReadView]], None]

__all__ = ["CanaryManager", "Examined", "SavedCanary", "context_tuple"]

ENGINE = HostCapabilities(modes=tuple(Mode))
"""It does not count captured launches itself: counters travel with its tokens."""

_TAIL_LAUNCHES = int(Counter.TAIL_LAUNCHES)

_NO_FORWARDS: dict[str, WindowForward] = {}

# Counts of the host from forward to forward.
_REHEARSED = (
    *("_sweepers", "clock", "_launches", "num_forwards"),
    *("_stats", "_health", "counters"),
)


@dataclass(frozen=True, kw_only=True)
class SavedCanary:
    """Where a canary is between two steps.

    `perturb` is what a room above the engine adds, as plain data; None: nothing.
    """

    next_forward: int
    num_launches: int
    perturb: dict[str, Any] | None = None


class CanaryManager:
    """Checks the KV pool of one worker.

    Args:
        target: shared by its forwards.
        num_managers: forwards of one launch.
        rank: of this process, for reports.
        target_canary: for a draft's pool, the target's manager; they report as one.

    Attributes:
        serials: requests by serial; the scheduler adds them.
        reporter: of everything found so far.
        runtime: what is due and what was found, in all groups.
        order: of the launches around the model.
        draws: the check of what is sampled; None for a draft, and with the token
            oracle, whose tokens are not drawn.
        ends: ends steps.
        active: whose forward is open.
        calls: of attention, in the forward that is open.
        probe: sees each forward, and what its attention is about to read; None: nobody.
        reports: those of the groups, about launches.
        clock: number of the next forward on the device, by the host's count.
        counters: the device's (`records.Counter`) as of the last result.
        num_forwards: launches since set-up.
    """

    def __init__(
        self,
        target: CanaryTarget,
        *,
        num_managers: int = 1,
        rank: int,
        target_canary: CanaryManager | None = None,
    ) -> None:
        config, primary = target.config, target.groups[0]
        self.target = target
        if target_canary is None:
            self.serials = SerialMap()
            self.reporter: ViolationReporter = create_reporter(
                config,
                page_size=target.page_size,
                serials=self.serials,
                rank=rank,
            )
        else:
            self.serials = target_canary.serials
            self.reporter = target_canary.reporter
        self.runtime: CanaryRuntime[EngineGroup] = CanaryRuntime(
            target.every,
            host=ENGINE,
            mode=config.mode,
            reporter=self.reporter,
            with_tokens=config.report_tokens,
        )
        self._state = primary.state
        self._has_secondary = len(target.groups) > 1
        self._device = self._state.head.device
        self._lineages = PrefixLineages(token_offset=target.token_offset)
        self._managers = [SingleForwardManager(target, i) for i in range(num_managers)]
        self.draws: DrawCheck | None = None
        if not (target.is_draft or target.oracle):
            table = target.req_to_token_pool.token_table
            self.draws = DrawCheck(self._state, token_table=table)
        self.ends = StepEnd(target, last=self._managers[-1], draws=self.draws)
        self._forward_scopes = [
            ForwardScope(self, manager) for manager in self._managers
        ]
        self.active: SingleForwardManager | None = None
        self.order = LaunchOrder(
            self._device,
            precedes=primary.checks.fingerprint.mode is FingerprintMode.ALL
            or target.states is not None,
            is_draft=target.is_draft,
        )
        self.probe: Probe | None = None
        self._launched: ForwardBatch | None = None
        # Forwards of that launch that ran, and that must.
        self._num_run = self._num_due = 0
        self._is_init_finished = False
        reports = [own.launch_report(target) for own in target.every]
        self.reports = [report for report in reports if report is not None]
        # One per group.
        self._sweepers: list[Sweeper | StateSweeper] = []
        self.clock = FIRST_CLOCK
        self._launches = LaunchLog(topk=target.topk if target.is_draft else None)
        self.num_forwards = 0
        self._stats = StatsLogger(
            config.stats_every,
            pool=POOLS[target.is_draft],
            seconds=config.stats_seconds,
        )
        self._health = HealthChecker()
        self.counters = [0] * NUM_COUNTERS
        self.calls = AttentionCalls(target.kv_pool)
        self.calls.watch(target.attn_backend)

    @property
    def config(self) -> CanaryConfig:
        return self.target.config

    # -- set-up --------------------------------------------------------------------

    def attach_radix_cache(self, cache: BasePrefixCache) -> None:
        """Sweep the unused slots of this prefix cache from now on."""
        if self.config.sweep_interval and isinstance(cache, RadixCache):
            self._sweepers = [
                Sweeper(
                    cache,
                    group,
                    budget=self.config.sweep_budget,
                    token_offset=self.target.token_offset,
                )
                for group in self.target.groups
            ]
            states, checkpoints = self.target.states, cache.checkpoints
            if states is not None and checkpoints is not None:
                budget = self._state_budget(states)
                self._sweepers.append(
                    StateSweeper(cache, checkpoints, states, budget=budget)
                )

    @property
    def nbytes(self) -> int:
        """Device memory of the records of all groups. Sums of states lie with them."""
        states = self.target.states
        groups = [*self.target.groups, *([] if states is None else [states])]
        return sum(group.nbytes for group in groups)

    def _state_budget(self, states: StateGroup) -> int:
        """The checkpoints of one sweep pass: as many bytes as its KV slots have."""
        kv_bytes = self.target.kv_pool.nbytes // self._state.num_slots
        share = self.config.sweep_budget * kv_bytes
        return max(share // states.pool.shape.bytes_per_slot, 1)

    def expect_prefixes(
        self,
        owners: Sequence[TokenOwner],
        prefix_lens: Sequence[int],
        req_pool_indices: Tensor,
        *,
        salts: Sequence[int] | None = None,
    ) -> None:
        """Announce the prefixes that the next prefill continues, by the host's tokens:
        of `owners[i]` the first `prefix_lens[i]`, in row `req_pool_indices[i]` ([R]
        int64, on the device). On a GPU the forward itself tells the device.

        Args:
            salts: under which the forward writes; a row with another salt than its
                owner's is announced as nobody's, so its first write is a finding.
        """
        self.runtime.announce(
            partial(self._announcement, owners, prefix_lens, req_pool_indices, salts)
        )
        if self.order.side is None:
            self.runtime.settle()

    def _announcement(
        self,
        owners: Sequence[TokenOwner],
        prefix_lens: Sequence[int],
        rows: Tensor,
        salts: Sequence[int] | None,
    ) -> Announcement:
        due = self._lineages.announcement(owners, prefix_lens)
        for row, (owner, salt) in enumerate(zip(owners, salts or (), strict=False)):
            if salt != owner.salt:
                due[Expected.SERIAL][row] = NOBODY
        values = torch.tensor(due)
        if self.draws is not None:
            # One copy for both.
            words = torch.from_numpy(announced_words(owners))
            both = upload(torch.cat((values, words)), self._device)
            values, words = both[: len(values)], both[len(values) :]
            then = partial(self.draws.announce, owners, rows, words)
            return Announcement(rows, values, then)
        oracle, expect = self.target.oracle, None
        if oracle is not None:
            prompts = torch.tensor([owner.prompt_len for owner in owners])
            expect = partial(oracle.expect_prompts, upload(prompts, self._device), rows)
        return Announcement(rows, upload(values, self._device), expect)

    def expect_again(self, tokens: Iterable[tuple[TokenOwner, KnownTokens]]) -> None:
        """Compare the tokens of requests with these at their next prefill."""
        self._lineages.expect_again(tokens)

    def settle(self) -> None:
        """Tell the device now what was freed and announced, not with the next forward:
        for callers that look at the state before it."""
        self.runtime.settle()

    def draft_state(self, shape: TreeShape) -> DraftState:
        """The check of what this pool's worker hands on from forward to forward."""
        max_requests = self.target.req_to_token_pool.size
        return DraftState(self._state, max_requests=max_requests, shape=shape)

    def set_branches(self, topk: int) -> None:
        """Note the branches of each request in the next draft steps, for reports."""
        self._launches.topk = topk

    def mark_init_finished(self) -> None:
        """Let sweeps and health checks begin: all graphs are captured."""
        self._set_init_finished(True)
        self.clock = int(self._state.clock.item())
        self._launches.clear()

    def _set_init_finished(self, is_finished: bool) -> None:
        self._is_init_finished = is_finished
        if self.draws is not None:
            self.draws.is_on = is_finished

    @property
    def next_forward(self) -> int:
        """Number of the next forward on the device."""
        return self.clock

    def save(self) -> SavedCanary:
        """Where the canary is between two steps, for `load`."""
        return SavedCanary(next_forward=self.clock, num_launches=self.num_forwards)

    def load(self, saved: SavedCanary) -> None:
        """Go on from a saved state: the next forward gets its number."""
        self.clock = saved.next_forward
        for group in self.target.every:
            group.state.clock.fill_(saved.next_forward)
        self.num_forwards = saved.num_launches
        self._launches.clear()

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Scope of forwards that rebuild the pool: no sweeps, not counted.

        Raises:
            RuntimeError: something was found in them.
        """
        self._set_init_finished(False)
        try:
            yield
        finally:
            self._set_init_finished(True)
        found = int(self._state.ring_count.item())
        if found:
            raise RuntimeError(f"{found} finding(s) in forwards that rebuilt the pool")

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Scope of forwards that are checked like all others and then forgotten; those
        of a draft's pool inside the scope of its target's."""
        before = [
            (group, group.state.arena.clone(), list(group.freed))
            for group in self.target.every
        ]
        numbers = {name: copy(getattr(self, name)) for name in _REHEARSED}
        yield
        for group, arena, freed in before:
            group.state.arena.copy_(arena)
            group.freed = freed
        for name, number in numbers.items():
            setattr(self, name, number)
        self.serials.clear()

    # -- around launches -----------------------------------------------------------

    def with_ops_outside_graph(
        self,
        *,
        single_forward_indices: Sequence[int],
        maybe_inaccurate_forward_batch: ForwardBatch,
    ) -> AbstractContextManager[None]:
        """Scope around a whole launch, outside any graph.

        Args:
            single_forward_indices: forwards that the launch will run.
            maybe_inaccurate_forward_batch: the live batch; a graph reads its own
                padded copy.
        """
        return LaunchScope(self, single_forward_indices, maybe_inaccurate_forward_batch)

    def with_active_single_forward_manager(
        self, index: int
    ) -> AbstractContextManager[None]:
        """Scope around one model forward, graph capture included."""
        return self._forward_scopes[index]

    def on_replay(self) -> None:
        """Note that a graph runs all forwards of the launch, without their scopes."""
        self.runtime.settle()
        self._num_run = self._num_due

    def on_commit(
        self,
        *,
        slots: Tensor,
        path: Tensor,
        path_lens: Tensor,
        due: DueCheckpoints | None,
    ) -> None:
        """As `ForwardScopes.on_commit`."""
        if self.target.states is not None:
            self.target.states.commits.begin((slots, path, path_lens), due)

    def open_launch(self, indices: Sequence[int], forward_batch: ForwardBatch) -> None:
        """Begin a launch: `LaunchScope` does."""
        if self._launched is not None:
            raise RuntimeError("KV canary: a launch is already open; they do not nest")
        self._launched = forward_batch
        self._num_run, self._num_due = 0, len(indices)
        self._launches.add(self.clock, len(indices), forward_batch.forward_mode)
        self.clock += len(indices)
        try:
            if not self.order.may_run_behind(forward_batch):
                self.runtime.settle()
            for i in indices:
                self._managers[i].pre_ops_outside_graph(forward_batch)
            if self._is_init_finished:
                if self._sweepers:
                    self._sweep_if_due()
                for report in self.reports:
                    report(forward_batch)
        except BaseException:
            self._launched = None
            raise

    def close_launch(
        self, indices: Sequence[int], forward_batch: ForwardBatch, *, has_run: bool
    ) -> None:
        """End a launch: `LaunchScope` does."""
        self._launched = None
        self.order.forget()
        if not has_run:
            return
        if self._num_run != len(indices):
            raise RuntimeError(
                f"KV canary: {self._num_run} forwards ran in a launch of {len(indices)}"
            )
        for i in indices:
            self._managers[i].post_ops_outside_graph(forward_batch)
        if self._is_init_finished:
            self.num_forwards += 1

    def open_forward(self, forward: SingleForwardManager) -> None:
        """Begin a model forward: `ForwardScope` does."""
        if self.active is not None:
            raise RuntimeError("KV canary: a forward is already open; they do not nest")
        self.active = forward
        self._num_run += 1

    def pre_ops_maybe_inside_graph(
        self, forward_batch: ForwardBatch, *, is_replayed: bool = False
    ) -> None:
        """Before the model: check the slots that its attention reads and writes.

        Args:
            is_replayed: the model's stack is wrapped by
                `LaunchOrder.with_launch_behind`.

        Raises:
            AssertionError: outside `with_active_single_forward_manager`.
        """
        current = self.active or self._current()
        backend = get_forward_context().attn_backend
        is_launched = self._launched is not None
        views = backend.read_view(forward_batch)
        forwards = _NO_FORWARDS
        if self._has_secondary:
            forwards = backend.group_forwards(forward_batch)
        self.calls.begin(forward_batch, views[0], forwards)
        if self.probe is not None:
            self.probe(forward_batch, views)

        def launch() -> None:
            if is_launched:
                self.runtime.settle()
            current.pre_ops_maybe_inside_graph(forward_batch, views, forwards)

        self.order.before(
            forward_batch, launch, is_replayed=is_replayed and is_launched
        )

    def with_tail_after(self, stack: Callable[..., Any]) -> Callable[..., Any]:
        """See `LaunchOrder.with_tail_after`."""

        def tail(forward_batch: ForwardBatch) -> None:
            self._current().post_ops_maybe_inside_graph(forward_batch)

        return self.order.with_tail_after(stack, tail)

    def post_ops_maybe_inside_graph(self, forward_batch: ForwardBatch) -> None:
        """After the model: record its writes, unless `with_tail_after` did.

        Raises:
            RuntimeError: a layer has not made its calls.
        """
        self.calls.end()
        if self.order.join():
            return
        current = self.active or self._current()
        current.post_ops_maybe_inside_graph(forward_batch)

    def _current(self) -> SingleForwardManager:
        if self.active is None:
            raise AssertionError(
                "KV canary: a model forward outside with_active_single_forward_manager"
            )
        return self.active

    def _sweep_if_due(self) -> None:
        if self.num_forwards % self.config.sweep_interval == 0:
            self.runtime.settle()
            self.sweep()

    def sweep(self) -> None:
        """Launch one pass over each group's unused slots, if they are swept at all."""
        for sweeper in self._sweepers:
            sweeper.run()

    @property
    def num_sweep_passes(self) -> int:
        return self._sweepers[0].passes if self._sweepers else 0

    # -- results -------------------------------------------------------------------

    def finish_step(self, forward_batch: ForwardBatch) -> Tensor:
        """See `StepEnd.finish_step`."""
        return self.ends.finish_step(forward_batch)

    def take(self, words: list[int]) -> bool:
        """Take the findings of a step, before any of its tokens is used; returns
        whether there is something to `report`.

        Args:
            words: what `finish_step` returned.

        Raises:
            RuntimeError: the canary does not run.
        """
        counters = parse_counters(words)
        if counters[_TAIL_LAUNCHES] == self.counters[_TAIL_LAUNCHES]:
            raise RuntimeError(
                "the KV canary is not running: no tail launch since the last result, "
                "whose findings came again"
            )
        self.counters = counters
        self._health.on_result(counters)
        self._stats.on_counters(counters, violations=self.reporter.total)
        return not is_clean(words)

    def report(
        self,
        *,
        owner_of: OwnerOf,
        books: HostBooks,
        host_entries: Sequence[Sequence[int]] = (),
    ) -> None:
        """Report the findings that `take` saw, and those of the host.

        Args:
            owner_of: the owner of a slot by the host's records.
            books: what the host knows of requests.
            host_entries: findings of the host, as entries of the ring.

        Raises:
            CanaryViolation: the mode is not `log`.
        """
        found = self.examine(owner_of=owner_of, books=books, host_entries=host_entries)
        violations = self.runtime.publish(found)
        if self.runtime.mode is not Mode.LOG:
            raise self.runtime.as_error(violations)

    def examine(
        self,
        *,
        owner_of: OwnerOf,
        books: HostBooks,
        host_entries: Sequence[Sequence[int]] = (),
    ) -> Examined:
        """The findings so far, for the caller to act on and to publish
        (`ViolationReporter.publish`); waits for the device. See `report`."""
        testimony: Testimony[EngineGroup] = Testimony(
            owner_of=lambda group: group.owner_of(owner_of),
            mode_of=self._launches.mode_of,
            branch_of=self._launches.branch_of,
            details=partial(details, target=self.target, books=books),
        )
        return self.runtime.examine(testimony, host_entries)

    def drain(self, *, owner_of: OwnerOf, books: HostBooks) -> list[Violation]:
        """Report the findings in the ring now, even in the middle of a failed forward;
        waits for the device, and for no other rank."""
        if self.order.side is not None:
            self.order.side.join()
        found = self.examine(owner_of=owner_of, books=books)
        return self.runtime.publish(found)

    def read_heads(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The head records of primary slots, int64 [n, 4]; waits for the device."""
        heads: npt.NDArray[np.int64] = (
            self._state.head[torch.from_numpy(slots).to(self._device)].cpu().numpy()
        )
        return heads

    def slot_pattern(self, slots: GroupSlots | None) -> PoolPattern | None:
        """A pattern for slots of a group that nobody holds; None if this pool has no
        such group.

        Args:
            slots: of the group; None: the primary one.
        """
        for group in self.target.groups:
            if group.kv.slots is slots:
                return PoolPattern.of(group.state, group.kv.tensors)
        states = self.target.states
        return states.pattern() if states and states.slots is slots else None

    def full_slot(self, violation: Violation) -> int:
        """The primary slot that a violation is about; -1: none."""
        for group in self.target.every:
            if group.name == violation.group:
                return group.primary_slot(violation.slot)
        return violation.slot

    def checkpoint_of(self, violation: Violation) -> int:
        """The slot of the checkpoint that a violation is about; 0: none."""
        states = self.target.states
        if states is None or violation.group != states.name:
            return 0
        return states.checkpoint(violation.slot)

    def forget_rows(self, req_rows: Sequence[int]) -> None:
        """Clear the verdicts of request rows whose requests lose them, in stream order:
        nothing that was launched for them is looked at any more."""
        rows = torch.tensor(req_rows, dtype=torch.int64)
        self.runtime.forget_rows(upload(rows, self._device))
