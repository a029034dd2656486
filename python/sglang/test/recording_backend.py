"""A graph backend that needs no device, for tests and benchmarks on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang.srt.forward.graph_capture import Segment

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
    values frozen at capture, host synchronisation refused.
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
