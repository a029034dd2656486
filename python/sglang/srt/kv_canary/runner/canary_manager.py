"""The canary of one worker: scopes around launches and forwards, and their findings.

```
with_ops_outside_graph            poison what was freed, lineages, sweep
  with_active_single_forward_manager(i)      one model forward, captured or not
    pre_ops_maybe_inside_graph    verify and head; on a GPU beside a large model step,
                                  and after the start of a prefill graph
    (the model)
    post_ops_maybe_inside_graph   tail: records, lineages, findings; on a GPU beside
                                  the model's head (`with_tail_after`)
ends.send_step                    findings travel with the tokens, in one copy
take, report                      on the host: `raise` mode stops
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kv_canary.findings import is_clean, parse_counters
from kv_canary.layout import FingerprintMode
from kv_canary.records import (
    FIRST_CLOCK,
    NUM_COUNTERS,
    POISON_WORD,
    Counter,
    unpack_word0,
)
from kv_canary.reporter import Finding, OwnerOf, ViolationReporter, as_error
from kv_canary.serials import SerialMap
from kv_canary.violation import POOLS, Violation
from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.forward.context import get_forward_context
from sglang.srt.forward.graph_capture import SideStream
from sglang.srt.kv_canary.attention_calls import AttentionCalls
from sglang.srt.kv_canary.config import CanaryConfig, CanaryMode
from sglang.srt.kv_canary.draft_state import DraftState
from sglang.srt.kv_canary.pool_patcher.api import SWA
from sglang.srt.kv_canary.runner.due_work import DueWork
from sglang.srt.kv_canary.runner.health_checker import HealthChecker
from sglang.srt.kv_canary.runner.launch_log import LaunchLog
from sglang.srt.kv_canary.runner.slot_pattern import PoolPattern
from sglang.srt.kv_canary.runner.stats_logger import StatsLogger
from sglang.srt.kv_canary.runner.step_end import StepEnd
from sglang.srt.kv_canary.runner.swa_divergence import SwaDivergence
from sglang.srt.kv_canary.runner.sweep import Sweeper
from sglang.srt.kv_canary.runner.violation_reporter import create_reporter
from sglang.srt.kv_canary.single_forward_manager.manager import (
    CanaryTarget,
    SingleForwardManager,
)
from sglang.srt.mem_cache.radix_cache import RadixCache

if TYPE_CHECKING:
    from kv_canary.state import CanaryState
    from kv_canary.view import KVReadView
    from sglang.srt.distributed.parallel_state import TensorParallelGroup
    from sglang.srt.kv_canary.lineages import TokenOwner
    from sglang.srt.kv_canary.pool_patcher.api import CanaryBuffers
    from sglang.srt.kv_canary.runner.window_canary import WindowCanary
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.groups.runs import GroupRuns
    from sglang.srt.mem_cache.groups.slots import GroupSlots

BESIDE_FROM_TOKENS = 16
"""New tokens from which on verify and head run beside the model: below, fork and join
cost more than they hide."""

LAUNCH_BEHIND_GRAPH = True
"""Whether a prefill graph is launched before the launch that precedes other models."""

TAIL_BESIDE_HEAD = True
"""Whether the tail write of a model with a stack runs beside the model's head. That of
a small plain decode step does not: there it costs more than it hides."""

_TAIL_LAUNCHES = int(Counter.TAIL_LAUNCHES)

# The tokens of a running request by its serial; None: it is not running.
TokensOf = Callable[[int], Sequence[int] | None]

# Gets a forward and what its attention is about to read.
Probe = Callable[[ForwardBatch, "Sequence[KVReadView]"], None]

# Counts of the host from forward to forward.
_REHEARSED = (
    *("_sweepers", "_clock", "_launches", "_forwards"),
    *("_stats", "_health", "_counters"),
)


class Examined(NamedTuple):
    """The findings in a ring; `dropped`: entries that found no place in it."""

    found: list[Finding]
    dropped: int


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
        group: ranks that must come to the same verdicts.
        target_canary: for a draft's pool, the target's manager; they report as one.

    Attributes:
        serials: requests by serial; the scheduler adds them.
        reporter: of everything found so far.
        ends: ends steps.
        active: whose forward is open.
        calls: of attention, in the forward that is open.
        side: the stream of launches beside the model; None on the CPU.
        probe: sees each forward, and what its attention is about to read; None: nobody.
        windows: of a model with window slots; None: there are none.
    """

    def __init__(
        self,
        target: CanaryTarget,
        *,
        num_managers: int = 1,
        group: TensorParallelGroup,
        target_canary: CanaryManager | None = None,
    ) -> None:
        config = target.config
        self.target = target
        if target_canary is None:
            self.serials = SerialMap()
            self.reporter: ViolationReporter = create_reporter(
                config,
                page_size=target.page_size,
                serials=self.serials,
                rank=group.rank,
            )
        else:
            self.serials = target_canary.serials
            self.reporter = target_canary.reporter
        self._state = target.buffers.state
        self._due = DueWork(target)
        self.windows: WindowCanary | None = self._due.windows
        self._managers = [SingleForwardManager(target, i) for i in range(num_managers)]
        self.ends = StepEnd(
            target,
            last=self._managers[-1],
            windows=self.windows,
            group=group,
        )
        self._forward_scopes = [
            _ForwardScope(self, manager) for manager in self._managers
        ]
        self.active: SingleForwardManager | None = None
        self.side: SideStream | None = None
        if self._state.head.is_cuda:
            stream = torch.cuda.Stream()
            # With the device named the current stream is found in half the time.
            current = partial(torch.cuda.current_stream, stream.device_index)
            self.side = SideStream(stream, current=current)
        self.probe: Probe | None = None
        self._has_tail = False
        self._launched: ForwardBatch | None = None
        # Forwards of that launch that ran, and that must.
        self._num_run = self._num_due = 0
        # The launch before the model, while it waits for the model's graph to start.
        self._behind: Callable[[], None] | None = None
        self._is_init_finished = False
        self._fills = target.buffers.fingerprint.mode is FingerprintMode.ALL
        if target.windows is not None:
            self.divergence = SwaDivergence(
                target, target.windows, every=config.divergence_every
            )
        # Of the full group, and of the window group if there is one.
        self._sweepers: list[Sweeper] = []
        # Number of the next forward on the device, and the newest launches.
        self._clock = FIRST_CLOCK
        self._launches = LaunchLog(topk=target.topk if target.is_draft else None)
        self._forwards = 0
        self._stats = StatsLogger(config.stats_every, pool=POOLS[target.is_draft])
        self._health = HealthChecker()
        self._counters = [0] * NUM_COUNTERS
        self.calls = AttentionCalls(target.kv_pool)
        self.calls.watch(target.attn_backend)

    @property
    def config(self) -> CanaryConfig:
        return self.target.config

    @property
    def clock(self) -> int:
        """Number of the next forward on the device, by the host's count."""
        return self._clock

    # -- set-up --------------------------------------------------------------------

    def on_free(self, slots: Tensor) -> None:
        """Remember freed slots (int64, host): poisoned before the next forward."""
        self._due.on_free(slots)

    def on_region_free(self, slots: Tensor) -> None:
        """The same for slots of the draft region and their window slots."""
        self._due.on_region_free(slots)

    def attach_radix_cache(self, cache: BasePrefixCache) -> None:
        """Sweep the unused slots of this prefix cache from now on."""
        if self.config.sweep_interval and isinstance(cache, RadixCache):
            groups: list[tuple[CanaryBuffers, GroupRuns | None]]
            groups = [(self.target.buffers, None)]
            if self.target.windows is not None:
                windows = self.target.windows
                groups += [
                    (windows.buffers, group)
                    for group in cache.groups
                    if group.slots is windows.slots
                ]
            self._sweepers = [
                Sweeper(
                    cache,
                    buffers,
                    budget=self.config.sweep_budget,
                    token_offset=self.target.token_offset,
                    group=group,
                )
                for buffers, group in groups
            ]

    def expect_prefixes(
        self,
        owners: Sequence[TokenOwner],
        prefix_lens: Sequence[int],
        req_pool_indices: Tensor,
    ) -> None:
        """Announce the prefixes that the next prefill continues, by the host's tokens:
        of `owners[i]` the first `prefix_lens[i]`, in row `req_pool_indices[i]` ([R]
        int64, on the device). On a GPU the forward itself tells the device."""
        self._due.announce(owners, prefix_lens, req_pool_indices)
        if self.side is None:
            self._due.settle()

    def settle(self) -> None:
        """Tell the device now what was freed and announced, not with the next forward:
        for callers that look at the state before it."""
        self._due.settle()

    def draft_state(self, *, max_nodes: int) -> DraftState:
        """The check of what this pool's worker hands on from forward to forward."""
        req_rows = self.target.req_to_token_pool.size + 1
        return DraftState(self._state, req_rows=req_rows, max_nodes=max_nodes)

    def mark_init_finished(self) -> None:
        """Let sweeps and health checks begin: all graphs are captured."""
        self._is_init_finished = True
        self._clock = int(self._state.clock.item())
        self._launches.clear()

    @property
    def next_forward(self) -> int:
        """Number of the next forward on the device."""
        return self._clock

    def save(self) -> SavedCanary:
        """Where the canary is between two steps, for `load`."""
        return SavedCanary(
            next_forward=self._clock,
            num_launches=self._forwards,
        )

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Scope of forwards that rebuild the pool: no sweeps, not counted.

        Raises:
            RuntimeError: something was found in them.
        """
        self._is_init_finished = False
        try:
            yield
        finally:
            self._is_init_finished = True
        found = int(self._state.ring_count.item())
        if found:
            raise RuntimeError(f"{found} finding(s) in forwards that rebuilt the pool")

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Scope of forwards that are checked like all others and then forgotten; those
        of a draft's pool inside the scope of its target's."""
        states = [self._state]
        if self.windows is not None:
            states.append(self.windows.state)
        arenas = [state.arena.clone() for state in states]
        numbers = {name: copy(getattr(self, name)) for name in _REHEARSED}
        freed = list(self._due.freed)
        yield
        for state, arena in zip(states, arenas, strict=True):
            state.arena.copy_(arena)
        for name, before in numbers.items():
            setattr(self, name, before)
        self._due.freed = freed
        self.serials.clear()
        if self.windows is not None:
            self.windows.forget_freed()

    def load(self, saved: SavedCanary) -> None:
        """Go on from a saved state: the next forward gets its number."""
        self._clock = saved.next_forward
        self._state.clock.fill_(saved.next_forward)
        self._forwards = saved.num_launches
        self._launches.clear()

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
        return _LaunchScope(
            self, single_forward_indices, maybe_inaccurate_forward_batch
        )

    def with_active_single_forward_manager(
        self, index: int
    ) -> AbstractContextManager[None]:
        """Scope around one model forward, graph capture included."""
        return self._forward_scopes[index]

    def on_replay(self) -> None:
        """Note that a graph runs all forwards of the launch, without their scopes."""
        self._due.settle()
        self._num_run = self._num_due

    def _open_launch(self, indices: Sequence[int], forward_batch: ForwardBatch) -> None:
        if self._launched is not None:
            raise RuntimeError("KV canary: a launch is already open; they do not nest")
        self._launched = forward_batch
        self._num_run, self._num_due = 0, len(indices)
        self._launches.add(self._clock, len(indices), forward_batch.forward_mode)
        self._clock += len(indices)
        try:
            if not self._may_run_behind(forward_batch):
                self._due.settle()
            for i in indices:
                self._managers[i].pre_ops_outside_graph(forward_batch)
            if self._is_init_finished:
                if self._sweepers:
                    self._sweep_if_due()
                if self.windows is not None:
                    self.divergence.on_launch(forward_batch)
        except BaseException:
            self._launched = None
            raise

    def _close_launch(
        self, indices: Sequence[int], forward_batch: ForwardBatch, *, has_run: bool
    ) -> None:
        self._launched = self._behind = None
        if not has_run:
            return
        if self._num_run != len(indices):
            raise RuntimeError(
                f"KV canary: {self._num_run} forwards ran in a launch of {len(indices)}"
            )
        for i in indices:
            self._managers[i].post_ops_outside_graph(forward_batch)
        if self._is_init_finished:
            self._forwards += 1

    def pre_ops_maybe_inside_graph(
        self, forward_batch: ForwardBatch, *, is_replayed: bool = False
    ) -> None:
        """Before the model: check the slots that its attention reads and writes.

        Args:
            is_replayed: the model's stack is wrapped by `with_launch_behind`.

        Raises:
            AssertionError: outside `with_active_single_forward_manager`.
        """
        current = self.active or self._current()
        backend = get_forward_context().attn_backend
        is_launched = self._launched is not None
        views = backend.read_view(forward_batch)
        window = None
        if self.windows is not None:
            (window,) = backend.group_forwards(forward_batch).values()
        self.calls.begin(forward_batch, views[0], window)
        if self.probe is not None:
            self.probe(forward_batch, views)

        def launch() -> None:
            if is_launched:
                self._due.settle()
            current.pre_ops_maybe_inside_graph(forward_batch, views, window)

        is_small = forward_batch.num_tokens < BESIDE_FROM_TOKENS
        if self.side is None or self._fills:
            launch()
        elif is_replayed and is_launched and self._may_run_behind(forward_batch):
            self.side.follow()
            self._behind = launch
        elif is_small:
            launch()
        else:
            # Beside the model: it writes other slots than verify reads, and no records.
            with self.side.fork():
                launch()

    def _may_run_behind(self, forward_batch: ForwardBatch) -> bool:
        """Whether the launch before the model, and what is due before it, may start
        after the model does: not where all bytes are covered and new slots are filled,
        which the model must follow."""
        may_overlap = self.side is not None and not self._fills and LAUNCH_BEHIND_GRAPH
        return may_overlap and forward_batch.forward_mode is ForwardMode.EXTEND

    def with_launch_behind(self, stack: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a layer stack that replays a graph: the launch before the model comes
        when the graph has started, on the side stream, after what preceded the graph.
        The device does not wait for the host's part of it."""

        def run(*args: Any) -> Any:
            try:
                return stack(*args)
            finally:
                # Also where it failed: the check may know over what.
                behind, self._behind = self._behind, None
                if behind is not None and self.side is not None:
                    with self.side.resume():
                        behind()

        return run

    def with_tail_after(self, stack: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a model's layer stack (`StackedModel.forward_stack`): the launch after
        the model follows it, beside the model's head, which writes no KV; only where
        there is a side stream."""
        side, is_draft = self.side, self.target.is_draft
        if side is None or not TAIL_BESIDE_HEAD:
            return stack

        def run(input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Any:
            output = stack(input_ids, positions, batch)
            is_plain_decode = batch.forward_mode.is_decode and not is_draft
            if is_plain_decode and input_ids.shape[0] < BESIDE_FROM_TOKENS:
                return output
            with side.fork():
                self._current().post_ops_maybe_inside_graph(batch)
            self._has_tail = True
            return output

        return run

    def post_ops_maybe_inside_graph(self, forward_batch: ForwardBatch) -> None:
        """After the model: record its writes, unless `with_tail_after` did.

        Raises:
            RuntimeError: a layer has not made its calls.
        """
        self.calls.end()
        if self.side is not None:
            self.side.join()
            if self._has_tail:
                self._has_tail = False
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
        if self._forwards % self.config.sweep_interval == 0:
            self._due.settle()
            self.sweep()

    def sweep(self) -> None:
        """Launch one pass over each group's unused slots, if they are swept at all."""
        for sweeper in self._sweepers:
            sweeper.run()

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
        if counters[_TAIL_LAUNCHES] == self._counters[_TAIL_LAUNCHES]:
            raise RuntimeError(
                "the KV canary is not running: no tail launch since the last result, "
                "whose findings came again"
            )
        self._counters = counters
        self._health.on_result(counters)
        self._stats.on_counters(counters, violations=self.reporter.total)
        return not is_clean(words)

    def report(
        self,
        *,
        owner_of: OwnerOf,
        tokens_of: TokensOf,
        host_entries: Sequence[Sequence[int]] = (),
    ) -> None:
        """Report the findings that `take` saw, and those of the host.

        Args:
            owner_of: the owner of a slot by the host's records.
            tokens_of: the tokens of a request by serial, None: not running.
            host_entries: findings of the host, as entries of the ring.

        Raises:
            CanaryViolation: the mode is not `log`.
        """
        violations = self._publish(self._drain(owner_of, tokens_of, host_entries))
        if self.config.mode is not CanaryMode.LOG:
            raise as_error(violations, with_tokens=self.config.report_tokens)

    def examine(
        self,
        *,
        owner_of: OwnerOf,
        tokens_of: TokensOf,
        host_entries: Sequence[Sequence[int]] = (),
    ) -> Examined:
        """The findings so far, for the caller to act on and to publish
        (`ViolationReporter.publish`); waits for the device. See `report`."""
        return self._drain(owner_of, tokens_of, host_entries)

    def drain(self, *, owner_of: OwnerOf, tokens_of: TokensOf) -> list[Violation]:
        """Report the findings in the ring now, even in the middle of a failed forward;
        waits for the device, and for no other rank."""
        if self.side is not None:
            self.side.join()
        return self._publish(self._drain(owner_of, tokens_of))

    def _publish(self, examined: Examined) -> list[Violation]:
        self.reporter.publish(examined.found, dropped=examined.dropped)
        return [finding.violation for finding in examined.found]

    def _drain(
        self,
        owner_of: OwnerOf,
        tokens_of: TokensOf,
        host_entries: Sequence[Sequence[int]] = (),
    ) -> Examined:
        entries, dropped = _take_entries(self._state)
        examine = partial(
            self.reporter.examine,
            mode_of=self._launches.mode_of,
            branch_of=self._launches.branch_of,
            details=lambda violation: self._details(violation, tokens_of),
        )
        found = examine([*entries, *host_entries], owner_of=owner_of)
        if self.windows is not None:
            entries, more = _take_entries(self.windows.state)
            found += examine(entries, owner_of=self.windows.owner_of(owner_of))
            dropped += more
        return Examined(found, dropped)

    def slot_pattern(self, slots: GroupSlots | None) -> PoolPattern | None:
        """A pattern for slots of a group that nobody holds; None if this pool has no
        such group.

        Args:
            slots: of the group; None: the primary one.
        """
        for group in self.target.kv_pool.groups:
            if group.slots is slots:
                state = self._state
                if slots is not None:
                    assert self.windows is not None
                    state = self.windows.state
                return PoolPattern(state, group.tensors)
        return None

    def full_slot(self, violation: Violation) -> int:
        """The slot of the full group that a violation is about; -1: none."""
        if violation.group != SWA or self.windows is None or violation.slot < 0:
            return violation.slot
        return self.windows.group.slots.primary_slot(violation.slot)

    def forget_rows(self, req_rows: Sequence[int]) -> None:
        """Clear the verdicts of request rows whose requests lose them, in stream order:
        nothing that was launched for them is looked at any more."""
        rows = self._due.upload(torch.tensor(req_rows, dtype=torch.int64))
        self._state.verdict[rows] = 0
        if self.windows is not None:
            self.windows.state.verdict[rows] = 0

    def _details(self, violation: Violation, tokens_of: TokensOf) -> dict[str, int]:
        """Fields that only the host can add to an incident. For `verify_token` of the
        target: the first position, if any, whose slot in the device's table does not
        hold the request's own token."""
        if self.target.is_draft or violation.group == SWA:
            return {}
        if "verify_token" not in violation.labels:
            return {}
        tokens = tokens_of(violation.serial)
        if tokens is None:
            return {}
        row = self.target.req_to_token_pool.req_to_token[violation.req_row]
        slots = row[: min(violation.position + 1, len(tokens))].to(torch.int64)
        tail = self._state.tail
        is_inside = (slots >= 0) & (slots < len(tail))
        words = torch.where(is_inside, tail[slots * is_inside, 0], POISON_WORD)
        for position, (word, token) in enumerate(
            zip(words.tolist(), tokens, strict=False)
        ):
            if word == POISON_WORD or unpack_word0(word) != (token, position):
                return {"first_wrong_position": position}
        return {}

    # -- numbers -------------------------------------------------------------------

    @property
    def counters(self) -> list[int]:
        """The device's counters (`records.Counter`) as of the last result."""
        return self._counters

    @property
    def num_forwards(self) -> int:
        return self._forwards

    @property
    def num_sweep_passes(self) -> int:
        return self._sweepers[0].passes if self._sweepers else 0


def _take_entries(state: CanaryState) -> tuple[list[list[int]], int]:
    """The entries in a ring, which is empty then, and how many found no place."""
    count, capacity = int(state.ring_count.item()), state.ring.shape[0]
    entries: list[list[int]] = state.ring[: min(count, capacity)].tolist()
    state.ring_count.zero_()
    return entries, max(count - capacity, 0)


# Classes and not generators: a step of a small model on the CPU notices.


class _LaunchScope:
    """`CanaryManager.with_ops_outside_graph`."""

    def __init__(
        self, manager: CanaryManager, indices: Sequence[int], batch: ForwardBatch
    ) -> None:
        self._manager = manager
        self._indices = indices
        self._batch = batch

    def __enter__(self) -> None:
        self._manager._open_launch(self._indices, self._batch)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._manager._close_launch(self._indices, self._batch, has_run=kind is None)


class _ForwardScope:
    """`CanaryManager.with_active_single_forward_manager`."""

    def __init__(self, manager: CanaryManager, forward: SingleForwardManager) -> None:
        self._manager = manager
        self._forward = forward

    def __enter__(self) -> None:
        if self._manager.active is not None:
            raise RuntimeError("KV canary: a forward is already open; they do not nest")
        self._manager.active = self._forward
        self._manager._num_run += 1

    def __exit__(self, *rest: object) -> None:
        self._manager.active = None
