"""Drafts without a model: what followed the newest tokens where they occurred before,
in the request's prompt and output or in other requests.

The host has all tokens of a request when an iteration begins, because the previous
result was processed (`BatchEnvironment.needs_results`). It builds the trees and uploads
them into the workspace; the rest of the iteration is as with a draft model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.configs.draft_layout import BranchLayout
from sglang.srt.draft_trees.relay import DraftRelay
from sglang.srt.draft_trees.workspace import EagleWorkspace
from sglang.srt.forward.batch import CaptureHiddenMode
from sglang.srt.model_executor.memory_plan import NO_DRAFT_MEMORY, DraftMemory
from sglang.srt.speculative.ngram.history import TokenHistory
from sglang.srt.speculative.ngram.streams import Streams
from sglang.srt.speculative.ngram.trees import HostTrees, build_trees, path_weights

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.configs.draft_layout import TreeShape
    from sglang.srt.draft_trees.buffers import DraftTree
    from sglang.srt.kv_canary.draft_state import DraftState
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.managers.worker.tp_worker import SampledForward
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


class NgramDraftWorker:
    """As `Drafter`.

    Args:
        target: need not have its memory yet.

    Attributes:
        history: the tokens that drafts are read from.
    """

    relay: DraftRelay
    max_behind = 0

    def __init__(self, *, server_args: ServerArgs, target: ModelRunner) -> None:
        self._target = target
        _check_vocabulary(server_args, target.model_config.vocab_size)
        self._shapes = server_args.tree_shapes
        self._max_match = server_args.speculative_ngram_max_trie_depth
        self._counts_paths = server_args.speculative_ngram_match_type == "PROB"
        self._are_returned = server_args.enable_return_hidden_states
        self.canary: CanaryManager | None = None
        self.state_check: DraftState | None = None
        self.history = TokenHistory(
            capacity=server_args.speculative_ngram_capacity,
            max_match=self._max_match,
            max_draft=max(shape.num_steps for shape in self._shapes),
        )

    @property
    def runners(self) -> list[ModelRunner]:
        """As `Drafter.runners`."""
        return []

    @property
    def target_hidden_mode(self) -> CaptureHiddenMode:
        """As `Drafter.target_hidden_mode`."""
        return CaptureHiddenMode.FULL if self._are_returned else CaptureHiddenMode.NULL

    def memory(self) -> DraftMemory:
        """As `Drafter.memory`."""
        return NO_DRAFT_MEMORY

    def init_memory_pool(self, *, target_canary: CanaryManager | None) -> None:
        """As `Drafter.init_memory_pool`."""
        pool = self._target.req_to_token_pool
        self._workspaces = {shape: self._workspace(shape) for shape in self._shapes}
        self._live = self._workspaces[self._shapes[-1]]
        self.relay = DraftRelay(
            rows=pool.size + 1,
            topk=1,
            hidden_size=None,
            dtype=self._target.dtype,
            device=pool.device,
        )
        self._token_table = pool.token_table
        self._streams = Streams(
            self.history, rows=pool.size + 1, overlap=self._max_match
        )

    def _workspace(self, shape: TreeShape) -> EagleWorkspace:
        pool = self._target.req_to_token_pool
        return EagleWorkspace(
            shape=shape,
            layout=BranchLayout(
                page_size=self._target.page_size,
                topk=shape.topk,
                num_steps=shape.num_steps,
                # No branch has slots, and none has a tail to copy.
                region=0,
            ),
            draft_lead=0,
            req_to_token_pool=pool,
            max_rows=pool.size,
            hidden_states=None,
        )

    @property
    def workspace(self) -> EagleWorkspace:
        """As `Drafter.workspace`."""
        return self._live

    def workspaces(self) -> list[EagleWorkspace]:
        """As `Drafter.workspaces`."""
        return list(self._workspaces.values())

    def init_prefill_graphs(self) -> None:
        """Nothing to capture."""

    def init_decode_graphs(self) -> None:
        """Nothing to capture."""

    def begin(self, batch: ScheduleBatch) -> None:
        """As `Drafter.begin`."""
        assert batch.shape is not None
        self._live = self._workspaces[batch.shape]
        self.workspace.begin(batch.identity())

    def catch_up(self, batch: ScheduleBatch) -> None:
        """Drafts have no KV."""

    def draft(self, bs: int, *, batch: ScheduleBatch) -> None:
        """As `Drafter.draft`. Waits for nothing; the upload is enqueued."""
        # A graph's padding gets its slots too.
        self.workspace.place_nodes(
            self.workspace.rows(self.workspace.max_rows), self.relay.seq_lens
        )
        live, shape = self.workspace.rows(bs), self.workspace.shape
        ends = self._streams.update(batch.reqs)
        found = self.history.matches(ends, count=shape.topk)
        trees = build_trees(
            self.history.continuations(ends, found, length=shape.num_steps),
            path_weights(found.lens, longest=self._max_match),
            shape=shape,
            counts_paths=self._counts_paths,
        )
        roots = self._token_table[live.identity[0], live.seq_lens]
        _upload(trees, live.tree, roots=roots, seq_lens=live.seq_lens)

    def after_prefill(self, batch: ScheduleBatch, done: SampledForward) -> None:
        """Nothing to follow."""

    def after_verify(self, bs: int, *, batch: ScheduleBatch) -> None:
        """Nothing to follow."""

    def after_plain(self, done: SampledForward) -> None:
        """Nothing to follow."""

    def on_checkpoint(self) -> None:
        """Forget all tokens: a replay begins without the requests that have ended."""
        self.history.clear()
        self._streams.clear()


def _check_vocabulary(server_args: ServerArgs, vocab_size: int) -> None:
    shape = server_args.tree_shapes[-1]
    # Made-up siblings differ from each other and from drafts.
    needed = shape.num_draft_tokens + shape.topk
    if needed > vocab_size:
        raise ValueError(
            f"--speculative-num-draft-tokens {shape.num_draft_tokens}: the model has "
            f"only {vocab_size} tokens; use at most {vocab_size - shape.topk}"
        )


def _upload(
    trees: HostTrees, tree: DraftTree, *, roots: Tensor, seq_lens: Tensor
) -> None:
    """Copy trees to the device.

    Args:
        roots: [b], the newest tokens. seq_lens: int64 [b], their positions.
    """
    rows, nodes = trees.tokens.shape
    first = np.arange(rows)[:, None] * nodes
    parents = np.where(trees.parents >= 0, trees.parents + first, -1)
    links = (trees.tokens, trees.depths, parents, trees.children, trees.siblings)
    words, mask = torch.from_numpy(np.stack(links)), torch.from_numpy(trees.mask)
    if roots.is_cuda:
        words, mask = words.pin_memory(), mask.pin_memory()
    words = words.to(roots.device, non_blocking=True)
    into = (tree.tokens, tree.positions, tree.parent_index, tree.next_token)
    for given, own in zip(words, (*into, tree.next_sibling), strict=True):
        own.copy_(given)
    tree.mask.copy_(mask, non_blocking=True)
    tree.tokens[:, 0] = roots
    tree.positions.add_(seq_lens[:, None])
