"""The draft phase of one shape of trees: S levels of candidates from S - 1 forwards
over requests x branches, and the tree to verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.draft_trees.draft_input import (
    BranchColumns,
    EagleDraftInput,
    duplicate_prefix_tail_to_draft_branches,
)
from sglang.srt.draft_trees.ops.tree.op import build_tree, select_top_k
from sglang.srt.draft_trees.workspace import RowIdentity
from sglang.srt.forward.batch import ForwardBatch, ForwardMode, HostLens
from sglang.srt.mem_cache.ops.branch_slots.op import (
    BranchPaths,
    branch_shifts,
    draft_out_cache_loc,
    tail_cache_loc,
)
from sglang.srt.speculative.eagle_utils import propose

if TYPE_CHECKING:
    from sglang.srt.draft_trees.relay import DraftRelay
    from sglang.srt.draft_trees.workspace import EagleWorkspace, WorkspaceRows
    from sglang.srt.forward.batch import CaptureHiddenMode
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.eagle_draft_cuda_graph_runner import (
        EAGLEDraftCudaGraphRunner,
    )
    from sglang.srt.speculative.eagle_shapes import EagleShape


class DraftPhase:
    """Drafts the trees of a workspace.

    Args:
        live: what belongs to the shape.
        runner: runs the draft model; has its pools.
        hot_token_ids: the target's id of each draft id, or None if they are the same.
        lead: `ServerArgs.draft_lead`.
        hidden_mode: hidden states that the draft's forwards return.
        is_checked: whether the KV canary is on.

    Attributes:
        attention: of the draft steps.
        graphs: replay the phase; None without graphs.
        no_lens: host lengths of a padding batch, as the backend needs them.
    """

    def __init__(
        self,
        live: EagleShape,
        *,
        runner: ModelRunner,
        relay: DraftRelay,
        hot_token_ids: Tensor | None,
        lead: int,
        hidden_mode: CaptureHiddenMode,
        is_checked: bool,
    ) -> None:
        self._live, self.attention = live, live.attention
        self.graphs: EAGLEDraftCudaGraphRunner | None = None
        self._shape, self._layout = live.shape, live.layout
        self._runner = runner
        self._relay = relay
        self._hot_token_ids = hot_token_ids
        self._lead = lead
        self._hidden_mode = hidden_mode
        self._is_checked = is_checked
        pool, capabilities = runner.req_to_token_pool, runner.attn_backend.capabilities
        self._token_table = pool.token_table
        is_paged = capabilities.needs_paged_draft_rows and live.layout.region is None
        self._needs_tails = is_paged
        # Elements that a branch may have after the prefix: those of all steps.
        self._steps = torch.arange(max(live.shape.num_steps - 1, 1), device=pool.device)
        self.no_lens: list[int] | None = [] if capabilities.needs_cpu_seq_lens else None
        branches = pool.size * live.shape.topk
        self._ones = torch.ones(branches, dtype=torch.int64, device=pool.device)

    @property
    def workspace(self) -> EagleWorkspace:
        return self._live.workspace

    def run(self, bs: int, *, seq_lens: Sequence[int] | None) -> None:
        """Draft a tree for the first `bs` requests of the workspace, as a graph if one
        fits.

        Args:
            seq_lens: KV lengths in the draft's pool, if the backend needs them.
        """
        scopes, graphs = self._runner.scopes, self.graphs
        views = self.workspace.rows(bs)
        with scopes.with_ops_outside_graph(
            single_forward_indices=range(self._shape.num_steps - 1),
            maybe_inaccurate_forward_batch=self._first_step(views),
        ):
            if graphs is not None and graphs.can_run(bs):
                scopes.on_replay()
                graphs.replay(bs, seq_lens=seq_lens)
            else:
                self.plan(seq_lens)
                self.forward(views, seq_lens=seq_lens)

    def plan(self, seq_lens: Sequence[int] | None, *, graph_rows: int = 0) -> None:
        """Plan `forward` on the host; see `DraftDecodeBackend.plan`.

        Args:
            seq_lens: as for `run`.
        """
        if seq_lens is not None:
            # A padding row has no KV in the target's pool, and the lead in the draft's.
            padding = [self._lead] * (graph_rows - len(seq_lens))
            seq_lens = [*seq_lens, *padding]
        self.attention.plan(seq_lens, graph_rows=graph_rows)

    def forward(
        self, views: WorkspaceRows, *, seq_lens: Sequence[int] | None = None
    ) -> None:
        """Run the whole draft phase, with fixed shapes and no wait for the device.

        Args:
            seq_lens: as for `run`.
        """
        shape, idx = self._shape, views.identity[0]
        self.workspace.place_nodes(views, self._relay.seq_lens)
        slot_rows = self.workspace.draft_rows(views)
        if self._lead:
            torch.add(views.seq_lens, self._lead, out=views.draft_lens)
            tail_cache_loc(slot_rows, out=views.extend_slots)
        roots = self._token_table[idx, views.seq_lens].long()
        if shape.num_steps > 1:
            draft_out_cache_loc(slot_rows, layout=self._layout, out=views.draft_slots)
            if self._needs_tails:
                duplicate_prefix_tail_to_draft_branches(
                    self._runner.token_to_kv_pool,
                    slot_rows,
                    layout=self._layout,
                    src=views.tail_src,
                    dst=views.tail_dst,
                )
            self.attention.prepare(slot_rows)
        self._run_levels(views, seq_lens)
        build_tree(
            views.levels,
            shape=shape,
            root_tokens=roots,
            seq_lens=views.seq_lens,
            tree=views.tree,
        )

    def _first_step(self, views: WorkspaceRows) -> ForwardBatch:
        """Return the batch that the scopes around a launch see: one row per request,
        with the lengths of the previous iteration."""
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            input_ids=views.bonus_tokens,
            positions=views.draft_lens,
            out_cache_loc=views.extend_slots[:, 0],
            prefix_lens=views.draft_lens,
            extend_lens=self._ones[: views.bs],
            seq_lens=views.draft_lens,
            **views.row_identity()._asdict(),
        )

    def _run_levels(self, views: WorkspaceRows, seq_lens: Sequence[int] | None) -> None:
        shape, state_check = self._shape, self._live.state_check
        candidates, hidden = self._relay.gather(views.identity[0])
        if state_check is not None:
            state_check.on_gather(views, candidates, hidden)
        candidates = candidates.best(shape.topk)
        branches = views.bs * shape.topk
        identity = RowIdentity(
            *views.identity.repeat_interleave(shape.topk, dim=1).unbind()
        )
        lens = views.draft_lens.repeat_interleave(shape.topk)
        columns = self._branch_columns(views) if self._is_checked else None
        paths = BranchPaths(views.levels.parents, views.draft_slots, views.draft_lens)
        input_ids, hidden_rows = torch.empty_like(lens), torch.empty_like(lens)
        for level in range(shape.num_steps):
            select_top_k(
                level,
                shape=shape,
                topk_p=candidates.probs,
                topk_index=candidates.ids,
                hot_token_id=self._hot_token_ids,
                levels=views.levels,
                input_ids=input_ids,
                hidden_rows=hidden_rows,
            )
            if level == shape.num_steps - 1:
                return
            if hidden is not None:
                hidden = hidden.index_select(0, hidden_rows)
            if level and self._layout.is_exact:
                self.attention.follow(level, paths)
                if columns is not None:
                    columns = self._follow_columns(columns, level, hidden_rows)
            output = self.run_step(
                level,
                ForwardBatch(
                    forward_mode=ForwardMode.DECODE,
                    input_ids=input_ids,
                    positions=lens,
                    out_cache_loc=views.draft_slots[level],
                    prefix_lens=lens,
                    extend_lens=self._ones[:branches],
                    seq_lens=lens + 1,
                    lens_cpu=self._branch_lens(seq_lens, level),
                    capture_hidden_mode=self._hidden_mode,
                    spec_info=EagleDraftInput(hidden_states=hidden, columns=columns),
                    **identity._asdict(),
                ),
            )
            if state_check is not None:
                state_check.on_step(views, level, hidden, output.hidden_states)
            candidates = propose(output.next_token_logits, shape.topk)
            hidden, lens = output.hidden_states, lens + 1

    def run_step(
        self, level: int, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Run the forward of draft step `level`, with one row per request and
        branch."""
        backend = self.attention.step(level)
        return self._runner.run_model(forward_batch, step=level, attn_backend=backend)

    def _branch_lens(
        self, seq_lens: Sequence[int] | None, level: int
    ) -> HostLens | None:
        if seq_lens is None:
            return None
        lens = [n + level for n in seq_lens for _ in range(self._shape.topk)]
        return HostLens(prefix_lens=lens, extend_lens=[1] * len(lens))

    def _branch_columns(self, views: WorkspaceRows) -> BranchColumns:
        """Return columns of the branches of step 0, for the KV canary."""
        branches = views.bs * self._shape.topk
        shift_from, shift = views.draft_lens.new_empty(2, branches).unbind()
        branch_shifts(
            self.workspace.draft_rows(views),
            layout=self._layout,
            paged=self._needs_tails,
            shift_from=shift_from,
            column_shift=shift,
        )
        if self._layout.is_exact:
            shift = shift.repeat_interleave(len(self._steps))
        return BranchColumns(shift_from=shift_from, shift=shift)

    def _follow_columns(
        self, columns: BranchColumns, level: int, parents: Tensor
    ) -> BranchColumns:
        """Return the columns of the branches of a later step. Until it, each has had
        those of its parent (int64 [b * K], rows of the step before).

        Attention finds its slots by the candidates that were chosen, this by the rows
        that branches continue: the canary compares the two.
        """
        shift = columns.shift.view(len(parents), -1)
        # A branch's last step has its own columns.
        own, inherited = shift[:, -1:], shift.index_select(0, parents)
        shift = torch.where(self._steps < level, inherited, own)
        return BranchColumns(columns.shift_from, shift.view(-1), parents)
