"""The canary of one group of layers: its records, its table, its launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kv_canary import launches
from kv_canary.layout import FingerprintMode
from kv_canary.pool_checks import PoolChecks
from kv_canary.slot_bytes import ByteFindings, PageLayout, SlotBytes
from kv_canary.state import create_state
from kv_canary.view import ForwardView, KVReadView
from kv_canary.violation import POOLS

if TYPE_CHECKING:
    from kv_canary.engines.step import GroupReads

RING_CAPACITY = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers whose KV lies in the same blocks.

    Fields:
        name: for reports.
        layers: a tensor per layer, of one type, that begins with block 0.
        pages: where their values lie; its page size is that of a block.
        num_blocks: block 0, which belongs to nobody, included.
        window: tokens that a query sees; None: all.
    """

    name: str
    layers: Sequence[Tensor]
    pages: PageLayout
    num_blocks: int
    window: int | None = None

    @property
    def page_size(self) -> int:
        return self.pages.page_size


class GroupCanary:
    """Checks the slots of one group.

    Args:
        number: of the group.
        num_rows: requests at once.
        max_len: tokens of a request at most.
    """

    def __init__(
        self,
        group: Group,
        *,
        number: int,
        num_rows: int,
        max_len: int,
        mode: FingerprintMode,
    ) -> None:
        device = group.layers[0].device
        self.group = group
        self.state = create_state(
            num_slots=group.num_blocks * group.page_size,
            req_rows=num_rows + 1,
            ring_capacity=RING_CAPACITY,
            num_managers=1,
            device=device,
            pool=len(POOLS) * number,
        )
        columns = -(-max_len // group.page_size) * group.page_size
        self.table = torch.zeros(
            num_rows + 1, columns, dtype=torch.int32, device=device
        )
        self.checks = PoolChecks(page_size=group.page_size, req_to_token=self.table)
        self.bytes: SlotBytes | None = None
        if mode is not FingerprintMode.NONE:
            self.bytes = SlotBytes(group.layers, group.pages, mode)
        self._view: ForwardView | None = None
        self._found: list[ByteFindings] = []
        self._offsets = np.arange(group.page_size, dtype=np.int64)
        self._swept = group.page_size

    def set_blocks(self, row: int, begin: int, blocks: Sequence[int]) -> None:
        """Blocks of a request from index `begin` on; none follows."""
        size = self.group.page_size
        slots = np.asarray(blocks, dtype=np.int64)[:, None] * size + self._offsets
        line, start = self.table[row], begin * size
        line[start:].zero_()
        end = min(start + slots.size, len(line))
        values = torch.from_numpy(slots.reshape(-1)[: end - start].astype(np.int32))
        line[start:end].copy_(_on(values, line.device), non_blocking=True)

    def poison(self, blocks: Sequence[int]) -> None:
        """A read of these blocks before the next write is reported."""
        if blocks:
            launches.poison(self.state, self._slots_of(blocks))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """The records of the first blocks follow their bytes to the second ones."""
        if copies:
            launches.move_records(
                self.state,
                src=self._slots_of([src for src, _ in copies]),
                dst=self._slots_of([dst for _, dst in copies]),
            )

    def expect(self, rows: Tensor, values: Tensor) -> None:
        """As `launches.expect_rows`."""
        launches.expect_rows(self.state, rows, values)

    def set_lineages(self, rows: Tensor, values: Tensor) -> None:
        launches.set_lineage(self.state, rows, values)

    def before(
        self, view: ForwardView, reads: GroupReads, seq_lens: Tensor, prefix: list[int]
    ) -> None:
        """Stamp what the forward will write, then verify all that it will read.

        Args:
            view: of this group, without reads.
            seq_lens: int64 [R], tokens that attention reads.
            prefix: tokens before the forward, by row.
        """
        table, total = self._read_view(view, reads, seq_lens, prefix)
        launches.stamp(self.state, view, self.checks)
        launches.verify(self.state, view, self.checks, table, steps_phase=False)
        self._found = []
        if self.bytes is not None:
            if total:
                self._found.append(
                    self.bytes.check(self.state, view, table, total=total)
                )
            self.bytes.mark_new(self.state, view)
        self._view = view

    def after(self) -> list[ByteFindings]:
        """Record what the model stored; all findings about bytes of the forward."""
        view, self._view = self._view, None
        assert view is not None
        launches.write_tail(self.state, view, self.checks, advance=True)
        if self.bytes is not None:
            self._found.append(self.bytes.note_new(self.state, view))
        return self._found

    def sweep(self, budget: int, held: set[int]) -> ByteFindings | None:
        """Check `budget` slots, in rotation, of blocks that no request holds."""
        if self.bytes is None:
            return None
        end = min(self._swept + budget, self.state.num_slots)
        slots = torch.arange(self._swept, end, device=self.table.device)
        self._swept = end if end < self.state.num_slots else self.group.page_size
        if held:
            taken = _on(torch.tensor(sorted(held)), slots.device)
            slots = slots[~torch.isin(slots // self.group.page_size, taken)]
        return self.bytes.check_slots(self.state, slots) if len(slots) else None

    def _read_view(
        self,
        view: ForwardView,
        reads: GroupReads,
        seq_lens: Tensor,
        prefix: list[int],
    ) -> tuple[KVReadView, int]:
        """(what attention reads, prefix elements of it in all)."""
        size, columns = self.group.page_size, reads.block_table.stride(0)
        rows = torch.arange(len(prefix) + 1, device=seq_lens.device)
        indptr, first_position, total = rows * columns, None, sum(prefix)
        before_first = None
        if self.group.window is not None:
            # Blocks that left the window may be anybody's; whole pages are read.
            firsts = [max(n - self.group.window + 1, 0) // size * size for n in prefix]
            first_position = _on(torch.tensor(firsts), seq_lens.device)
            indptr[:-1] += first_position // size
            # So may the one before the first page.
            before_first = torch.full_like(first_position, -1)
            seq_lens = (seq_lens - first_position).clamp(min=0)
            total -= sum(firsts)
        table = KVReadView(
            read_lens=seq_lens,
            page_indices=_flat(reads.block_table),
            indptr=indptr,
            first_position=first_position,
            prev_slots=before_first,
            page_size=size,
        )
        return table, total

    def _slots_of(self, blocks: Sequence[int]) -> Tensor:
        size = self.group.page_size
        slots = np.asarray(blocks, dtype=np.int64)[:, None] * size + self._offsets
        return _on(torch.from_numpy(slots.reshape(-1)), self.table.device)


def _flat(table: Tensor) -> Tensor:
    """The entries of a table with rows in one run of memory, its gaps included."""
    if table.shape[0] == 0:
        return table.reshape(-1)
    length = (table.shape[0] - 1) * table.stride(0) + table.shape[1]
    return table.as_strided((length,), (1,))


def _on(values: Tensor, device: torch.device) -> Tensor:
    """Uploads without waiting."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)
