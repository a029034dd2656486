"""The draft's half of speculation: its model, its KV pool, and its three forwards.

* `draft`: trees to verify (`eagle_draft_phase.py`);
* `_draft_extend_for_prefill` and `_draft_extend_for_decode`: the draft's KV for tokens
  that the target accepted, and the candidates after them.

Slot p of a head holds K and V at position p of token p + 1, together with the target's
hidden state at position p. So a slot's content depends on the next token, which is why
prefixes are cached by pairs of tokens. If the draft is a language model, slot p holds
token p, as in the target. When an iteration begins, such a draft has KV for one token
more than the target (`ServerArgs.draft_lead`): the newest one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.srt.configs.draft_config import layers_to_capture
from sglang.srt.configs.draft_layout import (
    CATCH_UP_TOKENS,
    TreeShape,
)
from sglang.srt.draft_trees.draft_input import (
    EagleDraftInput,
)
from sglang.srt.draft_trees.relay import DraftRelay
from sglang.srt.forward.batch import (
    CaptureHiddenMode,
    ForwardBatch,
)
from sglang.srt.kv_canary.api import install_canary, watcher_bytes
from sglang.srt.model_executor.memory_plan import DraftMemory, draft_graph_bytes
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_kv_cache_mixin import SharedPools
from sglang.srt.models.draft import DraftModel
from sglang.srt.speculative.draft_model import (
    check_top_k,
    load_token_map,
    share_embedding_and_head,
)
from sglang.srt.speculative.eagle_catch_up import CatchUp, PlainStates, most_behind
from sglang.srt.speculative.eagle_draft_cuda_graph_runner import (
    EAGLEDraftCudaGraphRunner,
)
from sglang.srt.speculative.eagle_draft_extend import DraftExtend
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import (
    EAGLEDraftExtendCudaGraphRunner,
)
from sglang.srt.speculative.eagle_draft_phase import DraftPhase
from sglang.srt.speculative.eagle_shapes import EagleShape
from sglang.srt.speculative.eagle_utils import (
    EAGLE3,
    get_draft_hidden_dim,
)

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.draft_trees.workspace import EagleWorkspace
    from sglang.srt.kv_canary.draft_state import DraftState
    from sglang.srt.kv_canary.runner.canary_manager import CanaryManager
    from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
    from sglang.srt.managers.worker.tp_worker import SampledForward
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs


class EagleDraftWorker:
    """The draft model's half of an iteration; a `Drafter`.

    Args:
        target: has its weights, but not yet its memory.

    Attributes:
        canary: KV canary of the draft's pool; None if off.
        draft_runner: runs the draft model.
        relay: tensors between iterations. Set by `init_memory_pool`.
        max_behind: as `Worker.max_behind`.
    """

    relay: DraftRelay

    def __init__(
        self,
        *,
        server_args: ServerArgs,
        model_config: ModelConfig,
        target: ModelRunner,
    ) -> None:
        self._server_args = server_args
        self._target = target
        self._tree_shapes = shapes = server_args.tree_shapes
        self._topk = max(shape.topk for shape in shapes)
        self.draft_runner = ModelRunner(
            server_args=server_args,
            model_config=model_config,
            is_draft_worker=True,
            dtype=target.dtype,
            watcher=watcher_bytes(server_args, is_draft=True),
        )
        # Set by init_memory_pool, if the target has one.
        self.canary: CanaryManager | None = None
        self.draft_runner.load_weights()
        self._hot_token_ids = hot = self._load_hot_token_ids()
        vocab_size = target.model_config.vocab_size if hot is None else len(hot)
        check_top_k(self._topk, num_tokens=vocab_size)
        self._lead = server_args.draft_lead
        self._hidden_mode = CaptureHiddenMode.LAST
        self._hidden_dim = get_draft_hidden_dim(self.draft_runner)
        if self._hidden_dim is None:
            self._hidden_mode = CaptureHiddenMode.NULL
        self._are_returned = server_args.enable_return_hidden_states
        assert server_args.max_running_requests is not None
        self._rows = server_args.max_running_requests + 1
        self.max_behind = 0
        if server_args.speculative_adaptive:
            self.max_behind = most_behind(
                rows=self._rows, bytes_per_token=self._state_bytes
            )
        self._shapes: dict[TreeShape, EagleShape] = {}
        self._phases: dict[TreeShape, DraftPhase] = {}
        self._extends: dict[TreeShape, DraftExtend] = {}

    @property
    def _state_bytes(self) -> int:
        """Bytes of the hidden states of one token."""
        return (self._hidden_dim or 0) * self.draft_runner.dtype.itemsize

    @property
    def workspace(self) -> EagleWorkspace:
        """As `Drafter.workspace`."""
        return self._live.workspace

    @property
    def state_check(self) -> DraftState | None:
        """As `Drafter.state_check`."""
        return self._live.state_check

    @property
    def _shape(self) -> TreeShape:
        return self._live.shape

    @property
    def phase(self) -> DraftPhase:
        """The draft phase of the current iteration's shape."""
        return self._phases[self._shape]

    @property
    def extend(self) -> DraftExtend:
        """The draft extends of the current iteration's shape."""
        return self._extends[self._shape]

    @property
    def runners(self) -> list[ModelRunner]:
        """As `Drafter.runners`."""
        return [self.draft_runner]

    @property
    def target_hidden_mode(self) -> CaptureHiddenMode:
        """Hidden states that the target's forwards must return, for the draft or for
        clients."""
        is_needed = self._hidden_dim is not None or self._are_returned
        return CaptureHiddenMode.FULL if is_needed else CaptureHiddenMode.NULL

    # -- set-up --------------------------------------------------------------------

    def memory(self) -> DraftMemory:
        """Return the device memory this worker will take. Call it before pools are
        built."""
        runner = self.draft_runner
        per_slot = runner.bytes_per_kv_slot()
        return DraftMemory(
            bytes_per_slot=per_slot,
            graph_bytes=runner.prefill_graph_bytes() + self._draft_graph_bytes(),
            region_bytes=runner.region_size() * per_slot + self._plain_bytes(),
        )

    def _plain_bytes(self) -> int:
        """Return the memory of the hidden states that plain steps leave."""
        return self._rows * self.max_behind * self._state_bytes

    def _draft_graph_bytes(self) -> int:
        """Return the memory reserved for graphs of the draft phase and of extends."""
        runner, shapes = self.draft_runner, self._all_shapes()
        return draft_graph_bytes(
            runner.model_config,
            runner.graph_sizes(),
            dtype=runner.dtype,
            rows_per_request=max(max(s.topk, s.accept_width) for s in shapes),
            kinds=len(shapes),
        )

    def _all_shapes(self) -> list[TreeShape]:
        """Return the shapes of trees, and that of the extends which catch up."""
        catch_up = TreeShape.chain(CATCH_UP_TOKENS - 1)
        if not self.max_behind or catch_up in self._tree_shapes:
            return list(self._tree_shapes)
        return [*self._tree_shapes, catch_up]

    def init_memory_pool(self, *, target_canary: CanaryManager | None) -> None:
        """Share the target's rows and slots; build the rest.

        Args:
            target_canary: KV canary of the target's pool, or None. The draft's pool is
                checked if the target's is.
        """
        target, runner = self._target, self.draft_runner
        pool: ReqToTokenPool = target.req_to_token_pool
        runner.init_memory_pool(shared=SharedPools(pool, target.allocator))
        self.canary = install_canary(
            server_args=self._server_args,
            model_runner=runner,
            target_canary=target_canary,
        )
        self._init_shapes(pool)
        self.relay = DraftRelay(
            rows=pool.size + 1,
            topk=self._topk,
            hidden_size=None
            if self._hidden_dim is None
            else runner.model_config.hidden_size,
            dtype=runner.dtype,
            device=pool.device,
        )
        self._token_table = pool.token_table
        self._phases = {shape: self._phase(shape) for shape in self._tree_shapes}
        self._extends = {
            shape: DraftExtend(
                live,
                runner=runner,
                relay=self.relay,
                topk=self._topk,
                hidden_mode=self._hidden_mode,
            )
            for shape, live in self._shapes.items()
        }
        self._behind = CatchUp(
            list(self._extends.values()),
            relay=self.relay,
            token_table=self._token_table,
            lead=self._lead,
            states=self._make_plain_states(pool.device),
        )
        self._init_lm_head()

    def _make_plain_states(self, device: torch.device | str) -> PlainStates | None:
        if not self.max_behind or self._hidden_dim is None:
            return None
        return PlainStates(
            rows=self._rows,
            length=self.max_behind,
            width=self._hidden_dim,
            dtype=self.draft_runner.dtype,
            device=device,
        )

    def _phase(self, shape: TreeShape) -> DraftPhase:
        return DraftPhase(
            self._shapes[shape],
            runner=self.draft_runner,
            relay=self.relay,
            hot_token_ids=self._hot_token_ids,
            lead=self._lead,
            hidden_mode=self._hidden_mode,
            is_checked=self.canary is not None,
        )

    def _init_shapes(self, pool: ReqToTokenPool) -> None:
        """Build what each shape needs. They share the hidden states of an iteration."""
        runner, shapes = self.draft_runner, self._all_shapes()
        states, check = None, None
        if self._hidden_dim is not None:
            widest = max(shape.accept_width for shape in shapes)
            states = torch.zeros(
                (pool.size * widest, self._hidden_dim),
                dtype=runner.dtype,
                device=pool.device,
            )
        for shape in shapes:
            if check is not None:
                check = check.for_shape(shape, max_requests=pool.size)
            elif self.canary is not None:
                check = self.canary.draft_state(shape)
            self._shapes[shape] = EagleShape.create(
                shape,
                runner=runner,
                server_args=self._server_args,
                hidden_states=states,
                state_check=check,
            )
        self._live = self._shapes[self._tree_shapes[-1]]

    def workspaces(self) -> list[EagleWorkspace]:
        """As `Drafter.workspaces`."""
        return [self._shapes[shape].workspace for shape in self._tree_shapes]

    def _init_lm_head(self) -> None:
        """Give the draft the target's embedding and head if it lacks them, and make the
        target return the states the draft reads."""
        model, target = self.draft_runner.model, self._target.model
        token_map = self._token_map
        if isinstance(model, DraftModel):
            share_embedding_and_head(model, target, token_map=token_map)
        if self.draft_runner.spec_algorithm == EAGLE3:
            assert not isinstance(target, DraftModel)
            target.capture_layers(
                layers_to_capture(
                    self.draft_runner.model_config,
                    num_target_layers=self._target.model_config.num_layers,
                )
            )

    def init_prefill_graphs(self) -> None:
        """As `Drafter.init_prefill_graphs`."""
        self.draft_runner.init_piecewise_cuda_graphs(
            force_for_draft_worker=True, **self.prefill_graph_options()
        )

    def prefill_graph_options(self) -> dict[str, Any]:
        """Options of `BreakableCudaGraphRunner` for a draft."""
        return {
            "capture_hidden_mode": self._hidden_mode,
            "draft_hidden_dim": self._hidden_dim,
        }

    def init_decode_graphs(self) -> None:
        """Capture the draft phase and the draft extend, one graph per batch size."""
        runner = self.draft_runner
        sizes = runner.graph_sizes()
        # A rehearsal's do nothing.
        for phase in self._phases.values():
            phase.graphs = None
        for extend in self._extends.values():
            extend.graphs = None
        if not sizes:
            return
        with runner.capturing("draft graphs", set_aside=self._draft_graph_bytes()):
            for live in list(self._shapes.values())[::-1]:
                self._live = live
                live.workspace.clear()
                self._capture_live(sizes)
        self._live = self._shapes[self._tree_shapes[-1]]

    def _capture_live(self, sizes: list[int]) -> None:
        make, extend = self.draft_runner.make_backend, self.extend
        phase = self._phases.get(self._shape)
        if phase is not None:
            phase.graphs = EAGLEDraftCudaGraphRunner(
                phase, batch_sizes=sizes, make_backend=make
            )
        extend.graphs = EAGLEDraftExtendCudaGraphRunner(
            extend, batch_sizes=sizes, make_backend=make
        )

    def _load_hot_token_ids(self) -> Tensor | None:
        """Load the target's id of each draft id, or None if the ids are the same."""
        self._token_map: Tensor | None = None
        path = self._server_args.speculative_token_map
        if path is not None:
            self._token_map = load_token_map(
                path,
                vocab_size=self._target.model_config.vocab_size,
                device=self.draft_runner.device,
            )
            return self._token_map
        model = self.draft_runner.model
        return model.hot_token_ids if isinstance(model, DraftModel) else None

    # -- the draft phase -----------------------------------------------------------

    def begin(self, batch: ScheduleBatch) -> None:
        """As `Drafter.begin`."""
        self.catch_up(batch)
        assert batch.shape is not None
        self._live = self._shapes[batch.shape]
        if self.canary is not None:
            self.canary.set_branches(self._shape.topk)
        self.workspace.begin(batch.identity())

    def draft(self, bs: int, *, batch: ScheduleBatch) -> None:
        """As `Drafter.draft`."""
        self.phase.run(bs, seq_lens=self._draft_lens(batch.known_lens()))

    def _draft_lens(self, seq_lens: Sequence[int] | None) -> list[int] | None:
        """Convert KV lengths in the target's pool to lengths in the draft's pool."""
        return None if seq_lens is None else [n + self._lead for n in seq_lens]

    # -- extends -------------------------------------------------------------------

    def after_prefill(self, batch: ScheduleBatch, done: SampledForward) -> None:
        """As `Drafter.after_prefill`."""
        self._draft_extend_for_prefill(batch, done)
        self.catch_up(batch)

    def after_verify(self, bs: int, *, batch: ScheduleBatch) -> None:
        """As `Drafter.after_verify`."""
        self._draft_extend_for_decode(bs, seq_lens=batch.known_lens())

    def after_plain(self, done: SampledForward) -> None:
        """As `Drafter.after_plain`."""
        self._behind.keep(done)

    def catch_up(self, batch: ScheduleBatch) -> None:
        """As `Drafter.catch_up`."""
        self._behind.run(batch)

    def on_checkpoint(self) -> None:
        """Nothing is kept beside what a prefill makes again."""

    def _draft_extend_for_prefill(
        self, batch: ScheduleBatch, done: SampledForward
    ) -> None:
        """Compute the draft's KV for the tokens that the target has just prefilled.

        A head gets each next token and so proposes what follows the sampled one. A
        language model gets the same tokens as the target; it reads the sampled one once
        the request has a slot for it (`catch_up`).

        Args:
            done: result of the target's forward of `batch`, with hidden states. Its
                sampled tokens are already published.
        """
        forward_batch, is_head = done.forward_batch, not self._lead
        if self.canary is not None:
            self.canary.expect_prefixes(
                batch.reqs, batch.prefix_lens(), forward_batch.req_pool_indices
            )
        output = self.draft_runner.forward(
            dataclasses.replace(
                forward_batch,
                input_ids=self.next_tokens(forward_batch)
                if is_head
                else forward_batch.input_ids,
                input_embeds=batch.input_embeds(ahead=int(is_head)),
                input_logprobs=(),
                sampling_info=None,
                capture_hidden_mode=self._hidden_mode,
                spec_info=EagleDraftInput(
                    hidden_states=None
                    if self._hidden_dim is None
                    else done.output.hidden_states
                ),
            )
        )
        if is_head:
            self.extend.stash(forward_batch, output)

    def next_tokens(self, forward_batch: ForwardBatch) -> Tensor:
        """Return the token after each one that a prefill computes, sampled or known:
        int64 [T]."""
        rows = forward_batch.req_pool_indices.repeat_interleave(
            forward_batch.extend_lens, output_size=forward_batch.num_tokens
        )
        return self._token_table[rows, forward_batch.positions + 1].long()

    def _draft_extend_for_decode(
        self, bs: int, *, seq_lens: Sequence[int] | None
    ) -> None:
        """Compute the draft's KV for tokens gained by the first `bs` requests of the
        workspace: S + 1 rows each, however many were accepted."""
        self.extend.run(bs, seq_lens=self._draft_lens(seq_lens))
