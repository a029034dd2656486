"""The attention backend of the forward in progress, and how attention is captured.

A plain module global is safe, because a process runs one forward at a time, on one
thread. Entering twice is an error, so a forgotten exit cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.forward.adapter_tiles import AdapterTiles
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.state.forward import StateForward
    from sglang.srt.layers.state.layer import StateLayer


class AttentionBreaks(Protocol):
    """Takes attention out of a layer stack while it is captured."""

    def qkv_buffer(self, layer: RadixAttention, tokens: int) -> Tensor:
        """[tokens, qkv_width]: where `layer` should write its q, k and v."""

    def attend(
        self, layer: RadixAttention, qkv: Tensor, forward_batch: ForwardBatch
    ) -> Tensor:
        """Like `RadixAttention.forward`; `forward_batch` is the static batch."""

    def packed_buffer(self, layer: StateLayer, tokens: int) -> Tensor:
        """[tokens, width]: where `layer` should write its input."""

    def fold(
        self, layer: StateLayer, packed: Tensor, forward_batch: ForwardBatch
    ) -> Tensor:
        """Like `StateLayer.forward`; `forward_batch` is the static batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """State of the forward in progress that layers read.

    Fields:
        attn_backend: backend that runs attention.
        attention_breaks: set while the stack is captured without its attention.
        state: recurrent states, if the model has any.
        adapters: tokens with an adapter, or None if no token has one.
    """

    attn_backend: AttentionBackend
    attention_breaks: AttentionBreaks | None = None
    state: StateForward | None = None
    adapters: AdapterTiles | None = None


_current: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` current; forwards do not nest."""
    global _current
    if _current is not None:
        raise RuntimeError("a forward is already running: forwards do not nest")
    _current = context
    try:
        yield
    finally:
        _current = None


def get_forward_context() -> ForwardContext:
    if _current is None:
        raise RuntimeError("no forward is running: enter forward_context first")
    return _current
