"""The canary of one worker of an engine: a step's ledger, its forward, its findings.

```
plan(step)       who got, shares and gave up which blocks; poison; lineages
  before(reads)  stamp all rows, verify all rows
  (the model)
  after()        records; on the CPU the findings, too
finish(...)      on a GPU the findings, when the step's tokens reach the host
```
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kv_canary.engines.block_ledger import BlockLedger, Changes, Request
from kv_canary.engines.group_canary import RING_CAPACITY, Group, GroupCanary
from kv_canary.engines.reporting import reporter_of
from kv_canary.engines.settings import Mode, Settings
from kv_canary.records import NUM_COUNTERS, Counter, WriterKind, lineage_of
from kv_canary.reporter import as_error
from kv_canary.view import ForwardView

if TYPE_CHECKING:
    from kv_canary.engines.step import ForwardReads, RowStep, Step
    from kv_canary.slot_bytes import ByteFindings
    from kv_canary.violation import Violation

logger = logging.getLogger(__name__)

SWEEP_BUDGET = 4096
_SUMMARY_FORWARDS = 10_000


class Pending(NamedTuple):
    """Findings of a forward that are still on their way to the host.

    Fields:
        counts: on the host, once `event` has happened: entries of each group's ring,
            then findings about bytes.
        found: (group, findings).
        forward: its number.
    """

    event: torch.cuda.Event | None
    counts: Tensor
    found: list[tuple[int, ByteFindings]]
    forward: int

    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()


class EngineCanary:
    """Checks the KV pool of one worker.

    Args:
        groups: of layers, in the order of the engine's block tables.
        num_rows: requests that may hold blocks at once.
        max_len: tokens of a request at most.
        is_cached: whether the engine has a prefix cache.

    Attributes:
        ledger: who holds what.
        groups: by number.
        reporter: of everything found so far.
        forwards: that were checked.
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
    ) -> None:
        self._settings = settings
        self._device = groups[0].layers[0].device
        self.ledger = BlockLedger(
            [group.page_size for group in groups],
            num_rows=num_rows,
            is_cached=is_cached,
        )
        self.groups = [
            GroupCanary(
                group,
                number=number,
                num_rows=num_rows,
                max_len=max_len,
                mode=settings.fingerprint,
            )
            for number, group in enumerate(groups)
        ]
        self.reporter = reporter_of(
            settings,
            page_size=groups[0].page_size,
            serials=self.ledger.serials,
            ring_capacity=RING_CAPACITY,
            rank=rank,
            groups=[group.name for group in groups],
        )
        self.forwards = 0
        self._step: Step | None = None
        self._rows: dict[str, RowStep] = {}
        self._pending: deque[Pending] = deque()

    def plan(self, step: Step) -> None:
        """Take in a step before the engine does."""
        self.poll()
        self._step = step
        self._rows = {row.rid: row for row in step.rows}
        changes = self.ledger.changes()
        for rid in step.released:
            self.ledger.release(rid, changes)
        new = [self.ledger.admit(admission, changes) for admission in step.admitted]
        for rid, blocks in step.grown:
            self.ledger.extend(self.ledger[rid], blocks, changes)
        self._apply(changes, step.copies)
        known = set(map(id, new))
        stale = [
            request
            for request in map(self.ledger.get, self._rows)
            if request is not None and request.is_ahead and id(request) not in known
        ]
        self._announce(new, self._rows)
        self._correct(stale)

    def before(self, reads: ForwardReads) -> None:
        """Check all that the forward of the planned step is about to read.

        Raises:
            RuntimeError: a row of it was never announced.
        """
        views = self._views(reads)
        prefix = [self._rows[rid].computed for rid in reads.rids]
        seq_lens = reads.seq_lens[: len(reads.rids)].long()
        for canary, view, group in zip(self.groups, views, reads.groups, strict=True):
            canary.before(view, group, seq_lens, prefix)

    def after(self) -> None:
        """Record what the model has stored.

        Raises:
            CanaryViolation: mode `raise`, on the CPU, where findings are there at once.
        """
        found = [
            (number, finding)
            for number, canary in enumerate(self.groups)
            for finding in canary.after()
        ]
        for row in self._rows.values():
            request = self.ledger[row.rid]
            request.computed = row.computed + row.scheduled - row.drafts
            request.is_ahead = row.drafts > 0
        self._step = None
        self.forwards += 1
        if self.forwards == 1:
            logger.warning("kv_canary: the first forward is checked")
        if self.forwards % _SUMMARY_FORWARDS == 0:
            logger.info("kv_canary: %s", self.summary())
        interval = self._settings.sweep_interval
        if interval and self.forwards % interval == 0:
            found += self._sweep()
        pending = self._send(found)
        if pending.event is None:
            self.collect(pending)
        else:
            self._pending.append(pending)

    def finish(self) -> None:
        """Say that the step's tokens are about to leave.

        Raises:
            RuntimeError: its forward was not checked.
        """
        step, self._step = self._step, None
        if step is not None and step.rows:
            raise RuntimeError(
                "kv_canary: a forward ran that was not checked: the engine went past "
                "the methods that `kv-canary doctor` lists"
            )

    def note_tokens(self, rid: str, tokens: Sequence[int]) -> None:
        """The request has these further tokens."""
        request = self.ledger.get(rid)
        if request is not None:
            request.tokens.extend(tokens)

    def poll(self) -> None:
        """Report what has arrived of earlier forwards; waits for nothing.

        Raises:
            CanaryViolation: mode `raise`, and there is something.
        """
        while self._pending and self._pending[0].has_arrived():
            self.collect(self._pending.popleft())

    def take_pending(self) -> Pending | None:
        """In mode `raise` what must be collected before the step's tokens may leave."""
        if self._settings.mode is not Mode.RAISE or not self._pending:
            return None
        return self._pending.pop()

    def collect(self, pending: Pending) -> list[Violation]:
        """Report what a forward found; waits for it.

        Raises:
            CanaryViolation: mode `raise`, and there is something.
        """
        if pending.event is not None:
            pending.event.synchronize()
        if not bool(pending.counts.any()):
            return []
        # The clock ticks at the end of each forward.
        late = self.forwards - pending.forward + 1
        for number, finding in pending.found:
            finding.report(self.groups[number].state, clock_offset=-late)
        reported: list[Violation] = []
        for number, canary in enumerate(self.groups):
            state = canary.state
            count = int(state.ring_count)
            if not count:
                continue
            entries = state.ring[: min(count, RING_CAPACITY)].tolist()
            state.ring_count.zero_()
            state.verdict.zero_()
            reported += self.reporter.report(
                entries,
                dropped=max(count - RING_CAPACITY, 0),
                owner_of=partial(self.ledger.owner, number),
                mode_of=lambda violation: violation.launch,
            )
        if reported and self._settings.mode is Mode.RAISE:
            raise as_error(reported, with_tokens=self._settings.report_tokens)
        return reported

    def counters(self) -> list[int]:
        """`records.Counter` of all groups; waits for the device."""
        totals = [0] * NUM_COUNTERS
        for canary in self.groups:
            for index, value in enumerate(canary.state.counters.tolist()):
                totals[index] += value
        return totals

    def summary(self) -> str:
        return (
            f"{self.forwards} forwards checked, "
            f"{self.counters()[Counter.VERIFIED_SLOTS]} slot reads verified, "
            f"{self.reporter.total} violations"
        )

    def _apply(self, changes: Changes, copies: Sequence[tuple[int, int]]) -> None:
        fresh = sorted({block for blocks in changes.fresh for block in blocks})
        for number, canary in enumerate(self.groups):
            # A block has one owner, of one group: to the others it is gone.
            canary.poison(sorted({*fresh, *changes.freed[number]}))
            canary.copy(copies)
        for request, number, begin in changes.rows:
            blocks = request.blocks[number][begin:]
            self.groups[number].set_blocks(request.row, begin, blocks)

    def _announce(self, new: Sequence[Request], rows: dict[str, RowStep]) -> None:
        """Tell the device which history requests go on from, and whose rows are."""
        new = [request for request in new if request.rid in rows]
        if not new:
            return
        lineages = [self._lineage(r, rows[r.rid].computed) for r in new]
        serials = [request.serial for request in new]
        values = self._upload([lineages, [0] * len(new), serials])
        numbers = self._upload([[request.row for request in new]])[0]
        for canary in self.groups:
            canary.expect(numbers, values)

    def _correct(self, stale: Sequence[Request]) -> None:
        """Set the histories of rows of which some tokens were only proposed."""
        if not stale:
            return
        lineages = [self._lineage(r, self._rows[r.rid].computed) for r in stale]
        numbers, values = self._upload([[r.row for r in stale], lineages])
        for canary in self.groups:
            canary.set_lineages(numbers, values)

    def _lineage(self, request: Request, length: int) -> int:
        if length > len(request.tokens):
            raise RuntimeError(
                f"kv_canary: request {request.rid!r} has {length} tokens in its KV, "
                f"of which {len(request.tokens)} are known"
            )
        return lineage_of(request.tokens[:length], request.salt)

    def _views(self, reads: ForwardReads) -> list[ForwardView]:
        """A view per group; they share all but the slots."""
        try:
            rows = [self._rows[rid] for rid in reads.rids]
            requests = [self.ledger[rid] for rid in reads.rids]
        except KeyError as error:
            raise RuntimeError(
                f"kv_canary: the forward has a row of request {error}, which the "
                "scheduler did not announce"
            ) from None
        req_rows, prefix, extend, serials, salts = self._upload(
            [
                [request.row for request in requests],
                [row.computed for row in rows],
                [row.scheduled for row in rows],
                [request.serial for request in requests],
                [request.salt for request in requests],
            ]
        )
        tokens, n = reads.num_tokens, len(rows)
        is_decode = all(row.scheduled == 1 for row in rows)
        make: Callable[..., ForwardView] = partial(
            ForwardView,
            req_rows=req_rows,
            prefix_lens=prefix,
            extend_lens=extend,
            serials=serials,
            salts=salts,
            qo_indptr=reads.query_start_loc[: n + 1].long(),
            input_ids=reads.input_ids[:tokens].long(),
            positions=reads.positions[:tokens].long(),
            writer_kind=WriterKind.DECODE if is_decode else WriterKind.EXTEND,
        )
        return [
            make(out_cache_loc=group.slot_mapping[:tokens].long())
            for group in reads.groups
        ]

    def _upload(self, values: list[list[int]]) -> Tensor:
        """int64 [len(values), n], without waiting."""
        host = torch.tensor(values, dtype=torch.int64)
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)

    def _send(self, found: list[tuple[int, ByteFindings]]) -> Pending:
        counts = torch.stack(
            [canary.state.ring_count[0] for canary in self.groups]
            + [finding.count for _, finding in found]
        )
        if self._device.type == "cpu":
            return Pending(None, counts, found, self.forwards)
        host = torch.empty(len(counts), dtype=torch.int64, pin_memory=True)
        host.copy_(counts, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Pending(event, host, found, self.forwards)

    def _sweep(self) -> list[tuple[int, ByteFindings]]:
        found = []
        for number, canary in enumerate(self.groups):
            held = self.ledger.held(number)
            finding = canary.sweep(SWEEP_BUDGET, held)
            if finding is not None:
                found.append((number, finding))
        return found
