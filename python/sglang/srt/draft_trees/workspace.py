"""The tensors that one decode iteration of speculation uses, allocated once.

Every phase reads and writes them in place, eagerly or as a graph, so captured graphs
can hold their addresses and nothing is copied between phases. A batch of b requests
uses the first b rows; a graph of a larger size sees padding after them: request row 0,
no KV.

`EagleWorkspace` is also the static input of the target's verify graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sglang.srt.draft_trees.buffers import DraftLevels, DraftTree, VerifyResult
from sglang.srt.forward.batch import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    HostLens,
)
from sglang.srt.mem_cache.ops.branch_slots.op import SlotRows, tail_cache_loc

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import BranchLayout, TreeShape
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool


class RowIdentity(NamedTuple):
    """Identity of a batch's requests, int64 [b] each."""

    req_pool_indices: Tensor
    req_serial: Tensor
    salt: Tensor
    rids_int: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceRows:
    """The first b rows of a workspace; views.

    Fields:
        identity: int64 [4, b], the fields of `RowIdentity`.
        seq_lens: int64 [b], tokens with KV when the iteration began.
        draft_lens: int64 [b], tokens with KV in the draft's pool.
        node_ends: int64 [b], seq_lens + D.
        levels, tree, result: of the b requests.
        draft_slots: int64 [S, b * K], where draft step s writes.
        node_slots: int64 [b, D], where the nodes are verified.
        extend_slots: int64 [b, S + 1], where the draft extend writes.
        tail_src, tail_dst: int64, moves that copy the prefix's last page to branches.
        move_src, move_dst: int64 [b * (S + 1)], moves that compact the accepted path.
        tokens: int64 [b, S + 1], tokens gained, padded with the last one.
        node_rows: int64 [b, S + 1], their nodes among all b * D.
        bonus_tokens: int64 [b], the last token gained.
        hidden_states: [b * (S + 1), width] of these nodes, or None if unused.
    """

    identity: Tensor
    seq_lens: Tensor
    draft_lens: Tensor
    node_ends: Tensor
    levels: DraftLevels
    tree: DraftTree
    result: VerifyResult
    draft_slots: Tensor
    node_slots: Tensor
    extend_slots: Tensor
    tail_src: Tensor
    tail_dst: Tensor
    move_src: Tensor
    move_dst: Tensor
    tokens: Tensor
    node_rows: Tensor
    bonus_tokens: Tensor
    hidden_states: Tensor | None

    @property
    def bs(self) -> int:
        return len(self.seq_lens)

    def row_identity(self) -> RowIdentity:
        return RowIdentity(*self.identity.unbind())


class EagleWorkspace:
    """The tensors of iterations of up to `max_rows` requests.

    Args:
        layout: layout of the draft branches.
        draft_lead: tokens by which `draft_lens` is ahead of `seq_lens`.
        hidden_states: [at least max_rows * (S + 1), width], memory of those that
            verification returns and the draft extend reads, or None if the draft reads
            none. Workspaces of which one is used at a time may share it.

    Attributes:
        shape: shape of the trees.
        max_rows: most requests.
    """

    forward_mode = ForwardMode.TARGET_VERIFY

    def __init__(
        self,
        *,
        shape: TreeShape,
        layout: BranchLayout,
        draft_lead: int,
        req_to_token_pool: ReqToTokenPool,
        max_rows: int,
        hidden_states: Tensor | None,
    ) -> None:
        self.shape = shape
        self.layout = layout
        self.max_rows = max_rows
        self.tokens_per_row = shape.num_draft_tokens
        self._pool = req_to_token_pool
        device = req_to_token_pool.device

        def longs(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        width = shape.accept_width
        self._rows: dict[int, WorkspaceRows] = {}
        self._identity = longs(len(RowIdentity._fields), max_rows)
        self._filled = 0
        self._seq_lens = self._draft_lens = longs(max_rows)
        self._node_ends = longs(max_rows)
        self._node_counts = longs(max_rows) + shape.num_draft_tokens
        self._levels = DraftLevels.allocate(max_rows, shape, device=device)
        self._tree = DraftTree.allocate(max_rows, shape, device=device)
        self._result = VerifyResult.allocate(max_rows, shape, device=device)
        self._draft_slots = longs(shape.num_steps * max_rows * shape.topk)
        self._node_slots = longs(max_rows, shape.num_draft_tokens)
        self._extend_slots = self._node_slots[:, :width]
        self.draft_lead = draft_lead
        if draft_lead:
            self._draft_lens = longs(max_rows)
            self._extend_slots = longs(max_rows, width)
        self._tails = longs(2, max_rows * layout.tail_moves)
        self._moves = longs(2, max_rows * width)
        self._tokens = longs(max_rows, width)
        self._node_rows = longs(max_rows, width)
        self._bonus_tokens = longs(max_rows)
        self._hidden_states = hidden_states
        self._offsets = _offsets(max_rows, shape.num_draft_tokens, device)
        self._path_steps = torch.arange(width, device=device)
        self._path_offsets = _offsets(max_rows, width, device)
        self._path_widths = longs(max_rows) + width

    def rows(self, bs: int) -> WorkspaceRows:
        """Return views of the first `bs` rows; made once for each number of rows."""
        views = self._rows.get(bs)
        if views is None:
            views = self._rows[bs] = self._make_rows(bs)
        return views

    def _make_rows(self, bs: int) -> WorkspaceRows:
        shape, hidden = self.shape, self._hidden_states
        tails = bs * self.layout.tail_moves
        paths = bs * shape.accept_width
        branches = bs * shape.topk
        steps = self._draft_slots[: shape.num_steps * branches]
        return WorkspaceRows(
            identity=self._identity[:, :bs],
            seq_lens=self._seq_lens[:bs],
            draft_lens=self._draft_lens[:bs],
            node_ends=self._node_ends[:bs],
            levels=self._levels.narrow(bs),
            tree=self._tree.narrow(bs),
            result=self._result.narrow(bs),
            draft_slots=steps.view(shape.num_steps, branches),
            node_slots=self._node_slots[:bs],
            extend_slots=self._extend_slots[:bs],
            tail_src=self._tails[0, :tails],
            tail_dst=self._tails[1, :tails],
            move_src=self._moves[0, :paths],
            move_dst=self._moves[1, :paths],
            tokens=self._tokens[:bs],
            node_rows=self._node_rows[:bs],
            bonus_tokens=self._bonus_tokens[:bs],
            hidden_states=None if hidden is None else hidden[:paths],
        )

    def begin(self, identity: Tensor) -> None:
        """Put an iteration's requests (int64 [4, b], on the device) into the first
        rows. Rows after them that an earlier, larger batch filled become padding."""
        bs = identity.shape[1]
        if bs < self._filled:
            self._identity[:, bs : self._filled] = 0
        self._filled = bs
        self._identity[:, :bs] = identity

    def place_nodes(self, rows: WorkspaceRows, seq_lens: Tensor) -> None:
        """Set the rows' lengths and the slots of their nodes.

        Args:
            seq_lens: int64, tokens with KV of each request row.
        """
        torch.index_select(seq_lens, 0, rows.identity[0], out=rows.seq_lens)
        torch.add(rows.seq_lens, self.shape.num_draft_tokens, out=rows.node_ends)
        tail_cache_loc(self.slot_rows(rows), out=rows.node_slots)

    def place_extends(self, rows: WorkspaceRows) -> None:
        """Set the slots of extends that begin at the rows' lengths in the draft's
        pool."""
        # Without a lead, extends write where nodes are verified.
        out = rows.extend_slots if self.draft_lead else rows.node_slots
        tail_cache_loc(self.draft_rows(rows), out=out)

    def path_steps(self) -> Tensor:
        """Return the steps of an accepted path, int64 [S + 1]."""
        return self._path_steps

    def path_offsets(self, bs: int) -> Tensor:
        """Return offsets of the requests' paths of S + 1 tokens, int64 [bs + 1]."""
        return self._path_offsets[: bs + 1]

    def path_widths(self, bs: int) -> Tensor:
        """Return S + 1 for each request, int64 [bs]."""
        return self._path_widths[:bs]

    def clear(self) -> None:
        """Make all rows padding, as graphs must find them when they are captured."""
        places = self._draft_slots, self._node_slots, self._extend_slots
        moves = self._tails, self._moves
        lens = self._seq_lens, self._draft_lens, self._node_ends
        for rows in (self._identity, *lens, *places, *moves):
            rows.zero_()
        self._filled = 0

    def slot_rows(self, rows: WorkspaceRows) -> SlotRows:
        """Return the requests' rows of `req_to_token`, without the draft region, which
        only the draft's pool has, and their KV lengths."""
        return SlotRows(self._pool.position_slots, rows.identity[0], rows.seq_lens)

    def draft_rows(self, rows: WorkspaceRows) -> SlotRows:
        """Return the rows with the draft region, and the lengths in the draft's
        pool."""
        return SlotRows(self._pool.req_to_token, rows.identity[0], rows.draft_lens)

    # -- static inputs of verification -------------------------------------------------

    def static_batch(
        self,
        bs: int,
        capture_hidden_mode: CaptureHiddenMode,
        *,
        lens_cpu: HostLens | None = None,
    ) -> ForwardBatch:
        """Return the batch that verifies the first `bs` requests' trees."""
        views, is_tree = self.rows(bs), self.shape.topk > 1
        if lens_cpu is not None:
            nodes = self.shape.num_draft_tokens
            lens_cpu = lens_cpu.padded(bs, prefix_len=0, extend_len=nodes)
        return ForwardBatch(
            forward_mode=self.forward_mode,
            input_ids=views.tree.tokens.view(-1),
            positions=views.tree.positions.view(-1),
            out_cache_loc=views.node_slots.view(-1),
            prefix_lens=views.seq_lens,
            extend_lens=self._node_counts[:bs],
            seq_lens=views.node_ends,
            qo_indptr=self._offsets[: bs + 1],
            parent_index=views.tree.parent_index.view(-1) if is_tree else None,
            tree_mask=views.tree.mask if is_tree else None,
            lens_cpu=lens_cpu,
            capture_hidden_mode=capture_hidden_mode,
            **views.row_identity()._asdict(),
        )

    def populate(self, forward_batch: ForwardBatch) -> None:
        """Nothing to copy: the live batch uses this memory."""


def _offsets(rows: int, width: int, device: torch.device | str) -> Tensor:
    return torch.arange(0, (rows + 1) * width, width, device=device)
