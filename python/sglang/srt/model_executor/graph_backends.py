"""Backends of `graph_capture`: CUDA graphs, and a recorder that needs no device."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang.srt.model_executor.graph_capture import Segment

# Ops that copy to the host or make shapes depend on data: illegal in a CUDA graph.
_HOST_SYNCS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::masked_select",
        "aten::is_nonzero",
        "aten::equal",
        "aten::unique_dim",
        "aten::_unique2",
        "aten::repeat_interleave.Tensor",
    }
)


# Other threads may go on using the device during a capture: NCCL's watchdog does.
_CAPTURE_MODE = "thread_local"


class GraphMemoryPool:
    """Memory that captured graphs share, and the stream that they are captured on.

    The allocators forget a pool when the last graph in it is gone, and then refuse its
    handle; a graph of our own keeps it known. One stream for all of them: the matrix
    library keeps a workspace of tens of megabytes for every stream that it has seen.
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
    """A collection may destroy events, graphs or page-locked memory of something else,
    which is illegal during a capture and spoils it."""
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
        """`pool`: memory of the segments; None: a new one."""
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
            # `_close` leaves them; where the capture did not begin, this block does.
            self._entered = entered.pop_all()

    def end(self) -> Segment:
        graph = self._close()
        torch.cuda.current_stream().wait_stream(self._stream)
        # What a break needs must exist: capturing only recorded it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedOp:
    """One operator call with the tensors that it read and made."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]

    def replay(self) -> None:
        """Call again; results go to the captured addresses."""
        fresh = _tensors(self.function(*self.args, **self.kwargs))
        for captured, new in zip(self.outputs, fresh, strict=True):
            if captured is not new and captured.data_ptr() != new.data_ptr():
                captured.copy_(new)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSegment:
    ops: Sequence[_RecordedOp]

    def replay(self) -> None:
        for op in self.ops:
            op.replay()


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[_RecordedOp] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.name()
        if name in _HOST_SYNCS or _is_boolean_index(name, args):
            raise RuntimeError(
                f"{name} inside a captured segment waits for the device; move it into "
                "an eager break or compute it on the device"
            )
        result = func(*args, **(kwargs or {}))
        self.ops.append(
            _RecordedOp(
                function=func,
                args=args,
                kwargs=kwargs or {},
                outputs=_tensors(result),
            )
        )
        return result


class RecordingBackend:
    """Records operator calls and replays them on the captured addresses.

    The behaviour of a CUDA graph without a device: same order, same addresses, Python
    values frozen at capture, host synchronisation refused. For tests.
    """

    def __init__(self) -> None:
        self._recorder: _Recorder | None = None

    def begin(self) -> None:
        self._recorder = _Recorder()
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> Segment:
        return RecordedSegment(ops=tuple(self._close().ops))

    def abandon(self) -> None:
        self._close()

    def _close(self) -> _Recorder:
        recorder = self._recorder
        assert recorder is not None
        recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._recorder = None
        return recorder


def _is_boolean_index(name: str, args: tuple[Any, ...]) -> bool:
    """`x[mask]`: the shape of the result depends on the data."""
    if name != "aten::index.Tensor":
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf))
