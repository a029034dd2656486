"""Speculative decoding as the scheduler sees it: a worker whose decode step drafts a
tree, verifies it with the target and yields one to S + 1 tokens per request.

```
decode:  draft --> verify --> accept, compact, publish --> draft extend
                                     |
                                     copy to the host (the extend runs meanwhile)
```
The next iteration starts from state on the device (`DraftRelay`), so it can be launched
before the host has seen this one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary.accepted import AcceptedPath
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.draft_trees.ops.verify.op import gather_accepted
from sglang.srt.forward.batch import ForwardBatch, ForwardMode, HostLens
from sglang.srt.kv_canary.api import install_canary, watcher_bytes
from sglang.srt.kv_canary.edits import EditBounds
from sglang.srt.managers.worker.tp_worker import TpModelWorker, to_host
from sglang.srt.mem_cache.ops.branch_slots.op import accepted_moves
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.draft_model import draft_model_config
from sglang.srt.speculative.eagle_draft_worker import EagleDraftWorker
from sglang.srt.speculative.eagle_utils import (
    AcceptThresholds,
    Decision,
    accept_drafts,
    accepted_logprobs,
    node_history,
)
from sglang.srt.speculative.ngram.ngram_draft_worker import NgramDraftWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.draft_trees.workspace import WorkspaceRows
    from sglang.srt.forward.state_plan import StatePlan
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.layers.logits_processor import HeadCall
    from sglang.srt.managers.batch.forward_result import GenerationBatchResult
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.managers.worker.grammar_masks import GrammarMasks
    from sglang.srt.managers.worker.tp_worker import SampledForward
    from sglang.srt.sampling.penalties import TokenHistory
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.drafter import Drafter

__all__ = ["EAGLEWorkerV2", "EagleDraftWorker", "EagleWorkerV2"]


class EAGLEWorkerV2:
    """Worker for every speculative algorithm.

    Attributes:
        model_runner: the target's runner.
        draft_worker: the draft's half.
    """

    draft_worker: Drafter

    def __init__(self, *, server_args: ServerArgs, model_config: ModelConfig) -> None:
        """Load target and draft and build their pools.

        Raises:
            ValueError: target or draft cannot be loaded, do not match, or do not fit
                into memory.
        """
        draft_config = None
        if server_args.draft_kind.has_model:
            draft_config = draft_model_config(server_args, model_config)
        target = ModelRunner(
            server_args=server_args,
            model_config=model_config,
            draft_config=draft_config,
            watcher=watcher_bytes(server_args),
        )
        target.load_weights()
        draft: Drafter
        if draft_config is None:
            draft = NgramDraftWorker(server_args=server_args, target=target)
        else:
            draft = EagleDraftWorker(
                server_args=server_args, model_config=draft_config, target=target
            )
        target.init_memory_pool(draft_memory=draft.memory())
        canary = install_canary(server_args=server_args, model_runner=target)
        draft.init_memory_pool(target_canary=canary)
        self.model_runner = target
        self.draft_worker = draft
        self.target_worker = TpModelWorker(model_runner=target, canary=canary)
        self.max_behind = draft.max_behind
        self._is_adaptive = server_args.speculative_adaptive
        self._thresholds = AcceptThresholds(
            single=server_args.speculative_accept_threshold_single,
            acc=server_args.speculative_accept_threshold_acc,
        )
        self._group = get_tp_group()

    def capture_graphs(self) -> None:
        """As `Worker.capture_graphs`."""
        target, draft = self.model_runner, self.draft_worker
        # A rehearsal leaves requests there whose slots are free.
        # The largest trees first: the graphs of the others fit into their memory.
        workspaces = draft.workspaces()[::-1]
        for workspace in workspaces:
            workspace.clear()
        mode = draft.target_hidden_mode
        target.init_piecewise_cuda_graphs(capture_hidden_mode=mode)
        draft.init_prefill_graphs()
        if self._is_adaptive:
            target.init_cuda_graphs(others=workspaces, capture_hidden_mode=mode)
        else:
            target.init_cuda_graphs(workspaces[0], capture_hidden_mode=mode)
        draft.init_decode_graphs()
        for manager in self.canary_managers():
            manager.mark_init_finished()

    @torch.inference_mode()
    def forward_batch_generation(
        self, batch: ScheduleBatch, masks: GrammarMasks | None = None
    ) -> GenerationBatchResult:
        """Prefill both models, or draft and verify; see `Worker`."""
        if batch.shape is not None and batch.forward_mode.is_decode:
            return self._decode(batch, masks)
        info = batch.sampling_info if masks is None else masks.for_requests(batch)
        if batch.forward_mode.is_decode:
            return self._decode_plain(batch, info)
        return self._prefill(batch, info)

    # -- prefill -------------------------------------------------------------------

    def _prefill(
        self, batch: ScheduleBatch, sampling_info: SamplingBatchInfo
    ) -> GenerationBatchResult:
        draft = self.draft_worker
        forward_batch = batch.forward_batch(
            sampling_info, capture_hidden_mode=draft.target_hidden_mode
        )
        done = self.target_worker.run(batch, forward_batch)
        result = self._publish(batch, done)
        draft.after_prefill(batch, done)
        return result

    def _publish(
        self, batch: ScheduleBatch, done: SampledForward
    ) -> GenerationBatchResult:
        """Publish the lengths after a forward all of whose tokens stay, and enqueue the
        copies of its result."""
        forward_batch = done.forward_batch
        self.draft_worker.relay.publish(
            forward_batch.req_pool_indices, forward_batch.seq_lens
        )
        return to_host(
            done.sent,
            bs=len(done.token_ids),
            has_marks=done.has_marks,
            logprobs=done.logprobs,
            input_logprobs=done.output.input_logprobs,
            hidden=done.output.last_hidden if batch.wants_hidden_states else None,
        )

    # -- decode --------------------------------------------------------------------

    def _decode_plain(
        self, batch: ScheduleBatch, sampling_info: SamplingBatchInfo
    ) -> GenerationBatchResult:
        """Decode one token per request without a draft."""
        draft = self.draft_worker
        draft.catch_up(batch)
        batch.place_on_device(draft.relay.seq_lens)
        forward_batch = batch.forward_batch(
            sampling_info, capture_hidden_mode=draft.target_hidden_mode
        )
        done = self.target_worker.run(batch, forward_batch)
        result = self._publish(batch, done)
        draft.after_plain(done)
        return result

    def _decode(
        self, batch: ScheduleBatch, masks: GrammarMasks | None
    ) -> GenerationBatchResult:
        draft, bs = self.draft_worker, len(batch)
        draft.begin(batch)
        workspace = draft.workspace
        draft.draft(bs, batch=batch)
        live = workspace.rows(bs)
        sampling_info = batch.sampling_info
        if masks is not None:
            sampling_info = masks.for_nodes(batch, live.tree)
        nodes = workspace.static_batch(
            bs,
            draft.target_hidden_mode,
            lens_cpu=self._verify_lens(batch.known_lens()),
        )
        tiles = batch.adapter_tiles(workspace.shape.num_draft_tokens)
        if tiles is not None:
            nodes = dataclasses.replace(nodes, adapters=tiles)
        output = self.model_runner.forward(nodes, inputs=workspace)
        decided = self.verify(
            live,
            output.next_token_logits,
            sampling_info,
            history=self._history(batch, live),
        )
        self._take_accepted(live, output.hidden_states, batch.state_plan)
        hidden = None
        if batch.wants_hidden_states and output.last_hidden is not None:
            rows = live.node_rows.view(-1)
            hidden = output.last_hidden.index_select(0, rows)
        result = self._to_host(
            batch,
            live,
            decided,
            hidden,
            head=output.head,
            masks=sampling_info.vocab_mask,
        )
        draft.after_verify(bs, batch=batch)
        return result

    def _verify_lens(self, seq_lens: list[int] | None) -> HostLens | None:
        if seq_lens is None:
            return None
        nodes = self.draft_worker.workspace.shape.num_draft_tokens
        return HostLens(prefix_lens=seq_lens, extend_lens=[nodes] * len(seq_lens))

    def verify(
        self,
        live: WorkspaceRows,
        logits: Tensor,
        sampling_info: SamplingBatchInfo,
        *,
        history: TokenHistory | None,
    ) -> Decision:
        """Decide which drafts are accepted (`live.result`), the same on every rank.

        Args:
            logits: [b * D, V], the target's logits after each node.
            history: tokens on the path to each node, if a request has a penalty.
        """
        return accept_drafts(
            live.tree,
            logits,
            sampling_info,
            history=history,
            thresholds=self._thresholds,
            result=live.result,
            # On a GPU a sum over a distribution may not have the same bits every time.
            agree=self._group.broadcast,
        )

    def _history(
        self, batch: ScheduleBatch, live: WorkspaceRows
    ) -> TokenHistory | None:
        """Return the tokens on the path to each node, if a request has a penalty."""
        if not batch.sampling_info.has_penalty:
            return None
        return node_history(
            live.tree,
            token_table=self.model_runner.req_to_token_pool.token_table,
            req_pool_indices=live.identity[0],
            max_len=int(batch.seq_lens_cpu.max()) + batch.ahead,
        )

    def _take_accepted(
        self, live: WorkspaceRows, hidden: Tensor | None, states: StatePlan | None
    ) -> None:
        """Move the accepted tokens, their KV and hidden states to the front, fold them
        into recurrent states, and publish the tokens and the new lengths."""
        gather_accepted(
            live.result,
            tokens=live.tokens,
            node_rows=live.node_rows,
            bonus_tokens=live.bonus_tokens,
        )
        shape = self.draft_worker.workspace.shape
        if shape.topk > 1:
            accepted_moves(
                live.result.accept_index,
                out_cache_loc=live.node_slots.view(-1),
                src=live.move_src,
                dst=live.move_dst,
            )
            self.model_runner.token_to_kv_pool.move_kv_cache(
                live.move_dst, live.move_src
            )
        self.model_runner.commit_states(
            live.identity[0],
            live.result.accept_index,
            live.result.accept_lens,
            prefix_lens=live.seq_lens,
            due=None if states is None else states.due,
            num_nodes=live.bs * shape.num_draft_tokens,
        )
        if live.hidden_states is not None:
            assert hidden is not None
            self._take_hidden(live, hidden, out=live.hidden_states)
        req_pool_indices = live.identity[0]
        table = self.model_runner.req_to_token_pool.token_table
        # The tokens gained follow the root, which is at the old length.
        steps = self.draft_worker.workspace.path_steps()
        columns = live.seq_lens[:, None] + 1 + steps
        table[req_pool_indices[:, None], columns] = live.tokens.to(table.dtype)
        self.draft_worker.relay.publish(
            req_pool_indices, live.seq_lens + live.result.accept_lens
        )

    def _take_hidden(self, live: WorkspaceRows, hidden: Tensor, *, out: Tensor) -> None:
        """Raises:
        RuntimeError: the target returns hidden states that do not match the draft.
        """
        if hidden.shape[1] != out.shape[1]:
            raise RuntimeError(
                f"the target returns hidden states of width {hidden.shape[1]}, but the "
                f"draft reads {out.shape[1]}"
            )
        torch.index_select(hidden, 0, live.node_rows.view(-1), out=out)
        check = self.draft_worker.state_check
        if check is not None:
            check.on_take(live, hidden)

    def catch_up(self, batch: ScheduleBatch) -> None:
        """As `Worker.catch_up`."""
        with torch.inference_mode():
            self.draft_worker.catch_up(batch)

    def on_checkpoint(self) -> None:
        """As `Worker.on_checkpoint`."""
        self.draft_worker.on_checkpoint()

    def model_runners(self) -> list[ModelRunner]:
        """As `Worker.model_runners`."""
        return [self.model_runner, *self.draft_worker.runners]

    def canary_managers(self) -> list[CanaryManager]:
        """Canaries of the target's pool and the draft's, if any; empty if off."""
        found, draft = self.target_worker.canary_managers(), self.draft_worker.canary
        return found if draft is None else [*found, draft]

    def _accepted_rows(self, live: WorkspaceRows) -> ForwardBatch:
        """Return the tokens whose KV stays: the root and the accepted drafts."""
        workspace, roots = self.draft_worker.workspace, live.tree.tokens[:, :1]
        steps, width = workspace.path_steps(), workspace.shape.accept_width
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=torch.cat((roots, live.tokens[:, :-1]), dim=1).view(-1),
            positions=(live.seq_lens[:, None] + steps).view(-1),
            out_cache_loc=live.node_slots[:, :width].reshape(-1),
            prefix_lens=live.seq_lens,
            extend_lens=live.result.accept_lens,
            seq_lens=live.seq_lens + live.result.accept_lens,
            qo_indptr=workspace.path_offsets(live.bs),
            **live.row_identity()._asdict(),
        )

    def _checked(
        self,
        batch: ScheduleBatch,
        pools: Sequence[CanaryManager],
        live: WorkspaceRows,
        decided: Decision,
        *,
        head: HeadCall,
        masks: Tensor | None,
    ) -> Tensor:
        """Return the words of a step, after the canaries of both pools have checked and
        recorded them."""
        result, identity = live.result, live.row_identity()
        path = AcceptedPath(
            req_rows=identity.req_pool_indices,
            serials=identity.req_serial,
            prefix_lens=live.seq_lens,
            tokens=live.tree.tokens,
            parent_index=live.tree.parent_index,
            predict=result.predict,
            accept_index=result.accept_index,
            accept_lens=result.accept_lens,
            gained=live.tokens,
            choices=decided.choices,
        )
        target, drafts = pools[0], pools[1:]
        return target.ends.finish_verify(
            path,
            draft=drafts[0].ends if drafts else None,
            salts=identity.salt,
            accepted=lambda: self._accepted_rows(live),
            head=head,
            choice=decided.made,
            masks=masks,
            bounds=EditBounds.of(
                batch.sampling_info, batch.seq_lens_cpu, ahead=batch.ahead
            ),
        )

    def _to_host(
        self,
        batch: ScheduleBatch,
        live: WorkspaceRows,
        decided: Decision,
        hidden: Tensor | None,
        *,
        head: HeadCall,
        masks: Tensor | None,
    ) -> GenerationBatchResult:
        logprobs = None
        if batch.logprob_request is not None:
            logprobs = accepted_logprobs(
                decided.logits,
                batch.sampling_info,
                node_rows=live.node_rows,
                tokens=live.tokens,
                request=batch.logprob_request,
            )
        vectors = [live.tokens.view(-1), live.result.accept_lens]
        pools = self.canary_managers()
        if pools:
            vectors = [
                self._checked(batch, pools, live, decided, head=head, masks=masks)
            ]
        return to_host(
            vectors,
            bs=live.bs,
            num_pools=len(pools),
            has_marks=bool(pools),
            stride=self.draft_worker.workspace.shape.accept_width,
            has_accept_lens=True,
            logprobs=logprobs,
            hidden=hidden,
        )


# SGLang's other name for the class.
EagleWorkerV2 = EAGLEWorkerV2
