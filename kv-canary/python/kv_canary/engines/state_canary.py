"""Recurrent states in an engine's blocks: one block holds the state of one prefix.

```
plan         blocks that are given away lose their records
begin        a state that moved on to the next block takes its record along; then the
             blocks that the layers get are checked: prefix, owner, bytes
(the model)  overwrites them
end          records of the prefixes that they hold now, and sums of their bytes
```
An engine keeps the state of a running request in the block of its newest tokens. A full
block keeps the state of its end, for the prefix cache; the next forward first copies it
to the next block. Whether that was done shows in the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kv_canary import launches
from kv_canary.checks import Reason
from kv_canary.engines.block_table import BlockTable, NewBlocks
from kv_canary.kernels.reference.report import flag
from kv_canary.layout import NO_FINGERPRINT, FingerprintMode
from kv_canary.pool_checks import PoolChecks
from kv_canary.records import (
    HALF_BITS,
    NO_HEAD,
    TOKEN_MASK,
    Launch,
    Record,
    Ring,
    WriterKind,
    pack_place,
    pack_word0_tensor,
)
from kv_canary.runtime.group import CanaryGroup
from kv_canary.runtime.uploads import upload_rows, upload_vectors
from kv_canary.slot_bytes import ByteFindings
from kv_canary.state import CanaryState, create_state
from kv_canary.state_parts import StateParts, Turn
from kv_canary.state_rows import StateRows
from kv_canary.violation import POOLS

if TYPE_CHECKING:
    from kv_canary.engines.batch_rows import BatchRows
    from kv_canary.engines.step import RowStep

STATE_RING = 1024
WHOLE_FROM = 64
"""A forward over so many tokens of a request costs more than reading its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroup:
    """Layers whose states lie in the same blocks.

    Fields:
        number: of the group in the engine's tables.
        layers: the tensors of each layer, [blocks, ...]. numbers: of these layers.
    """

    number: int
    layers: Sequence[Sequence[Tensor]]
    numbers: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePool:
    """The states of a model. Its groups have blocks of one pool, each of which belongs
    to one group at a time.

    Fields:
        name: name for reports.
        block_tokens: tokens from one block of a request to the next.
    """

    name: str
    groups: Sequence[StateGroup]
    num_blocks: int
    block_tokens: int

    @property
    def numbers(self) -> list[int]:
        return [group.number for group in self.groups]


class _Step(NamedTuple):
    """The states of a forward. [N] each: the rows of the first group, then those of the
    next one.

    Fields:
        before, after: whose states the blocks are due to hold.
        slots: the blocks, or others for those out of range. groups: of layers.
        turns: what `after` sums up. kind: of forward.
    """

    before: StateRows
    after: StateRows
    slots: Tensor
    groups: Tensor
    turns: Tensor
    kind: WriterKind


class StateCanary(CanaryGroup):
    """Checks the states of all groups.

    Args:
        number: number of the pool in reports.
        num_rows: requests that may hold blocks at once. max_len: most tokens of one.
        mode: which bytes are summed up; see `StateParts`.
        primary: state of a group of tokens, which has the rows' lineages.

    Raises:
        ValueError: tensors that cannot be summed up.

    Attributes:
        parts: what is summed up, or None.
    """

    def __init__(
        self,
        pool: StatePool,
        *,
        number: int,
        num_rows: int,
        max_len: int,
        mode: FingerprintMode,
        primary: CanaryState,
    ) -> None:
        device = primary.head.device
        super().__init__(
            state=create_state(
                num_slots=pool.num_blocks,
                req_rows=num_rows + 1,
                ring_capacity=STATE_RING,
                num_managers=1,
                device=device,
                pool=len(POOLS) * number,
            ),
            checks=PoolChecks(page_size=1),
        )
        self.pool = pool
        self._lineages = primary.expected_lineage
        self._num_rows = num_rows + 1
        # One table of all groups, because these may be ten.
        self._blocks = BlockTable(
            len(pool.groups) * self._num_rows,
            -(-max_len // pool.block_tokens),
            size=1,
            empty=-1,
            device=device,
        )
        shape = (len(pool.groups), self._num_rows, -1)
        self._tables = self._blocks.entries.view(shape)
        self.parts: StateParts | None = None
        if mode is not FingerprintMode.NONE:
            tensors = [[t for of in g.layers for t in of] for g in pool.groups]
            self.parts = StateParts(tensors, mode)
        self._is_whole = mode is FingerprintMode.ALL
        width = self.parts.num_parts if self.parts is not None else 0
        of_sums = (pool.num_blocks, width)
        self._sums = torch.zeros(of_sums, dtype=torch.int64, device=device)
        self._turns = torch.full(
            (pool.num_blocks,), int(Turn.NOTHING), dtype=torch.int64, device=device
        )
        self._groups_of = torch.zeros_like(self._turns)
        self._swept = 1
        self._numbers = upload_rows(
            [_part_numbers(g, width) for g in pool.groups], device
        )
        self._forward = 0
        self._step: _Step | None = None
        self._each_is_verified = True
        self._rows_of: tuple[BatchRows, Tensor, Tensor, Tensor] | None = None

    # -- blocks --------------------------------------------------------------------

    def set_blocks(self, changes: Mapping[int, Sequence[NewBlocks]]) -> None:
        """Set blocks of requests, by number of the group; others are ignored."""
        self._blocks.set(
            change._replace(row=place * self._num_rows + change.row)
            for place, number in enumerate(self.pool.numbers)
            for change in changes.get(number, ())
        )

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Call `free` for blocks."""
        if blocks:
            self.free(torch.tensor(blocks))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy the records of (source, destination) blocks, after their bytes."""
        if copies:
            sources, destinations = upload_rows(
                list(zip(*copies, strict=True)), self._device
            )
            self.move(dst=destinations, src=sources)

    def poison(self, slots: Tensor) -> None:
        super().poison(slots)
        self._sums.index_fill_(0, slots, 0)
        self._turns.index_fill_(0, slots, int(Turn.NOTHING))

    def move(self, dst: Tensor, src: Tensor) -> None:
        super().move(dst, src)
        launches.mark_copied(self.state, dst)
        self._sums.index_copy_(0, dst, self._sums.index_select(0, src))
        for of_slot in (self._turns, self._groups_of):
            of_slot.index_copy_(0, dst, of_slot.index_select(0, src))

    # -- forwards ------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compile what a forward launches, over a row of padding."""
        self.copy_blocks([(0, 0)])
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        rows = StateRows(
            slots=zero,
            due_slots=zero,
            req_rows=zero,
            serials=zero,
            lengths=zero,
            lineages=self._lineages,
        )
        self._step = step = _Step(rows, rows, zero, zero, zero, WriterKind.NONE)
        launches.check_states(self.state, rows, NO_FINGERPRINT)
        self._compare(step)
        self.end()

    def begin(
        self, batch: BatchRows, rows: Sequence[RowStep], slots: Sequence[Tensor]
    ) -> None:
        """Check the states that a forward reads.

        Args:
            rows: what the batch's rows do.
            slots: the blocks that the layers get, [>= R], by group.
        """
        count, tokens = len(self.pool.groups), self.pool.block_tokens
        befores = [row.computed for row in rows]
        afters = [row.computed + row.scheduled for row in rows]
        self.copy_blocks(self._moved(batch, befores, afters))
        turns = self._turns_of(batch, rows, afters)
        # Once for all groups, because these may be ten.
        columns = [(after - 1) // tokens for after in afters]
        lengths, ends, turn, column = (
            vector.repeat(count)
            for vector in upload_vectors(
                [befores, afters, turns, columns], self._device
            )
        )
        req_rows, serials, groups = self._repeated(batch)
        due = self._tables[groups, req_rows, column].long()
        given = torch.cat([of_group[: len(rows)] for of_group in slots]).long()

        def states(lengths: Tensor, req_rows: Tensor) -> StateRows:
            return StateRows(
                slots=given,
                due_slots=due,
                req_rows=req_rows,
                serials=serials,
                lengths=lengths,
                lineages=self._lineages,
            )

        verified = req_rows
        self._each_is_verified = batch.each_is_verified
        if not batch.each_is_verified:
            wanted = batch.is_verified * count
            verified = req_rows * upload_rows([wanted], self._device)[0]
        is_decode = all(row.scheduled == 1 for row in rows)
        self._step = step = _Step(
            before=states(lengths, verified),
            after=states(ends, req_rows),
            slots=given.clamp(0, self.state.num_slots - 1),
            groups=groups,
            turns=turn,
            kind=WriterKind.DECODE if is_decode else WriterKind.EXTEND,
        )
        self._found = []
        launches.check_states(self.state, step.before, NO_FINGERPRINT)
        self._compare(step)

    def end(self) -> None:
        """Record the states that the model left, once the primary group's lineages are
        those of the end of the forward."""
        step, self._step = self._step, None
        if step is None:
            return
        launches.note_states(
            self.state, step.after, NO_FINGERPRINT, kind=step.kind, ends_forward=True
        )
        self._forward += 1
        if self.parts is None:
            return
        sums, wild = launches.sum_states(
            step.slots, step.groups, step.turns, self.parts
        )
        self._sums.index_copy_(0, step.slots, sums)
        self._turns.index_copy_(0, step.slots, step.turns)
        self._groups_of.index_copy_(0, step.slots, step.groups)
        found = self._findings(
            step.after, step.slots, step.groups, wild, Reason.STATE_NOT_FINITE, wild
        )
        self._found.append(found)

    def sweep(self, budget: int, held: set[int]) -> ByteFindings | None:
        """Compare states that only the prefix cache holds, in rotation.

        Args:
            budget: blocks to look at.
            held: blocks in a request's table.
        """
        if self.parts is None:
            return None
        end = min(self._swept + budget, self.state.num_slots)
        blocks = [block for block in range(self._swept, end) if block not in held]
        self._swept = end if end < self.state.num_slots else 1
        if not blocks:
            return None
        slots, nobody = upload_vectors([blocks, [0] * len(blocks)], self._device)
        word0 = self.state.tail[slots, Record.WORD0]
        rows = StateRows(
            slots=slots,
            due_slots=slots,
            req_rows=nobody,
            serials=nobody,
            lengths=(word0 >> HALF_BITS) + 1,
            lineages=self._lineages,
        )
        groups = self._groups_of[slots]
        return self._differing(rows, slots, groups, None, Launch.SWEEP)

    def _compare(self, step: _Step) -> None:
        """Compare the bytes of the states with the sums that are kept."""
        if self.parts is None:
            return
        is_due = None if self._each_is_verified else step.before.req_rows != 0
        self._found.append(
            self._differing(step.before, step.slots, step.groups, is_due)
        )

    def _differing(
        self,
        rows: StateRows,
        slots: Tensor,
        groups: Tensor,
        is_due: Tensor | None,
        launch: Launch = Launch.ATTENTION,
    ) -> ByteFindings:
        """Find states that have other bytes than were summed up. Of a block that is
        poisoned nothing was.

        Args:
            is_due: which of them count, or None for all.
        """
        assert self.parts is not None
        kept, turns = self._sums.index_select(0, slots), self._turns[slots]
        sums, _ = launches.sum_states(slots, groups, turns, self.parts)
        differs = sums != kept
        if is_due is not None:
            differs &= is_due[:, None]
        return self._findings(
            rows, slots, groups, differs, Reason.VERIFY_REAL_KV, kept, sums, launch
        )

    def _findings(
        self,
        rows: StateRows,
        slots: Tensor,
        groups: Tensor,
        is_bad: Tensor,
        reason: Reason,
        found: Tensor,
        computed: Tensor | None = None,
        launch: Launch = Launch.TAIL,
    ) -> ByteFindings:
        """Return findings about the first bad part of each state.

        Args:
            slots: `rows.slots`, or others for those out of range.
            is_bad: [N, parts], not 0 if so.
            found, computed: [N, parts], words for the report.
        """
        record = self.state.tail[slots]
        bad = is_bad.any(dim=1)
        lineages = record[:, Record.LINEAGE]
        if launch is not Launch.SWEEP:
            lineages = rows.lineages[rows.req_rows]

        def columns() -> dict[Ring, Tensor]:
            part = (is_bad != 0).to(torch.int32).argmax(dim=1, keepdim=True)
            place = self._numbers[groups].gather(1, part)[:, 0]
            words = (found, found if computed is None else computed)
            named = [_named(w.gather(1, part)[:, 0], place) for w in words]
            row = torch.arange(len(bad), device=bad.device)
            position = rows.lengths - 1
            return {
                Ring.REASONS: flag(reason, bad),
                Ring.REQ_ROW: rows.req_rows,
                Ring.SERIAL: rows.serials,
                Ring.SLOT: rows.slots,
                Ring.POSITION: position,
                Ring.EXPECTED_WORD0: pack_word0_tensor(-torch.ones_like(row), position),
                Ring.FOUND_WORD0: record[:, Record.WORD0],
                Ring.EXPECTED_LINEAGE: lineages,
                Ring.FOUND_LINEAGE: record[:, Record.LINEAGE],
                Ring.FOUND_WORD3: record[:, Record.WORD3],
                Ring.BATCH_ROW: row % max(len(row) // len(self.pool.groups), 1),
                Ring.EXPECTED_SLOT: rows.due_slots,
                Ring.FOUND_FINGERPRINT: named[0],
                Ring.COMPUTED_FINGERPRINT: named[1],
            }

        return ByteFindings.of(bad, launch, columns)

    def _turns_of(
        self, batch: BatchRows, rows: Sequence[RowStep], ends: Sequence[int]
    ) -> list[int]:
        """Return what to sum up of each state afterwards: all of one that the prefix
        cache may keep, or that took a long forward; nothing if nobody compares it."""
        tokens = self.pool.block_tokens
        return [
            Turn.WHOLE
            if self._is_whole or rows[i].scheduled >= WHOLE_FROM or not ends[i] % tokens
            else self._forward
            if batch.is_verified[i]
            else Turn.NOTHING
            for i in range(len(rows))
        ]

    def _moved(
        self, batch: BatchRows, befores: Sequence[int], afters: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return (source, destination) of states that move on to another block."""
        tokens, numbers = self.pool.block_tokens, self.pool.numbers
        moved: list[tuple[int, int]] = []
        for request, before, after in zip(batch.requests, befores, afters, strict=True):
            first, last = (before - 1) // tokens, (after - 1) // tokens
            if 0 <= first < last:
                tables = (request.blocks[number] for number in numbers)
                moved += [
                    (blocks[first], blocks[last])
                    for blocks in tables
                    if last < len(blocks) and blocks[last]
                ]
        return moved

    def _repeated(self, batch: BatchRows) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows and serials of a batch once per group, and the groups."""
        kept = self._rows_of
        if kept is None or kept[0] is not batch:
            count = len(self.pool.groups)
            groups = torch.arange(count, device=self._device)
            kept = self._rows_of = (
                batch,
                batch.req_rows.repeat(count),
                batch.serials.repeat(count),
                groups.repeat_interleave(len(batch.rids)),
            )
        return kept[1:]


def _part_numbers(group: StateGroup, width: int) -> list[int]:
    """Return the layer's number of each part."""
    numbers = [
        number
        for number, parts in zip(group.numbers, group.layers, strict=True)
        for _ in parts
    ]
    return [*numbers, *[0] * (width - len(numbers))][:width]


def _named(words: Tensor, layers: Tensor) -> Tensor:
    """Return sums as fingerprints that name layers."""
    low = (words ^ (words >> HALF_BITS)) & TOKEN_MASK
    return low | layers * pack_place(1, 0) | pack_place(0, NO_HEAD)
