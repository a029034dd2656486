"""Graphs made of captured segments and eager breaks, in one memory pool.

```
capture:   | segment 0 | break 0 | segment 1 | break 1 | ... | segment n |
replay:      launch      call      launch      call              launch
```
A backend captures the code between two breaks; a break is a Python callable that runs
at capture and again at every replay. All graph runners use this module. It knows
nothing of models, batches or attention.

Rules for breaks, checked where possible:
* a break writes its result in place, into memory that was allocated before it, because
the
  next segment has captured that address;
* a value that changes between replays must be a tensor, or be read from live state
inside
  the callable; a captured Python number would be stale.
The graph owns the tensors that it reads (`own`), so that no later capture can reuse
their memory. Work on a side stream is forked through `SideStream`. A segment cannot end
while one of its streams is still forked, so a break joins it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

# Argument types that a break must not capture by value.
_NUMBERS = (bool, int, float, complex)


class Segment(Protocol):
    def replay(self) -> None:
        """Run the captured work, on the captured addresses."""


class SegmentBackend(Protocol):
    """Captures one segment at a time; all segments share the backend's memory pool."""

    def begin(self) -> None:
        """Start to capture."""

    def end(self) -> Segment:
        """Stop, and return the captured segment."""

    def abandon(self) -> None:
        """Stop after an error; the captured work is lost."""


class RehearsalBackend:
    """Captures nothing: the code runs, and its segments do nothing when replayed."""

    def begin(self) -> None:
        pass

    def end(self) -> Segment:
        return self

    def abandon(self) -> None:
        pass

    def replay(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerBreak:
    """A call between two segments; owns its arguments."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]

    def replay(self) -> None:
        self.function(*self.arguments)


@dataclass(slots=True)
class BreakableGraph:
    """The result of a capture.

    Attributes:
        steps: segments and breaks in order; it begins and ends with a segment.
        owned: tensors that the segments read or write from outside the pool.
        outputs: result of the captured code, stored by the caller.
    """

    steps: list[Segment | EagerBreak] = field(default_factory=list)
    owned: list[torch.Tensor] = field(default_factory=list)
    outputs: Any = None
    num_replays: int = 0
    # The steps' bound calls, made at the first replay: with two steps per layer even an
    # attribute lookup counts.
    _calls: tuple[Callable[[], object], ...] = ()

    @property
    def num_breaks(self) -> int:
        return sum(isinstance(step, EagerBreak) for step in self.steps)

    def own(self, *tensors: torch.Tensor) -> None:
        """Keep tensors alive as long as the graph."""
        self.owned.extend(tensors)

    def replay(self) -> None:
        """Run segments and breaks in order."""
        if len(self._calls) != len(self.steps):
            self._calls = tuple(_bound(step) for step in self.steps)
        for call in self._calls:
            call()
        self.num_replays += 1


def _bound(step: Segment | EagerBreak) -> Callable[[], object]:
    if isinstance(step, EagerBreak) and not step.arguments:
        return step.function
    return step.replay


class Stream(Protocol):
    """A device stream as `SideStream` needs it."""

    def wait_stream(self, stream: Any) -> None: ...


class SideStream:
    """A stream beside the current one: `fork` work onto it, `join` it later.

    Args:
        stream: the stream itself.
        current: the stream that is forked from and joined to.
        entering: makes a stream the current one inside a `with` statement.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        current: Callable[[], Stream] = torch.cuda.current_stream,
        entering: Callable[[Any], AbstractContextManager[Any]] = torch.cuda.stream,
    ) -> None:
        self._stream = stream
        self._current = current
        self._entering = entering
        self._is_forked = False

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Run the body on the side stream, after all work of the current one."""
        self.follow()
        with self.resume():
            yield

    def follow(self) -> None:
        """Let the side stream go on after all work of the current one so far."""
        self._stream.wait_stream(self._current())
        self._is_forked = True
        if _active is not None and self not in _active.forked:
            _active.forked.append(self)

    def resume(self) -> AbstractContextManager[Any]:
        """Run the body on the side stream, alongside whatever the current stream got
        since the last `follow` or `fork`."""
        return self._entering(self._stream)

    def join(self) -> None:
        """Let the current stream wait for the side stream. Does nothing if the end of a
        captured segment already joined it; it is not part of the next segment."""
        if not self._is_forked:
            return
        self._current().wait_stream(self._stream)
        self._is_forked = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Capture:
    graph: BreakableGraph
    backend: SegmentBackend
    # Streams that the open segment has forked and may not have joined yet.
    forked: list[SideStream] = field(default_factory=list)

    def end_segment(self) -> Segment:
        for side in self.forked:
            side.join()
        self.forked.clear()
        return self.backend.end()


# One capture at a time in a process: a device has one capturing stream here.
_active: _Capture | None = None


def is_capturing() -> bool:
    return _active is not None


@contextmanager
def capture_graph(backend: SegmentBackend) -> Iterator[BreakableGraph]:
    """Capture the body of the `with` statement into the graph that it yields.

    Raises:
        RuntimeError: a capture is running already.
    """
    global _active
    if _active is not None:
        raise RuntimeError("a graph is being captured already: captures do not nest")
    graph = BreakableGraph()
    backend.begin()
    _active = capture = _Capture(graph=graph, backend=backend)
    try:
        yield graph
    except BaseException:
        backend.abandon()
        raise
    else:
        graph.steps.append(capture.end_segment())
    finally:
        _active = None


def eager_break(function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(*arguments)`; inside a capture it also becomes a break.

    Raises:
        TypeError: during a capture, an argument is a Python number, which would be
            stale at replay, or the call returned something, which the next segment
            would not see.
    """
    if _active is None:
        function(*arguments)
        return
    for i, argument in enumerate(arguments):
        if isinstance(argument, _NUMBERS):
            raise TypeError(
                f"argument {i} of the break {_name(function)} is the number "
                f"{argument!r}: it would be stale at replay; pass a tensor, or read "
                "live state inside"
            )
    graph, backend = _active.graph, _active.backend
    graph.steps.append(_active.end_segment())
    try:
        returned: object = function(*arguments)  # type: ignore[func-returns-value]
    finally:
        backend.begin()
    if returned is not None:
        raise TypeError(
            f"the break {_name(function)} returned {type(returned).__name__}: write "
            "into a tensor allocated before the break instead"
        )
    graph.steps.append(EagerBreak(function=function, arguments=arguments))


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
