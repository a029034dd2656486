"""The canary of one pool of SGLang: launches that a CUDA graph can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary import launches
from kv_canary.pool_checks import PoolChecks
from kv_canary.records import UNKNOWN, Record, Request
from kv_canary.state import create_state
from kv_canary.violation import GROUPS, pool_number

if TYPE_CHECKING:
    from kv_canary.accepted import SampledTokens
    from kv_canary.engines.sglang.pool import SeenPool
    from kv_canary.slot_bytes import ByteFindings, SlotBytes
    from kv_canary.state import CanaryState
    from kv_canary.view import ForwardView

RING_CAPACITY = 1024


class PoolCanary:
    """Checks the slots of a pool.

    Args:
        req_to_token: int32 [rows, columns], the engine's own table; row 0 is padding.
        tree_width: nodes of a verification; 0: there is none.
        is_draft: whether it is the pool of a draft model.
    """

    def __init__(
        self,
        pool: SeenPool,
        req_to_token: Tensor,
        *,
        tree_width: int = 0,
        is_draft: bool = False,
    ) -> None:
        rows, device = req_to_token.shape[0], pool.device
        self.pool = pool
        self.table = req_to_token
        self.state = create_state(
            num_slots=pool.num_slots,
            req_rows=rows,
            ring_capacity=RING_CAPACITY,
            num_managers=1,
            device=device,
            pool=pool_number(is_draft=is_draft, group=GROUPS[0]),
        )
        self.checks = PoolChecks(
            page_size=pool.page_size,
            fingerprint=pool.fingerprint,
            req_to_token=req_to_token,
        )
        # Lineages before position 0, where that of a slot is not of its own token.
        self.seeds = self.state.expected_lineage.new_zeros(rows) if is_draft else None
        # Of the last tree of each row the histories that its next prefix may end with.
        self._nodes = torch.zeros(rows, tree_width, dtype=torch.int64, device=device)
        self._has_tree = torch.zeros(rows, dtype=torch.bool, device=device)

    def expect(self, rows: Tensor, values: Tensor) -> None:
        """As `launches.expect_rows`: rows that prefill, by the host's tokens."""
        launches.expect_rows(self.state, rows, values, self.seeds)
        self._has_tree.index_fill_(0, rows, False)

    def before(self, view: ForwardView) -> None:
        """Check all that the forward reads and where it writes."""
        if self._nodes.shape[1]:
            self._settle(view)
        launches.before_model(self.state, view, self.checks)
        if self.pool.scattered is not None:
            self._check_bytes(self.pool.scattered, view)

    def after(self, view: ForwardView) -> None:
        """Record what the model stored."""
        is_tree = view.parent_index is not None
        launches.write_tail(self.state, view, self.checks, advance=not is_tree)
        if self.pool.scattered is not None:
            _report(self.pool.scattered.note_new(self.state, view), self.state, -1)
        # Until somebody samples, nothing is known of the next input.
        self.state.requests[:, Request.NEXT_WORD0].index_fill_(
            0, view.req_rows, UNKNOWN
        )
        if is_tree:
            self._note_nodes(view)
        elif self._nodes.shape[1]:
            self._has_tree.index_fill_(0, view.req_rows, False)

    def note(self, sampled: SampledTokens) -> None:
        """As `launches.note_tokens`."""
        launches.note_tokens(self.state, sampled)

    def poison(self, slots: Tensor) -> None:
        """A read of slots [n] int64 before the next write is reported."""
        launches.poison(self.state, slots)

    def move(self, *, dst: Tensor, src: Tensor) -> None:
        """Records follow their bytes."""
        launches.move_records(self.state, dst=dst, src=src)

    def _check_bytes(self, source: SlotBytes, view: ForwardView) -> None:
        """On the CPU, where sums are there at once."""
        total = int((view.prefix_lens * (view.req_rows != 0)).sum())
        if total:
            found = source.check(self.state, view, view.reads[0], total=total)
            _report(found, self.state, 0)
        source.mark_new(self.state, view)

    def _settle(self, view: ForwardView) -> None:
        """Rows whose last forward was a tree go on from one of its nodes: the record at
        the end of the prefix says from which, if it is one."""
        rows = view.req_rows
        last = (view.prefix_lens - 1).clamp(0, self.table.shape[1] - 1)
        slot = self.table[rows, last].long()
        is_slot = (slot >= 0) & (slot < self.state.num_slots)
        found = self.state.tail[slot * is_slot, Record.LINEAGE]
        is_node = (self._nodes[rows] == found[:, None]).any(dim=1)
        takes = self._has_tree[rows] & is_node & is_slot
        expected = self.state.expected_lineage[rows]
        self.state.expected_lineage.index_copy_(
            0, rows, torch.where(takes, found, expected)
        )

    def _note_nodes(self, view: ForwardView) -> None:
        width = self._nodes.shape[1]
        slots = view.out_cache_loc.view(view.num_rows, -1)
        is_slot = (slots >= 0) & (slots < self.state.num_slots)
        found = self.state.tail[slots * is_slot, Record.LINEAGE]
        nodes = found[:, :1].expand(-1, width).clone()
        nodes[:, : found.shape[1]] = found[:, :width]
        self._nodes.index_copy_(0, view.req_rows, nodes)
        self._has_tree.index_fill_(0, view.req_rows, True)


def _report(found: ByteFindings, state: CanaryState, clock_offset: int) -> None:
    if found.count:
        found.report(state, clock_offset=clock_offset)
