"""vLLM's canary: turns a step's messages and tables into the runtime's verbs.

```
plan(step)       who got, shares and gave up which blocks; frees, moves, announcements
  before(reads)  views of the forward, one per group
  (the model)
  after()        records; on the CPU the findings as well
sampled(tokens)  the next inputs of the rows
finish(...)      on a GPU the findings, when the step's tokens reach the host
```
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kv_canary import launches
from kv_canary.accepted import SampledTokens
from kv_canary.engines.block_ledger import BlockLedger, Changes, LedgerRequest
from kv_canary.engines.block_table import NewBlocks
from kv_canary.engines.damage import Damage
from kv_canary.engines.forward_rows import ForwardRows
from kv_canary.engines.group_canary import RING_CAPACITY, Group, GroupCanary
from kv_canary.engines.reporting import create_worker_reporter
from kv_canary.engines.state_canary import StateCanary
from kv_canary.records import Expected, request_lineage
from kv_canary.runtime.host import HEALING_MODES, HostCapabilities
from kv_canary.runtime.mode import Mode
from kv_canary.runtime.pending import GroupFindings, Pending
from kv_canary.runtime.runtime import Announcement, CanaryRuntime, Testimony
from kv_canary.runtime.uploads import upload, upload_rows

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.engines.block_units import BlockUnits
    from kv_canary.engines.settings import Settings
    from kv_canary.engines.state_canary import StatePool
    from kv_canary.engines.step import ForwardReads, Step
    from kv_canary.evidence import Owner
    from kv_canary.reporter import OwnerOf
    from kv_canary.runtime.group import CanaryGroup
    from kv_canary.view import ForwardView
    from kv_canary.violation import Violation

SWEEP_BUDGET = 4096

VLLM = HostCapabilities(modes=HEALING_MODES, shares_new_slots=True)
"""A request may share blocks that another one fills in the same step."""


class EngineCanary:
    """Checks the KV pool of one worker.

    Args:
        groups: groups of layers whose KV lies in blocks. states: recurrent states, or
            None. unchecked: tokens per block of all others. By their numbers, these are
            the groups of the engine's block tables.
        num_rows: requests that may hold blocks at once.
        max_len: most tokens of a request.
        is_cached: whether the engine has a prefix cache.
        judges_ahead: whether steps are planned before the proposals of the last one are
            judged, which the device then does.

    Attributes:
        ledger: who holds which blocks.
        groups: the groups of tokens. states: of recurrent states, or None.
        reporter: reporter of everything found so far.
        units: units of blocks, if a connector may load them.
        damage: what mode `heal` has found.
        again: requests of the newest step whose tokens the engine discarded since their
            last one. steps: number of planned steps.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        settings: Settings,
        *,
        num_rows: int,
        max_len: int,
        is_cached: bool,
        rank: int = 0,
        states: StatePool | None = None,
        unchecked: Mapping[int, int] | None = None,
        judges_ahead: bool = False,
    ) -> None:
        self._sweep_interval = settings.sweep_interval
        self._device = groups[0].layers[0].device
        tokens = {group.number: group.page_size for group in groups}
        tokens.update(unchecked or {})
        if states is not None:
            tokens.update(dict.fromkeys(states.numbers, states.block_tokens))
        self.ledger = BlockLedger(
            [tokens[number] for number in sorted(tokens)],
            num_rows=num_rows,
            is_cached=is_cached,
            sample=settings.sample,
        )
        self.groups = [
            GroupCanary(
                group,
                number=number,
                num_rows=num_rows,
                max_len=max_len,
                mode=settings.fingerprint,
                stamps_first=VLLM.shares_new_slots,
            )
            for number, group in enumerate(groups)
        ]
        self._by_number = {group.group.number: group for group in self.groups}
        self.states: StateCanary | None = None
        if states is not None:
            self.states = StateCanary(
                states,
                number=len(groups),
                num_rows=num_rows,
                max_len=max_len,
                mode=settings.fingerprint,
                primary=self.groups[0].state,
            )
        self.reporter = create_worker_reporter(
            settings,
            page_size=groups[0].page_size,
            serials=self.ledger.serials,
            ring_capacity=RING_CAPACITY,
            rank=rank,
            groups=self.names,
        )
        self.damage = Damage()
        every: list[CanaryGroup] = [*self.groups]
        if self.states is not None:
            every.append(self.states)
        self._runtime = CanaryRuntime(
            every,
            host=VLLM,
            mode=settings.mode,
            reporter=self.reporter,
            with_tokens=settings.report_tokens,
            heal=self.damage.note,
        )
        self._testimony = Testimony(owner_of=self._owner_lookup)
        self._rows = ForwardRows(
            self.ledger, self._device, num_rows=num_rows, judges_ahead=judges_ahead
        )
        self._step: Step | None = None
        self.units: BlockUnits | None = None
        self.again: list[LedgerRequest] = []
        self.steps = 0

    def warm_up(self) -> None:
        """Run each launch over a row of padding, which records and finds nothing. So no
        kernel is compiled while requests run."""
        for oracle in (None, (self._nothing(1), self._nothing(1))):
            views = [group.padded(oracle) for group in self.groups]
            num_read = [[1]] * len(views)  # of padding, so none counts
            self._before(views, num_read=num_read)
            self._runtime.forward.after(advance=True)
        zero = self._nothing(1)
        if self.states is not None:
            self.states.warm_up()
        for group in self._runtime.groups:
            group.poison(zero)
            group.expect(zero, self._nothing(len(Expected), 1))
            group.take_found()
        state = self.groups[0].state
        launches.note_tokens(state, SampledTokens(*(zero for _ in range(5))))
        self.damage.first_clock = int(state.clock)

    def _nothing(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    @property
    def mode(self) -> Mode:
        """The reaction to what is found."""
        return self._runtime.mode

    @property
    def forwards(self) -> int:
        """Number of forwards that were checked."""
        return self._runtime.forwards

    def plan(self, step: Step) -> None:
        """Process a step before the engine does.

        Raises:
            CanaryViolation: in mode `raise`, if an earlier forward found something.
        """
        self.poll()
        self.steps += 1
        before, rows = self._rows.steps, {row.rid: row for row in step.rows}
        self._rows.plan(rows, self.groups[0].state)
        self._step = step
        if self.units is not None:
            self.units.note_full(self._take_full(before))
        changes = self.ledger.changes()
        back = map(self.ledger.get, self.damage.take_back(step.released))
        damaged = [request for request in back if request is not None]
        for rid in step.released:
            self.ledger.release(rid, changes)
        self._clear(damaged, changes)
        new = [
            self.ledger.admit(admission, changes, step=self.steps)
            for admission in step.admitted
        ]
        for rid, blocks in step.grown:
            self.ledger.extend(self.ledger[rid], blocks, changes)
        if step.released or new:
            self._rows.change()
        known, requests = set(map(id, new)), self.ledger.requests
        ahead: list[LedgerRequest] = []
        self.again = []
        for row in step.rows:
            request = requests.get(row.rid)
            if request is None or id(request) in known:
                continue
            if request.is_ahead:
                ahead.append(request)
            elif row.computed < request.computed and not request.is_estimated:
                # An estimate falls when the host hears what was rejected.
                self._turn_back(request, row.computed, changes)
        self._apply(changes, step.copies)
        beginning = [request for request in new if request.rid in rows]
        self._announce(beginning + self.again)
        self._correct(ahead)

    def _clear(self, damaged: Sequence[LedgerRequest], changes: Changes) -> None:
        """Clear the blocks that damaged requests have left. A NaN that they computed
        would spread to the next owner, where attention multiplies it by 0."""
        for request in damaged:
            for number, blocks in enumerate(request.blocks):
                held = self.ledger.held(number)
                left = [block for block in blocks if block and block not in held]
                changes.freed[number] += left
                if number in self._by_number:
                    self._by_number[number].clear_blocks(left)

    def _take_full(self, before: Iterable[str]) -> list[int]:
        """Return the blocks that the last step filled, of whose requests some have no
        row in this one: later their blocks may have other owners.

        Args:
            before: requests of the last step.
        """
        full: list[int] = []
        for rid in before:
            row = self._rows.steps.get(rid)
            full += self.ledger.take_full(rid, None if row is None else row.computed)
        return full

    def _turn_back(
        self, request: LedgerRequest, computed: int, changes: Changes
    ) -> None:
        """Note that the scheduler discarded what the request's last step computed, from
        blocks that were not loaded intact."""
        request.turn_back(computed, self.steps)
        self.ledger.give_up(request, changes)
        self.again.append(request)

    def before(self, reads: ForwardReads) -> None:
        """Check everything that the forward of the planned step is about to read.

        Raises:
            RuntimeError: one of its rows was never announced.
        """
        batch, steps, prefix, make, oracle = self._rows.begin(reads)
        seq_lens = reads.seq_lens[: len(steps)].long()
        views, verified, num_read = [], [], []
        for group, tables in zip(self.groups, reads.groups, strict=True):
            table, count = group.reads(tables, seq_lens, prefix)
            slots = tables.slot_mapping[: reads.num_tokens].long()
            view = make(out_cache_loc=slots, reads=(table,), oracle=oracle)
            views.append(view)
            oracle = None  # Inputs are the same in all groups.
            if not batch.each_is_verified:
                wanted = batch.is_verified
                view = _only(view, wanted)
                count = [n * v for n, v in zip(count, wanted, strict=True)]
            verified.append(view)
            num_read.append(count)
        self._before(views, verified=verified, num_read=num_read)
        if self.states is not None:
            self.states.begin(batch, steps, reads.states)

    def _before(self, views: Sequence[ForwardView], **how: Any) -> None:
        """Open the forward in the groups of tokens."""
        others: list[None] = [] if self.states is None else [None]
        self._runtime.forward.before([*views, *others], **how)

    @property
    def names(self) -> list[str]:
        """The names of all groups."""
        states = [] if self.states is None else [self.states.pool.name]
        return [*(group.group.name for group in self.groups), *states]

    def requests(self) -> tuple[int, int]:
        """Return how many requests there were, and how many of them are verified."""
        return self.ledger.admitted, self.ledger.verified

    def healed(self) -> int | None:
        """Return how many requests were computed again; None in other modes."""
        return self.damage.healed if self.mode is Mode.HEAL else None

    def after(self) -> None:
        """Record what the model has stored.

        Raises:
            CanaryViolation: in mode `raise` on the CPU, where findings are immediate.
        """
        self._runtime.forward.after(advance=True)
        if self.states is not None:
            self.states.end()
        requests = self.ledger.requests
        for row in self._rows.steps.values():
            request, drafts = requests[row.rid], len(row.proposed)
            request.computed = row.computed + row.scheduled - drafts
            if not self._rows.judges_ahead:
                request.is_ahead = drafts > 0
            elif drafts:
                request.is_estimated = True
        self._step = None
        self._runtime.count()
        found: list[GroupFindings] = []
        if self._sweep_interval and self.forwards % self._sweep_interval == 0:
            found = self._sweep()
        self._runtime.end(self._runtime.send(found=found), self._testimony)

    def sampled(self, tokens: Tensor, counts: Tensor | None = None) -> None:
        """Record what was sampled for the rows of the newest forward. Their next inputs
        are compared with it.

        Args:
            tokens: [R, n], in the order of the forward's rows.
            counts: [R], how many of the n are sampled. None: those before the first
                negative one.

        Raises:
            RuntimeError: there are tokens for another number of rows.
        """
        self._rows.sampled(tokens, counts, [group.state for group in self.groups])

    def finish(self) -> None:
        """Note that the step's tokens are about to leave.

        Raises:
            RuntimeError: its forward was not checked.
        """
        step, self._step = self._step, None
        if step is not None and step.rows:
            raise RuntimeError(
                "kv_canary: a forward ran unchecked: the engine bypassed the methods "
                "that `kv-canary doctor` lists"
            )

    def note_tokens(
        self, rid: str, tokens: Sequence[int], *, step: int | None = None
    ) -> None:
        """Record further tokens of a request.

        Args:
            step: the one that sampled them; they are discarded if the request began or
                was turned back afterwards. None: the newest one.
        """
        if self.is_since(rid, self.steps if step is None else step):
            self.ledger[rid].tokens.extend(tokens)

    def is_since(self, rid: str, step: int) -> bool:
        """Whether what a step computed for a request still counts: it is there, and
        neither began nor was turned back afterwards."""
        request = self.ledger.get(rid)
        return request is not None and request.since <= step

    def poll(self) -> None:
        """See `CanaryRuntime.poll`."""
        self._runtime.poll(self._testimony)

    def take_pending(self) -> list[Pending]:
        """See `CanaryRuntime.take_pending`."""
        return self._runtime.take_pending()

    def collect(self, pending: Pending) -> list[Violation]:
        """See `CanaryRuntime.collect`."""
        return self._runtime.collect(pending, self._testimony)

    def counters(self) -> list[int]:
        """See `CanaryRuntime.counters`."""
        return self._runtime.counters()

    def summary(self) -> str:
        return self._runtime.summary()

    def _owner_lookup(self, group: CanaryGroup) -> OwnerOf:
        if group is self.states:
            return self._owner_of_state
        assert isinstance(group, GroupCanary)
        number, size = group.group.number, group.group.page_size
        return lambda slot: self.ledger.owner(number, slot // size)

    def _owner_of_state(self, block: int) -> Owner:
        assert self.states is not None
        owners = [self.ledger.owner(n, block) for n in self.states.pool.numbers]
        return max(owners, key=lambda owner: len(owner.claims) + len(owner.prefix_of))

    def _apply(self, changes: Changes, copies: Sequence[tuple[int, int]]) -> None:
        fresh = {block for blocks in changes.fresh for block in blocks}
        # A block has one owner, in one group; the others have lost it.
        for number, group in self._by_number.items():
            group.free_blocks(sorted({*fresh, *changes.freed[number]}))
        if self.states is not None:
            freed = (changes.freed[number] for number in self.states.pool.numbers)
            self.states.free_blocks(sorted(fresh.union(*freed)))
        self._runtime.settle()
        for group in self._by_number.values():
            group.copy_blocks(copies)
        if self.states is not None:
            self.states.copy_blocks(copies)
        changed = defaultdict(list)
        for request, number, begin in changes.rows:
            blocks = request.blocks[number][begin:]
            changed[number].append(NewBlocks(request.row, begin, blocks))
        for number, group in self._by_number.items():
            group.blocks.set(changed.get(number, ()))
        if self.states is not None:
            self.states.set_blocks(changed)

    def _announce(self, new: Sequence[LedgerRequest]) -> None:
        """Announce the histories that requests continue, and their rows."""
        if not new:
            return
        lineages = [self._lineage(request) for request in new]
        serials = [request.serial for request in new]
        numbers = upload_rows([[request.row for request in new]], self._device)[0]
        values = upload_rows([lineages, [0] * len(new), serials], self._device)
        self._runtime.announce(lambda: Announcement(numbers, values))
        self._runtime.settle()

    def _correct(self, stale: Sequence[LedgerRequest]) -> None:
        """Set the histories of rows whose newest tokens were only proposed."""
        if not stale:
            return
        lineages = [self._lineage(request) for request in stale]
        numbers = [request.row for request in stale]
        rows, values = upload_rows([numbers, lineages], self._device)
        for group in self.groups:
            launches.set_lineage(group.state, rows, values)

    def _lineage(self, request: LedgerRequest) -> int:
        """Return the lineage of the tokens before the forward."""
        length = self._rows.steps[request.rid].computed
        if length > len(request.tokens):
            raise RuntimeError(
                f"kv_canary: request {request.rid!r} has {length} tokens in its KV, "
                f"but only {len(request.tokens)} are known"
            )
        return request_lineage(request.tokens[:length], request.salt)

    def _sweep(self) -> list[GroupFindings]:
        found = []
        for number, group in self._by_number.items():
            findings = group.sweep(SWEEP_BUDGET, self.ledger.held(number))
            if findings is not None:
                found.append(GroupFindings(group, findings))
        if self.states is not None:
            pool = self.states.pool
            held = set[int]().union(*map(self.ledger.held, pool.numbers))
            # Blocks of as many bytes as those slots of KV have.
            findings = self.states.sweep(
                max(SWEEP_BUDGET // pool.block_tokens, 1), held
            )
            if findings is not None:
                found.append(GroupFindings(self.states, findings))
        return found


def _only(view: ForwardView, wanted: Sequence[bool]) -> ForwardView:
    """Return the forward with its other rows as padding; without reads if no row is
    wanted."""
    if not any(wanted):
        return dataclasses.replace(view, reads=())
    kept = upload(torch.tensor(wanted), view.req_rows.device)
    return dataclasses.replace(view, req_rows=view.req_rows * kept)
