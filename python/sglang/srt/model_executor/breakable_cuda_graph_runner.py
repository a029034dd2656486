"""Prefill forwards as breakable graphs: one per padded token count.

The layer stack is captured with attention outside of its segments; the head, the KV
canary and attention see the live batch with all its requests. A short prefill of one
request is a graph without breaks, where the backend's attention can be captured. Knows
no scheduling.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.attention_breaks import LiveAttention
from sglang.srt.model_executor.cuda_graph_runner import cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.graph_capture import (
    BreakableGraph,
    SegmentBackend,
    capture_graph,
)
from sglang.srt.model_executor.memory_plan import whole_token_counts
from sglang.srt.models.stack import StackOutput

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Loads the kernels and allocates what is kept for good; a capture may do neither.
WARM_UPS = 1
# Above it the device computes longer than the host launches, so that a graph saves
# nothing that padding beyond a percent would not cost again.
HOST_BOUND_TOKENS = 1024
MAX_PADDING = 0.01
# Of a static batch, what differs from token to token. Padding is 0 in all of them.
_TOKEN_FIELDS = ("input_ids", "positions", "out_cache_loc")
# What captured attention reads of its one row, and the words of each. Offsets,
# prefix and row begin at even words, as they do in other forwards, so that the same
# compiled kernels serve.
_ROW_FIELDS = {
    "qo_indptr": 2,
    "prefix_lens": 1,
    "extend_lens": 1,
    "req_pool_indices": 1,
    "seq_lens": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticSpecInput:
    """The `SpecInput` of a captured draft model."""

    hidden_states: Tensor | None


class GraphKey(NamedTuple):
    """A graph of this runner.

    Fields:
        tokens: padded count.
        is_whole: for one request, attention captured with the rest.
    """

    tokens: int
    is_whole: bool


class BreakableCudaGraphRunner:
    """Args:
    model_runner: whose EXTEND forwards are captured.
    token_counts: padded token counts, each a graph.
    capture_hidden_mode: of the forwards that are replayed; others run eagerly.
    draft_hidden_dim: channels of the hidden states that a draft model reads, None for
        a target.
    limit_padding: run eagerly what would be padded by more than it gains.
    make_backend: captures segments; tests pass a recorder that needs no GPU.

    Attributes:
        fallbacks: EXTEND forwards that ran eagerly, by reason.
        static_draft_hidden_states: [largest count, draft_hidden_dim], or None.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        *,
        token_counts: list[int],
        capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
        draft_hidden_dim: int | None = None,
        limit_padding: bool = True,
        make_backend: Callable[[], SegmentBackend] = cuda_graph_backend,
    ) -> None:
        self._runner = model_runner
        self._sizes = sorted(token_counts)
        self._hidden_mode = capture_hidden_mode
        self._limit_padding = limit_padding
        self._backend = make_backend()
        self._graphs: dict[GraphKey, BreakableGraph] = {}
        # The part of the static inputs that each graph reads.
        self._words: dict[GraphKey, Tensor] = {}
        self._aux_layers = model_runner.model.aux_layers
        # What segments' stacks return, [largest count, channels] each, for all of them:
        # allocated by the first warm-up.
        self._outputs: StackOutput | None = None
        self.fallbacks: Counter[str] = Counter()
        self._init_buffers(draft_hidden_dim)
        self._capture()

    def _init_buffers(self, draft_hidden_dim: int | None) -> None:
        runner, tokens = self._runner, self._sizes[-1]
        row_words = sum(_ROW_FIELDS.values())
        # For a graph of n tokens: [token fields, n], then the request of a whole graph.
        # In a segment nothing reads it.
        self._inputs = torch.zeros(
            len(_TOKEN_FIELDS) * tokens + row_words,
            dtype=torch.int64,
            device=runner.device,
        )
        self._padding = torch.zeros_like(self._inputs[:tokens])
        self.static_draft_hidden_states: Tensor | None = None
        if draft_hidden_dim is not None:
            self.static_draft_hidden_states = torch.zeros(
                tokens, draft_hidden_dim, dtype=runner.dtype, device=runner.device
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
        return sum(graph.num_replays for graph in self._graphs.values())

    @property
    def num_segments(self) -> int:
        return sum(graph.num_breaks + 1 for graph in self._graphs.values())

    # -- choosing ------------------------------------------------------------------

    def can_run(self, forward_batch: ForwardBatch) -> bool:
        return (
            forward_batch.forward_mode is ForwardMode.EXTEND
            and self.refusal(forward_batch) is None
        )

    def refusal(self, forward_batch: ForwardBatch) -> str | None:
        """Why an EXTEND forward must run eagerly; None: a graph can replay it."""
        tokens = forward_batch.num_tokens
        if forward_batch.capture_hidden_mode is not self._hidden_mode:
            return "hidden_mode"
        if forward_batch.input_embeds is not None:
            return "input_embeds"
        if forward_batch.input_logprobs:
            return "input_logprobs"
        if tokens > self._sizes[-1]:
            return "too_many_tokens"
        if self._runner.model.aux_layers != self._aux_layers:
            return "aux_layers"
        if not self._has_draft_states(forward_batch):
            return "draft_hidden_states"
        padding = self._size_for(tokens) - tokens
        is_wasteful = tokens > HOST_BOUND_TOKENS and padding > tokens * MAX_PADDING
        return "padding" if is_wasteful and self._limit_padding else None

    def _has_draft_states(self, forward_batch: ForwardBatch) -> bool:
        """Whether the batch has what a draft model reads, in the captured width."""
        static, given = self.static_draft_hidden_states, forward_batch.spec_info
        if static is None:
            return True
        states = None if given is None else given.hidden_states
        return states is not None and states.shape[-1] == static.shape[-1]

    def _size_for(self, tokens: int) -> int:
        return self._sizes[bisect.bisect_left(self._sizes, tokens)]

    def _key_for(self, forward_batch: ForwardBatch) -> GraphKey:
        size = self._size_for(forward_batch.num_tokens)
        whole = GraphKey(tokens=size, is_whole=True)
        if forward_batch.num_rows == 1 and whole in self._graphs:
            return whole
        return GraphKey(tokens=size, is_whole=False)

    # -- replay --------------------------------------------------------------------

    def try_replay(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput | None:
        """`replay`, or None where it must run eagerly, which is counted."""
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
        key = self.replay_prepare(forward_batch)
        self._runner.attn_backend.init_eager(forward_batch)
        stack = partial(self._replay_stack, key)
        output = self._runner.run_model(forward_batch, stack=stack)
        hidden = output.hidden_states
        if hidden is not None and self._is_static(hidden, self._graphs[key].outputs):
            output = dataclasses.replace(output, hidden_states=hidden.clone())
        return output

    def replay_prepare(self, forward_batch: ForwardBatch) -> GraphKey:
        """Copy a live batch into the graph that is returned; what is left of the padded
        count becomes padding, which reads position 0 and writes the scratch page.

        Enqueued on the current stream; the host does not wait.
        """
        tokens, key = forward_batch.num_tokens, self._key_for(forward_batch)
        size = key.tokens
        # One launch: until the graph is launched, the device waits for the host.
        parts = []
        for name in _TOKEN_FIELDS:
            parts.append(getattr(forward_batch, name))
            if tokens < size:
                parts.append(self._padding[: size - tokens])
        if key.is_whole:
            parts += [getattr(forward_batch, name) for name in _ROW_FIELDS]
        torch.cat(parts, out=self._words[key])
        static = self.static_draft_hidden_states
        if static is not None:
            assert forward_batch.spec_info is not None
            states = forward_batch.spec_info.hidden_states
            assert states is not None
            static[:tokens].copy_(states)
            static[tokens:size].zero_()
        return key

    def _replay_stack(
        self,
        key: GraphKey,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
    ) -> StackOutput:
        """A `Stack`, given the graph; `replay_prepare` copied what it reads."""
        tokens, graph = forward_batch.num_tokens, self._graphs[key]
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
        """Whether the next replay may overwrite it."""
        address = hidden.untyped_storage().data_ptr()
        return any(
            address == part.untyped_storage().data_ptr()
            for part in (outputs.hidden, *outputs.aux)
        )

    # -- capture -------------------------------------------------------------------

    def _capture(self) -> None:
        """Largest first, so that the smaller graphs fit into its memory."""
        began = time.perf_counter()
        with torch.inference_mode():
            for tokens in reversed(self._sizes):
                self._capture_graph(GraphKey(tokens=tokens, is_whole=False))
            if self._runner.attn_backend.capabilities.captures_prefill:
                with self._attention.captured():
                    for tokens in reversed(whole_token_counts(self._sizes)):
                        self._capture_graph(GraphKey(tokens=tokens, is_whole=True))
        logger.info(
            "Captured %d prefill graphs (up to %d tokens, %d segments) in %.1f s",
            len(self._graphs),
            self._sizes[-1],
            self.num_segments,
            time.perf_counter() - began,
        )

    def _capture_graph(self, key: GraphKey) -> None:
        words = len(_TOKEN_FIELDS) * key.tokens
        if key.is_whole:
            words += sum(_ROW_FIELDS.values())
        self._words[key] = self._inputs[:words]
        for _ in range(WARM_UPS):
            self._run_forward(key)
        with capture_graph(self._backend) as graph:
            graph.outputs = self._run_forward(key)
        graph.own(self._inputs, *self._attention.buffers())
        graph.own(graph.outputs.hidden, *graph.outputs.aux)
        if self.static_draft_hidden_states is not None:
            graph.own(self.static_draft_hidden_states)
        self._graphs[key] = graph

    def _run_forward(self, key: GraphKey) -> StackOutput:
        """The stack over the static batch; its output stays until the next replay."""
        tokens = key.tokens
        static = self._static_batch(tokens)
        with forward_context(self._capture_context):
            output: StackOutput = self._runner.model.forward_stack(
                static.input_ids, static.positions, static
            )
        if key.is_whole:
            # Few tokens: each graph may keep its own.
            return output
        if self._outputs is None:
            largest = self._sizes[-1]
            self._outputs = StackOutput(
                output.hidden.new_zeros(largest, output.hidden.shape[1]),
                [part.new_zeros(largest, part.shape[1]) for part in output.aux],
            )
        kept = (self._outputs.hidden, *self._outputs.aux)
        for target, part in zip(kept, (output.hidden, *output.aux), strict=True):
            target[:tokens].copy_(part)
        return self._outputs

    def _static_batch(self, tokens: int) -> ForwardBatch:
        states = self.static_draft_hidden_states
        sizes = dict.fromkeys(_TOKEN_FIELDS, tokens) | _ROW_FIELDS
        parts = self._inputs[: sum(sizes.values())].split_with_sizes(
            list(sizes.values())
        )
        views: dict[str, Any] = dict(zip(sizes, parts, strict=True))
        # Nothing that is captured reads the others.
        unused = views["seq_lens"]
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            req_serial=unused,
            salt=unused,
            rids_int=unused,
            bootstrap_room_ids_int=unused,
            capture_hidden_mode=self._hidden_mode,
            spec_info=None
            if states is None
            else StaticSpecInput(hidden_states=states[:tokens]),
            **views,
        )
