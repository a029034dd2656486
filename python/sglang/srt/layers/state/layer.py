"""The base class of layers that fold tokens into a state: the counterpart of
`RadixAttention`."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from sglang.srt.forward.context import get_forward_context
from sglang.srt.layers.module import Module

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.state.forward import StateCommit, StateForward


class StateLayer(Module):
    """Folds the tokens of a forward into the states of their rows.

    Attributes:
        layer_id: layer of the pool.
        width, out_width: channels of a token in `packed` and in the result.
    """

    layer_id: int
    width: int
    out_width: int

    def packed_buffer(self, tokens: int) -> Tensor | None:
        """Return the buffer that the projection should write `packed` to, or None if
        any will do."""
        breaks = get_forward_context().attention_breaks
        return None if breaks is None else breaks.packed_buffer(self, tokens)

    def forward(self, packed: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """packed [T, width] -> [T, out_width]. `packed` may be overwritten."""
        context = get_forward_context()
        if context.attention_breaks is not None:
            return context.attention_breaks.fold(self, packed, forward_batch)
        assert context.state is not None, "this model has no state pool"
        return self.fold(packed, context.state)

    @abstractmethod
    def fold(self, packed: Tensor, state: StateForward) -> Tensor:
        """Run `forward` on live rows. A verification writes no states, but nodes."""

    @abstractmethod
    def commit(self, accepted: StateCommit) -> None:
        """Fold accepted nodes of the last verification into the states of their
        rows."""
