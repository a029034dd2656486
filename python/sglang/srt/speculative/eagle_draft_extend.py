"""Draft extends of one shape: S + 1 rows a request, for the tokens that it gained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.draft_trees.draft_input import EagleDraftInput
from sglang.srt.forward.batch import ForwardBatch, ForwardMode, HostLens
from sglang.srt.speculative.eagle_utils import propose

if TYPE_CHECKING:
    from sglang.srt.draft_trees.relay import DraftRelay
    from sglang.srt.draft_trees.workspace import EagleWorkspace, WorkspaceRows
    from sglang.srt.forward.batch import CaptureHiddenMode
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import (
        EAGLEDraftExtendCudaGraphRunner,
    )
    from sglang.srt.speculative.eagle_shapes import EagleShape


class DraftExtend:
    """Extends the draft's KV by the tokens of a workspace.

    Args:
        live: what belongs to the shape.
        runner: runs the draft model; has its pools.
        topk: candidates that are kept for the next iteration.
        hidden_mode: hidden states that the draft's forwards return.

    Attributes:
        width: rows of a request.
        graphs: replay the extends; None without graphs.
        no_lens: host lengths of a padding batch, as the backend needs them.
    """

    def __init__(
        self,
        live: EagleShape,
        *,
        runner: ModelRunner,
        relay: DraftRelay,
        topk: int,
        hidden_mode: CaptureHiddenMode,
    ) -> None:
        self._live, self.width = live, live.shape.accept_width
        self.graphs: EAGLEDraftExtendCudaGraphRunner | None = None
        self._runner = runner
        self._relay = relay
        self._topk = topk
        self._hidden_mode = hidden_mode
        needs_lens = runner.attn_backend.capabilities.needs_cpu_seq_lens
        self.no_lens: list[int] | None = [] if needs_lens else None

    @property
    def workspace(self) -> EagleWorkspace:
        return self._live.workspace

    @property
    def attn_backend(self) -> AttentionBackend:
        return self._runner.attn_backend

    def run(self, bs: int, *, seq_lens: Sequence[int] | None) -> None:
        """Run an extend for the first `bs` requests of the workspace, as a graph if one
        fits.

        Args:
            seq_lens: KV lengths in the draft's pool, if the backend needs them.
        """
        scopes, graphs = self._runner.scopes, self.graphs
        batch = self.batch(self.workspace.rows(bs), seq_lens=seq_lens)
        with scopes.with_ops_outside_graph(
            single_forward_indices=(0,), maybe_inaccurate_forward_batch=batch
        ):
            if graphs is not None and graphs.can_run(bs):
                scopes.on_replay()
                graphs.replay(bs, seq_lens=seq_lens)
                return
            self.attn_backend.init_eager(batch)
            self.forward(batch)

    def batch(
        self, views: WorkspaceRows, *, seq_lens: Sequence[int] | None = None
    ) -> ForwardBatch:
        """Return the batch of a draft extend. Row k of a request holds the k-th token
        gained. Rows never see later ones, so rows past the accept length do no harm.

        Args:
            seq_lens: as for `run`.
        """
        width, bs = self.width, views.bs
        steps, offsets = self.workspace.path_steps(), self.workspace.path_offsets(bs)
        return ForwardBatch(
            forward_mode=ForwardMode.DRAFT_EXTEND_V2,
            input_ids=views.tokens.view(-1),
            positions=(views.draft_lens[:, None] + steps).view(-1),
            out_cache_loc=views.extend_slots.reshape(-1),
            prefix_lens=views.draft_lens,
            extend_lens=self.workspace.path_widths(bs),
            seq_lens=views.draft_lens + width,
            qo_indptr=offsets,
            logits_rows=offsets[:-1] + views.result.accept_lens - 1,
            lens_cpu=self.host_lens(seq_lens, bs=bs),
            capture_hidden_mode=self._hidden_mode,
            spec_info=EagleDraftInput(
                hidden_states=views.hidden_states, accept_lens=views.result.accept_lens
            ),
            **views.row_identity()._asdict(),
        )

    def host_lens(self, seq_lens: Sequence[int] | None, *, bs: int) -> HostLens | None:
        """Return host lengths of a draft extend: `seq_lens`, then padding without
        KV."""
        if seq_lens is None:
            return None
        lens = [self.width] * len(seq_lens)
        live = HostLens(prefix_lens=list(seq_lens), extend_lens=lens)
        return live.padded(bs, prefix_len=0, extend_len=self.width)

    def forward(self, forward_batch: ForwardBatch) -> None:
        """Run the extend and store the state that the next iteration starts from."""
        output = self._runner.run_model(forward_batch)
        self.stash(forward_batch, output)

    def stash(self, forward_batch: ForwardBatch, output: LogitsProcessorOutput) -> None:
        """Store the candidates and hidden states of an extend, one per request."""
        candidates = propose(output.next_token_logits, self._topk)
        rows, hidden = forward_batch.req_pool_indices, output.hidden_states
        check = self._live.state_check
        if check is not None:
            check.on_extend(forward_batch, output.head, candidates, hidden)
        self._relay.stash(rows, candidates, hidden)
