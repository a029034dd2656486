"""The backend of `graph_capture` on a GPU: CUDA graphs in a shared memory pool."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.forward.graph_capture import Segment

# Other threads may keep using the device during a capture; NCCL's watchdog does.
_CAPTURE_MODE = "thread_local"


class GraphMemoryPool:
    """Memory shared by captured graphs, and the stream they are captured on.

    The allocators forget a pool once its last graph is gone, and then refuse its
    handle, so an extra graph keeps it alive. All captures use one stream, because the
    matrix library keeps a workspace of tens of megabytes for every stream it has seen.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.handle: Any = torch.cuda.graph_pool_handle()
        self._keeper = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            self._keeper, pool=self.handle, capture_error_mode=_CAPTURE_MODE
        ):
            torch.zeros(1, device="cuda")


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Scope without garbage collection. A collection may destroy events, graphs or
    page-locked memory of other objects, which is illegal during a capture and breaks
    it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaGraphBackend:
    """Segments are CUDA graphs in one memory pool, captured on one side stream."""

    def __init__(self, pool: GraphMemoryPool | None = None) -> None:
        """`pool`: memory of the segments; defaults to a new pool."""
        self.pool = GraphMemoryPool() if pool is None else pool
        self._stream = self.pool.stream
        self._graph: torch.cuda.CUDAGraph | None = None
        self._entered = contextlib.ExitStack()

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with contextlib.ExitStack() as entered:
            entered.enter_context(_without_garbage_collection())
            entered.enter_context(torch.cuda.stream(self._stream))
            graph.capture_begin(pool=self.pool.handle, capture_error_mode=_CAPTURE_MODE)
            self._graph = graph
            # `_close` leaves them; if the capture did not begin, this block does.
            self._entered = entered.pop_all()

    def end(self) -> Segment:
        graph = self._close()
        torch.cuda.current_stream().wait_stream(self._stream)
        # Capturing only recorded the work, so run it: a break reads its results.
        graph.replay()
        return graph

    def abandon(self) -> None:
        self._close()

    def _close(self) -> torch.cuda.CUDAGraph:
        graph = self._graph
        assert graph is not None
        try:
            graph.capture_end()
        finally:
            self._entered.close()
            self._graph = None
        return graph
