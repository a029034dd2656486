"""On which stream the launches around a model run, and in which order with the model's.

```
CPU                         before | model            | after
small step                  before | model            | after
large step         main            | model            | after
                   side     before |                  |
prefill graph      main            | graph            |
                   side            |   due, before    |
with a stack       main            | stack  | head    |
                   side     ...             | after   |
```
The columns of one line are in stream order; the side stream is joined at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.forward.graph_capture import SideStream

BESIDE_FROM_TOKENS = 16
"""New tokens from which on verify and head run beside the model: below, fork and join
cost more than they hide."""

LAUNCH_BEHIND_GRAPH = True
"""Whether a prefill graph is launched before the launch that precedes other models."""

TAIL_BESIDE_HEAD = True
"""Whether the tail write of a model with a stack runs beside the model's head. That of
a small plain decode step does not: there it costs more than it hides."""

if TYPE_CHECKING:
    Stack = Callable[..., Any]


class LaunchOrder:
    """The order of the launches around the forwards of one model.

    Args:
        device: of the records.
        precedes: whether the model must follow the launch before it: that fills new
            slots which the model writes, or checks states which the model overwrites.
        is_draft: whether the model is a draft.

    Attributes:
        side: the stream of launches beside the model; None on the CPU.
    """

    def __init__(self, device: torch.device, *, precedes: bool, is_draft: bool) -> None:
        self.side: SideStream | None = None
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            # With the device named the current stream is found in half the time.
            current = partial(torch.cuda.current_stream, stream.device_index)
            self.side = SideStream(stream, current=current)
        self._precedes = precedes
        self._is_draft = is_draft
        # The launch before the model, while it waits for the model's graph to start.
        self._behind: Callable[[], None] | None = None
        self._has_tail = False

    def may_run_behind(self, forward_batch: ForwardBatch) -> bool:
        """Whether the launch before the model, and what is due before it, may start
        after the model does."""
        may_overlap = (
            self.side is not None and not self._precedes and LAUNCH_BEHIND_GRAPH
        )
        return may_overlap and forward_batch.forward_mode is ForwardMode.EXTEND

    def before(
        self,
        forward_batch: ForwardBatch,
        launch: Callable[[], None],
        *,
        is_replayed: bool,
    ) -> None:
        """Run the launch before the model.

        Args:
            is_replayed: whether the model's stack is wrapped by `with_launch_behind`,
                inside a launch.
        """
        if self.side is None or self._precedes:
            launch()
        elif is_replayed and self.may_run_behind(forward_batch):
            self.side.follow()
            self._behind = launch
        elif forward_batch.num_tokens < BESIDE_FROM_TOKENS:
            launch()
        else:
            # Beside the model: it writes other slots than verify reads, and no records.
            with self.side.fork():
                launch()

    def with_launch_behind(self, stack: Stack) -> Stack:
        """Wrap a layer stack that replays a graph: the launch before the model comes
        when the graph has started, on the side stream, after what preceded the graph.
        The device does not wait for the host's part of it."""

        def run(*args: Any) -> Any:
            try:
                return stack(*args)
            finally:
                # Also where it failed: the check may know over what.
                behind, self._behind = self._behind, None
                if behind is not None and self.side is not None:
                    with self.side.resume():
                        behind()

        return run

    def with_tail_after(
        self, stack: Stack, tail: Callable[[ForwardBatch], None]
    ) -> Stack:
        """Wrap a model's layer stack (`StackedModel.forward_stack`): `tail`, the launch
        after the model, follows it, beside the model's head, which writes no KV; only
        where there is a side stream."""
        side, is_draft = self.side, self._is_draft
        if side is None or not TAIL_BESIDE_HEAD:
            return stack

        def run(input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Any:
            output = stack(input_ids, positions, batch)
            is_plain_decode = batch.forward_mode.is_decode and not is_draft
            if is_plain_decode and input_ids.shape[0] < BESIDE_FROM_TOKENS:
                return output
            with side.fork():
                tail(batch)
            self._has_tail = True
            return output

        return run

    def join(self) -> bool:
        """Wait for the side stream, in stream order, at the end of a model. Returns
        whether the launch after the model has run there."""
        if self.side is None:
            return False
        self.side.join()
        has_tail, self._has_tail = self._has_tail, False
        return has_tail

    def forget(self) -> None:
        """Drop a launch that waits for a graph which never started."""
        self._behind = None
