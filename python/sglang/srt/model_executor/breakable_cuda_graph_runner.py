"""Prefill forwards as breakable graphs: one per padded token count.

The layer stack is captured without its attention. The head, the KV canary and attention
see the live batch with all its requests. A short prefill of one request is one graph
without breaks, if the backend's attention can be captured. Batches with adapters have
graphs of their own, up to a size. Knows no scheduling.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sglang.srt.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.forward.context import ForwardContext, forward_context
from sglang.srt.model_executor.adapter_inputs import StaticTiles
from sglang.srt.model_executor.attention_breaks import LiveAttention
from sglang.srt.model_executor.cuda_graph_runner import (
    CapturedRunner,
    cuda_graph_backend,
)
from sglang.srt.model_executor.graph_set import GraphSet, WarmUp, log_level
from sglang.srt.model_executor.input_buffers import PrefillInputs
from sglang.srt.model_executor.memory_plan import (
    adapted_token_counts,
    whole_token_counts,
)
from sglang.srt.models.stack import StackOutput

if TYPE_CHECKING:
    from sglang.srt.forward.graph_capture import BreakableGraph, SegmentBackend
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

WARM_UPS = 1
# Above this count the device computes longer than the host launches, so padding by more
# than a percent would cost all that a graph saves.
HOST_BOUND_TOKENS = 1024
MAX_PADDING = 0.01
FALLBACK_REASONS = (
    "hidden_mode",
    "input_embeds",
    "input_logprobs",
    "too_many_tokens",
    "aux_layers",
    "draft_hidden_states",
    "expanded_latents",
    "padding",
)


class GraphKey(NamedTuple):
    """A graph of this runner.

    Fields:
        tokens: padded token count.
        is_whole: for one request, with attention captured too.
        has_adapters: for batches in which a token has an adapter.
    """

    tokens: int
    is_whole: bool
    has_adapters: bool


class PrefillGraphs(NamedTuple):
    """The graphs of a kind of batch.

    Fields:
        segmented: with attention between the segments, for any batch.
        whole: with attention captured, for one request.
    """

    segmented: GraphSet[GraphKey]
    whole: GraphSet[GraphKey]

    def serving(self, forward_batch: ForwardBatch) -> tuple[GraphKey, BreakableGraph]:
        tokens = forward_batch.num_tokens
        is_whole = forward_batch.batch_size == 1 and tokens <= self.whole.largest
        return (self.whole if is_whole else self.segmented).serving(tokens)


class BreakableCudaGraphRunner:
    """Replays EXTEND forwards. Forwards that fit no graph run eagerly.

    Args:
        model_runner: runs the EXTEND forwards to capture.
        token_counts: padded token counts, one graph each.
        capture_hidden_mode: mode of the forwards that are replayed; others run eagerly.
        draft_hidden_dim: width of the hidden states that a draft model reads, or None
            for a target.
        adapter_slots: adapters that a batch may have; 0 if none has any.
        limit_padding: run eagerly if padding costs more than a graph gains.
        make_backend: captures segments; tests pass a recorder that needs no GPU.

    Attributes:
        plain, adapted: graphs of batches without adapters and with them; the latter are
            None without `adapter_slots`.
        fallbacks: EXTEND forwards that ran eagerly, by reason.
        static_draft_hidden_states: [largest count, draft_hidden_dim], or None.
    """

    def __init__(
        self,
        model_runner: CapturedRunner,
        *,
        token_counts: list[int],
        capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
        draft_hidden_dim: int | None = None,
        adapter_slots: int = 0,
        limit_padding: bool = True,
        make_backend: Callable[[], SegmentBackend] = cuda_graph_backend,
    ) -> None:
        self._runner = model_runner
        self._max_tokens = max(token_counts)
        self.capture_hidden_mode = capture_hidden_mode
        self._limit_padding = limit_padding
        self._backend = make_backend()
        self._aux_layers = model_runner.model.aux_layers
        # Results of the segments' stacks, [largest count, channels] each. All graphs
        # share them; the first warm-up allocates them.
        self._outputs: StackOutput | None = None
        self.fallbacks: Counter[str] = Counter()
        self._init_buffers(draft_hidden_dim)
        adapted = adapted_token_counts(token_counts)
        self._tiles = StaticTiles(
            max_tokens=max(adapted), num_slots=adapter_slots, device=model_runner.device
        )
        self.plain = self._capture(token_counts)
        self.adapted: PrefillGraphs | None = None
        if adapter_slots:
            self.adapted = self._capture(adapted, has_adapters=True)

    def _init_buffers(self, draft_hidden_dim: int | None) -> None:
        runner, tokens = self._runner, self._max_tokens
        self.static_draft_hidden_states: Tensor | None = None
        if draft_hidden_dim is not None:
            self.static_draft_hidden_states = torch.zeros(
                tokens, draft_hidden_dim, dtype=runner.dtype, device=runner.device
            )
        self._inputs = PrefillInputs(
            max_tokens=tokens,
            hidden_states=self.static_draft_hidden_states,
            device=runner.device,
        )
        self._attention = LiveAttention(
            runner.attn_backend,
            max_tokens=tokens,
            dtype=runner.dtype,
            device=runner.device,
        )
        self._capture_context = ForwardContext(
            attn_backend=runner.attn_backend, attention_breaks=self._attention
        )

    @property
    def num_replays(self) -> int:
        return sum(graphs.num_replays for graphs in self._sets)

    @property
    def num_segments(self) -> int:
        return sum(graphs.num_segments for graphs in self._sets)

    @property
    def _sets(self) -> list[GraphSet[GraphKey]]:
        return [*self.plain, *(self.adapted or ())]

    def reset_counts(self) -> None:
        """Reset the counts of replays and of forwards without one."""
        for graphs in self._sets:
            graphs.reset_counts()
        self.fallbacks.clear()

    # -- choosing ------------------------------------------------------------------

    def refusal(self, forward_batch: ForwardBatch) -> str | None:
        """Return why an EXTEND forward must run eagerly, one of `FALLBACK_REASONS`, or
        None if a graph can replay it."""
        tokens = forward_batch.num_tokens
        segmented = self._graphs_for(forward_batch).segmented
        if forward_batch.capture_hidden_mode is not self.capture_hidden_mode:
            return "hidden_mode"
        if forward_batch.input_embeds is not None:
            return "input_embeds"
        if forward_batch.input_logprobs:
            return "input_logprobs"
        if tokens > segmented.largest:
            return "too_many_tokens"
        if self._runner.model.aux_layers != self._aux_layers:
            return "aux_layers"
        if not self._has_draft_states(forward_batch):
            return "draft_hidden_states"
        latent = self._runner.model_config.latent
        if latent and self._runner.attn_backend.expands(latent, forward_batch):
            return "expanded_latents"
        if self._limit_padding and tokens > HOST_BOUND_TOKENS:
            key, _ = segmented.serving(tokens)
            if key.tokens - tokens > tokens * MAX_PADDING:
                return "padding"
        return None

    def _has_draft_states(self, forward_batch: ForwardBatch) -> bool:
        """Whether the batch has hidden states for a draft model, in the captured
        width."""
        static, given = self.static_draft_hidden_states, forward_batch.spec_info
        if static is None:
            return True
        states = None if given is None else given.hidden_states
        return states is not None and states.shape[-1] == static.shape[-1]

    def _graphs_for(self, forward_batch: ForwardBatch) -> PrefillGraphs:
        if forward_batch.adapters is None:
            return self.plain
        assert self.adapted is not None
        return self.adapted

    # -- replay --------------------------------------------------------------------

    def try_replay(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput | None:
        """Replay, or return None if the forward must run eagerly, and count it."""
        if forward_batch.forward_mode is not ForwardMode.EXTEND:
            return None
        reason = self.refusal(forward_batch)
        if reason is not None:
            self.fallbacks[reason] += 1
            return None
        return self.replay(forward_batch)

    def replay(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run the smallest graph that fits, and the head on the live batch.

        The result shares no memory with the graph.
        """
        key, graph = self.replay_prepare(forward_batch)
        self._runner.attn_backend.init_eager(forward_batch)
        stack = partial(self._replay_stack, key, graph)
        output = self._runner.run_model(forward_batch, stack=stack)
        return dataclasses.replace(
            output,
            hidden_states=self._own(output.hidden_states, graph),
            last_hidden=self._own(output.last_hidden, graph),
        )

    def _own(self, hidden: Tensor | None, graph: BreakableGraph) -> Tensor | None:
        """Return the same values in memory outside the graph."""
        is_static = hidden is not None and self._is_static(hidden, graph.outputs)
        return hidden.clone() if hidden is not None and is_static else hidden

    def replay_prepare(
        self, forward_batch: ForwardBatch
    ) -> tuple[GraphKey, BreakableGraph]:
        """Choose the graph and copy a live batch into its static inputs.

        Enqueued on the current stream; the host does not wait.
        """
        key, graph = self._graphs_for(forward_batch).serving(forward_batch)
        if key.has_adapters:
            self._tiles.populate(forward_batch.adapters, forward_batch.num_tokens)
        self._inputs.populate(forward_batch, padded=key.tokens, has_row=key.is_whole)
        return key, graph

    def _replay_stack(
        self,
        key: GraphKey,
        graph: BreakableGraph,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
    ) -> StackOutput:
        """Run the stack by replaying `graph`, whose inputs `replay_prepare` copied."""
        tokens = forward_batch.num_tokens
        if key.is_whole:
            self._attention.clear_padding(tokens, key.tokens)
            graph.replay()
        else:
            with self._attention.on(forward_batch, padded=key.tokens):
                graph.replay()
        hidden, aux = graph.outputs
        return StackOutput(hidden[:tokens], [part[:tokens] for part in aux])

    @staticmethod
    def _is_static(hidden: Tensor, outputs: StackOutput) -> bool:
        """Whether the next replay may overwrite the hidden states."""
        address = hidden.untyped_storage().data_ptr()
        return any(
            address == part.untyped_storage().data_ptr()
            for part in (outputs.hidden, *outputs.aux)
        )

    # -- capture -------------------------------------------------------------------

    def _whole_counts(self, token_counts: list[int]) -> list[int]:
        """Return the token counts of graphs that include attention. Recurrent states
        are always folded between segments, because only live batches have checkpoints.
        """
        captures_whole = self._runner.attn_backend.capabilities.captures_prefill
        if self._runner.model_config.state is not None:
            captures_whole = False
        return whole_token_counts(token_counts) if captures_whole else []

    def _capture(
        self, token_counts: list[int], *, has_adapters: bool = False
    ) -> PrefillGraphs:
        make = partial(self._graph_set, has_adapters=has_adapters)
        segmented = make(token_counts, is_whole=False)
        with self._attention.captured():
            whole = make(self._whole_counts(token_counts), is_whole=True)
        return PrefillGraphs(segmented, whole)

    def _graph_set(
        self, token_counts: list[int], *, is_whole: bool, has_adapters: bool
    ) -> GraphSet[GraphKey]:
        name = "adapted prefill" if has_adapters else "prefill"
        return GraphSet(
            f"whole {name}" if is_whole else name,
            [GraphKey(count, is_whole, has_adapters) for count in token_counts],
            size_of=lambda key: key.tokens,
            capture=partial(self._capture_graph, WarmUp(WARM_UPS, self._runner.model)),
            level=log_level(self._backend),
        )

    def _capture_graph(self, warm_up: WarmUp, key: GraphKey) -> BreakableGraph:
        run = partial(self._run_forward, key)
        graph = warm_up.capture(run, self._backend)
        graph.own(self._inputs.block, *self._attention.buffers())
        graph.own(graph.outputs.hidden, *graph.outputs.aux)
        if self.static_draft_hidden_states is not None:
            graph.own(self.static_draft_hidden_states)
        return graph

    def _run_forward(self, key: GraphKey) -> StackOutput:
        """Run the stack over the static batch. Its output is kept until a replay."""
        tokens = key.tokens
        static = self._inputs.static_batch(tokens, self.capture_hidden_mode)
        context = self._capture_context
        if key.has_adapters:
            context = dataclasses.replace(context, adapters=self._tiles.of(tokens))
        with forward_context(context):
            output: StackOutput = self._runner.model.forward_stack(
                static.input_ids, static.positions, static
            )
        if key.is_whole:
            # With few tokens each graph may keep its own.
            return output
        if self._outputs is None:
            largest = self._max_tokens
            self._outputs = StackOutput(
                output.hidden.new_zeros(largest, output.hidden.shape[1]),
                [part.new_zeros(largest, part.shape[1]) for part in output.aux],
            )
        kept = (self._outputs.hidden, *self._outputs.aux)
        for target, part in zip(kept, (output.hidden, *output.aux), strict=True):
            target[:tokens].copy_(part)
        return self._outputs
