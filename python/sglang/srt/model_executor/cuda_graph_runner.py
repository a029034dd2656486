"""Decode and verify forwards as graphs: one per padded batch size."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    HostLens,
)
from sglang.srt.model_executor.graph_backends import CudaGraphBackend, GraphMemoryPool
from sglang.srt.model_executor.graph_capture import (
    BreakableGraph,
    SegmentBackend,
    capture_graph,
)
from sglang.srt.model_executor.input_buffers import GraphInputBuffers, GraphInputs

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

WARM_UPS = 2
NO_LIVE_ROWS = HostLens(prefix_lens=[], extend_lens=[])

# All graph runners of a process capture into one memory pool: they never run at once.
_global_graph_memory_pool: GraphMemoryPool | None = None


def get_global_graph_memory_pool() -> GraphMemoryPool | None:
    return _global_graph_memory_pool


def set_global_graph_memory_pool(pool: GraphMemoryPool) -> None:
    global _global_graph_memory_pool
    _global_graph_memory_pool = pool


def cuda_graph_backend() -> SegmentBackend:
    """Captures into the pool that all runners share."""
    backend = CudaGraphBackend(get_global_graph_memory_pool())
    set_global_graph_memory_pool(backend.pool)
    return backend


class CudaGraphRunner:
    """Args:
    model_runner: whose forwards are captured.
    inputs: what they read; None: plain decode.
    batch_sizes: padded sizes, each a graph.
    make_backend: captures segments; tests pass a recorder that needs no GPU.

    The hidden-state mode is fixed here, so nothing is ever captured again at run time.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        *,
        batch_sizes: list[int],
        inputs: GraphInputs | None = None,
        capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
        make_backend: Callable[[], SegmentBackend] = cuda_graph_backend,
    ) -> None:
        self._runner = model_runner
        self._sizes = sorted(batch_sizes)
        self._hidden_mode = capture_hidden_mode
        self._make_backend = make_backend
        self._inputs = inputs or GraphInputBuffers(
            max_rows=self._sizes[-1], device=model_runner.device
        )
        self._graphs: dict[int, BreakableGraph] = {}
        self._capture()

    @property
    def tokens_per_row(self) -> int:
        """New tokens of each row."""
        return self._inputs.tokens_per_row

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self._graphs.values())

    def can_run(self, forward_batch: ForwardBatch) -> bool:
        return (
            forward_batch.forward_mode is self._inputs.forward_mode
            and forward_batch.num_rows <= self._sizes[-1]
            and forward_batch.capture_hidden_mode is self._hidden_mode
        )

    def replay(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run the smallest graph that fits.

        The result is views of the graph's memory, valid until the next replay on this
        stream: whatever must outlive it is copied by work enqueued before that.
        """
        rows = forward_batch.num_rows
        size = self._sizes[bisect.bisect_left(self._sizes, rows)]
        self._inputs.populate(forward_batch)
        static = self._inputs.static_batch(
            size, self._hidden_mode, lens_cpu=forward_batch.lens_cpu
        )
        self._runner.attn_backend.init_replay(static)
        graph = self._graphs[size]
        graph.replay()
        output: LogitsProcessorOutput = graph.outputs
        hidden, tokens = output.hidden_states, rows * self.tokens_per_row
        return LogitsProcessorOutput(
            next_token_logits=output.next_token_logits[:tokens],
            hidden_states=None if hidden is None else hidden[:tokens],
            input_logprobs={},
        )

    def _capture(self) -> None:
        """Largest first, so that the smaller graphs fit into its memory."""
        began = time.perf_counter()
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture_graph(size)
        logger.info(
            "Captured %d %s graphs (batch sizes up to %d) in %.1f s",
            len(self._sizes),
            self._inputs.forward_mode.name.lower(),
            self._sizes[-1],
            time.perf_counter() - began,
        )

    def _capture_graph(self, size: int) -> BreakableGraph:
        static = self._inputs.static_batch(
            size, self._hidden_mode, lens_cpu=NO_LIVE_ROWS
        )
        self._runner.attn_backend.init_capture(static, size)
        for _ in range(WARM_UPS):
            self.run_once(static)
        with torch.inference_mode(), capture_graph(self._make_backend()) as graph:
            graph.outputs = self.run_once(static)
        return graph

    def run_once(self, static: ForwardBatch) -> LogitsProcessorOutput:
        """One model forward over the static batch, inside the scope of its step."""
        return self._runner.run_model(static)
