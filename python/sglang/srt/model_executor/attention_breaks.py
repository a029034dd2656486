"""Attention and recurrent state between the captured segments of a layer stack.

A segment ends by storing K and V. Attention itself then runs eagerly on the live batch
and writes to the next segment's input. Alternatively it is captured with the segments,
on the static batch. Knows buffers and views, but no graph sizes, and makes no choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.srt.forward.context import get_forward_context
from sglang.srt.forward.graph_capture import eager_break, is_capturing

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.state.layer import StateLayer


@dataclass(slots=True, kw_only=True)
class _Shared:
    """Buffers shared by all layers of one shape, which use them one after the other.

    Fields:
        layer: any layer of the shape.
        qkv: [max_tokens, qkv_width]; result of a segment.
        out: [max_tokens, Hq, v_head_dim]; input of the next segment.
        q, k, v, live_out: views of the live tokens, made once per forward.
    """

    layer: RadixAttention
    qkv: Tensor
    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    live_out: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedState:
    """The same for layers with a state.

    Fields:
        packed: [max_tokens, width]; out: [max_tokens, out_width].
    """

    packed: Tensor
    out: Tensor


class LiveAttention:
    """The `AttentionBreaks` of one model.

    It owns the buffers, outside the graphs' pool, so that no capture can reuse them
    while a break still holds them.

    Args:
        max_tokens: tokens of the largest graph.
    """

    def __init__(
        self,
        attn_backend: AttentionBackend,
        *,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._backend = attn_backend
        self._attend = attn_backend.attend
        self._max_tokens = max_tokens
        self._dtype = dtype
        self._device = device
        self._by_shape: dict[tuple[int, int, int], _Shared] = {}
        self._states: dict[tuple[int, int], _SharedState] = {}
        # None while nothing is replayed; a break then leaves `out` unchanged.
        self._live: ForwardBatch | None = None
        self._is_captured = False

    def buffers(self) -> list[Tensor]:
        """All buffers that segments read and write."""
        attention = self._by_shape.values()
        states = self._states.values()
        return [
            *(buffer for shared in attention for buffer in (shared.qkv, shared.out)),
            *(buffer for shared in states for buffer in (shared.packed, shared.out)),
        ]

    @contextmanager
    def on(self, live: ForwardBatch, *, padded: int) -> Iterator[None]:
        """Scope where breaks work on `live`, in a graph of `padded` tokens."""
        tokens = live.num_tokens
        for shared in self._by_shape.values():
            shared.q, shared.k, shared.v = shared.layer.split(shared.qkv[:tokens])
            shared.live_out = shared.out[:tokens]
        self.clear_padding(tokens, padded)
        self._live = live
        try:
            yield
        finally:
            self._live = None

    def clear_padding(self, tokens: int, padded: int) -> None:
        """Zero the outputs of padding before a replay. Every layer's attention writes
        only live tokens, so the zeros stay."""
        if tokens < padded:
            outs = [shared.out for shared in self._by_shape.values()]
            outs += [shared.out for shared in self._states.values()]
            for out in outs:
                out[tokens:padded].zero_()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Scope where attention is captured with its segment, not as a break."""
        self._is_captured = True
        try:
            yield
        finally:
            self._is_captured = False

    # -- AttentionBreaks, while the stack is captured --------------------------------

    def qkv_buffer(self, layer: RadixAttention, tokens: int) -> Tensor:
        return self._shared(layer).qkv[:tokens]

    def attend(
        self, layer: RadixAttention, qkv: Tensor, forward_batch: ForwardBatch
    ) -> Tensor:
        shared = self._shared(layer)
        tokens = qkv.shape[0]
        own = shared.qkv[:tokens]
        if qkv.data_ptr() != own.data_ptr():
            own.copy_(qkv)
        q, k, v = layer.split(own)
        out = shared.out[:tokens]
        self._backend.store(q, k, v, layer, forward_batch)
        if self._is_captured:
            self._attend(q, k, v, layer, forward_batch, out=out)
        else:
            eager_break(partial(self._break, layer, shared))
        return out.view(tokens, -1)

    def _break(self, layer: RadixAttention, shared: _Shared) -> None:
        live = self._live
        if live is not None:
            self._attend(shared.q, shared.k, shared.v, layer, live, out=shared.live_out)

    def packed_buffer(self, layer: StateLayer, tokens: int) -> Tensor:
        return self._state_buffers(layer).packed[:tokens]

    def fold(
        self, layer: StateLayer, packed: Tensor, forward_batch: ForwardBatch
    ) -> Tensor:
        shared = self._state_buffers(layer)
        tokens = packed.shape[0]
        own = shared.packed[:tokens]
        if packed.data_ptr() != own.data_ptr():
            own.copy_(packed)
        eager_break(partial(self._fold_live, layer, shared))
        return shared.out[:tokens]

    def _fold_live(self, layer: StateLayer, shared: _SharedState) -> None:
        live = self._live
        if live is not None:
            state, tokens = get_forward_context().state, live.num_tokens
            assert state is not None
            shared.out[:tokens].copy_(layer.fold(shared.packed[:tokens], state))

    def _state_buffers(self, layer: StateLayer) -> _SharedState:
        shape = (layer.width, layer.out_width)
        shared = self._states.get(shape)
        if shared is None:
            _require_warm("state")
            options: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
            shared = self._states[shape] = _SharedState(
                packed=torch.zeros(self._max_tokens, layer.width, **options),
                out=torch.zeros(self._max_tokens, layer.out_width, **options),
            )
        return shared

    def _shared(self, layer: RadixAttention) -> _Shared:
        shape = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        shared = self._by_shape.get(shape)
        if shared is None:
            shared = self._by_shape[shape] = self._allocate(layer)
        return shared

    def _allocate(self, layer: RadixAttention) -> _Shared:
        _require_warm("attention")
        options: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
        tokens, heads = self._max_tokens, layer.num_heads
        qkv = torch.zeros(tokens, layer.qkv_width, **options)
        out = torch.zeros(tokens, heads, layer.v_head_dim, **options)
        q, k, v = layer.split(qkv)
        return _Shared(layer=layer, qkv=qkv, out=out, q=q, k=k, v=v, live_out=out)


def _require_warm(what: str) -> None:
    if is_capturing():
        raise RuntimeError(
            f"{what} buffers would be allocated inside a capture; run the stack once "
            "before it"
        )
