"""Decode and verify forwards as graphs: one per padded batch size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from sglang.srt.forward.batch import CaptureHiddenMode, ForwardBatch, HostLens
from sglang.srt.forward.graph_backends import CudaGraphBackend, GraphMemoryPool
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.graph_set import GraphSet, WarmUp, log_level
from sglang.srt.model_executor.input_buffers import GraphInputBuffers, GraphInputs

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.forward.graph_capture import BreakableGraph, SegmentBackend
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.models.registry import CausalLM
    from sglang.srt.models.stack import Stack

WARM_UPS = 2
NO_LIVE_ROWS = HostLens(prefix_lens=[], extend_lens=[])

# All graph runners of a process capture into one memory pool, as they never run at
# once.
_global_graph_memory_pool: GraphMemoryPool | None = None


def get_global_graph_memory_pool() -> GraphMemoryPool | None:
    return _global_graph_memory_pool


def set_global_graph_memory_pool(pool: GraphMemoryPool) -> None:
    global _global_graph_memory_pool
    _global_graph_memory_pool = pool


def cuda_graph_backend() -> SegmentBackend:
    """Return a backend that captures into the shared pool of all runners."""
    backend = CudaGraphBackend(get_global_graph_memory_pool())
    set_global_graph_memory_pool(backend.pool)
    return backend


class CapturedRunner(Protocol):
    """Runs the forwards to capture: `ModelRunner`."""

    device: str
    dtype: torch.dtype
    model: CausalLM
    model_config: ModelConfig
    attn_backend: AttentionBackend

    def run_model(
        self,
        forward_batch: ForwardBatch,
        *,
        step: int = 0,
        attn_backend: AttentionBackend | None = None,
        stack: Stack | None = None,
    ) -> LogitsProcessorOutput: ...


class CudaGraphRunner:
    """Replays forwards with a fixed number of tokens per request.

    Args:
        model_runner: runs the forwards to capture.
        inputs: their static inputs. Defaults to those of plain decode.
        batch_sizes: padded sizes, one graph each.
        capture_hidden_mode: mode of these forwards, fixed here so that nothing has to
            be captured again at run time.
        make_backend: captures segments; tests pass a recorder that needs no GPU.

    Attributes:
        tokens_per_row: new tokens per request.
    """

    def __init__(
        self,
        model_runner: CapturedRunner,
        *,
        batch_sizes: list[int],
        inputs: GraphInputs | None = None,
        capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
        make_backend: Callable[[], SegmentBackend] = cuda_graph_backend,
    ) -> None:
        self._runner = model_runner
        self._inputs = inputs or GraphInputBuffers(
            max_rows=max(batch_sizes), device=model_runner.device
        )
        self.tokens_per_row = self._inputs.tokens_per_row
        self.capture_hidden_mode = capture_hidden_mode
        self._backend = make_backend()
        self._static_batches: dict[int, ForwardBatch] = {}
        self._warm_up = WarmUp(WARM_UPS, model_runner.model)
        self._graphs = self._capture(batch_sizes)

    @property
    def num_replays(self) -> int:
        return self._graphs.num_replays

    def reset_counts(self) -> None:
        """Forget the replays."""
        self._graphs.reset_counts()

    def can_run(self, forward_batch: ForwardBatch) -> bool:
        return (
            forward_batch.forward_mode is self._inputs.forward_mode
            and forward_batch.batch_size <= self._graphs.largest
            and forward_batch.capture_hidden_mode is self.capture_hidden_mode
        )

    def replay(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run the smallest graph that fits.

        The result is a set of views of the graph's memory, valid until the next replay
        on this stream. Work enqueued before that must copy whatever should outlive it.
        """
        bs, lens_cpu = forward_batch.batch_size, forward_batch.lens_cpu
        size, graph = self._graphs.serving(bs)
        self._inputs.populate(forward_batch)
        static = self._static_batches[size]
        if lens_cpu is not None:
            static = self._inputs.static_batch(
                size, self.capture_hidden_mode, lens_cpu=lens_cpu
            )
        self._runner.attn_backend.init_replay(static)
        graph.replay()
        output: LogitsProcessorOutput = graph.outputs
        hidden, last = output.hidden_states, output.last_hidden
        tokens = bs * self.tokens_per_row
        return LogitsProcessorOutput(
            next_token_logits=output.next_token_logits[:tokens],
            hidden_states=None if hidden is None else hidden[:tokens],
            last_hidden=None if last is None else last[:tokens],
            input_logprobs={},
            head=output.head.narrow(tokens),
        )

    def _capture(self, batch_sizes: list[int]) -> GraphSet[int]:
        return GraphSet(
            self._inputs.forward_mode.name.lower(),
            batch_sizes,
            size_of=int,
            capture=self._capture_graph,
            level=log_level(self._backend),
        )

    def _capture_graph(self, size: int) -> BreakableGraph:
        run = self._prepare(size)
        return self._warm_up.capture(run, self._backend)

    def _prepare(self, size: int) -> Callable[[], LogitsProcessorOutput]:
        """Return the forward to capture."""
        static = self._inputs.static_batch(
            size, self.capture_hidden_mode, lens_cpu=NO_LIVE_ROWS
        )
        self._static_batches[size] = static
        self._runner.attn_backend.init_capture(static, size)
        return partial(self.run_once, static)

    def run_once(self, static: ForwardBatch) -> LogitsProcessorOutput:
        """Run a model forward over the static batch, inside the scope of its step."""
        return self._runner.run_model(static)


class DecodeGraphs(NamedTuple):
    """The graphs of decode forwards over the same static inputs, if there are any: of
    batches without adapters, and with."""

    plain: CudaGraphRunner | None
    adapted: CudaGraphRunner | None
