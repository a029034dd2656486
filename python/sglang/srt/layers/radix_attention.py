"""The attention layer that models call: hands q, k and v to the backend of the
forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang.srt.forward.context import get_forward_context
from sglang.srt.layers.module import Module

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.ops.decoder_stack import StackInput, StackPlan, StackRun


class RadixAttention(Module):
    """Attention over the KV pool.

    Args:
        layer_id: layer of the pool.
        scaling: factor on the scores.
        sliding_window: positions up to a token's own that it attends, its own included,
            or None for all.
        logit_cap: scores become cap * tanh(score / cap); 0 disables it.
        sinks: [num_heads], float32 or the dtype of the model, or None: logits in the
            denominator of the softmax that have no value.
        cos_sin_cache: float32 [positions, rotary channels], or None without rotation.
        q_norm, k_norm: per-head norms before the rotation (Qwen3), or None.

    Attributes:
        v_head_dim: channels of a head's value and result.
        qkv_width: channels per token in `qkv`.
        is_latent: K and V are views of one latent (`LatentAttention`).
    """

    is_latent = False

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        layer_id: int,
        scaling: float,
        sliding_window: int | None = None,
        logit_cap: float = 0.0,
        sinks: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.layer_id = layer_id
        self.scaling = scaling
        self.window = -1 if sliding_window is None else sliding_window
        self.logit_cap = logit_cap
        self.sinks = sinks
        self.cos_sin_cache = cos_sin_cache
        self.q_norm = q_norm
        self.k_norm = k_norm
        self._sizes = [num_heads, num_kv_heads, num_kv_heads]
        self._num_rows = sum(self._sizes)
        self.v_head_dim = head_dim
        self.qkv_width = self._num_rows * head_dim

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv [T, qkv_width] into views of q, k and v, [T, heads, D] each."""
        heads = qkv.view(qkv.shape[0], self._num_rows, self.head_dim)
        q, k, v = torch.split_with_sizes(heads, self._sizes, dim=1)
        return q, k, v

    def qkv_buffer(self, tokens: int) -> Tensor | None:
        """Return the buffer that the projection should write `qkv` to, or None if any
        will do."""
        breaks = get_forward_context().attention_breaks
        return None if breaks is None else breaks.qkv_buffer(self, tokens)

    def forward(self, qkv: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """qkv [T, qkv_width], not rotated yet -> [T, Hq * v_head_dim].

        q and k inside `qkv` may be overwritten.
        """
        context = get_forward_context()
        if context.attention_breaks is not None:
            return context.attention_breaks.attend(self, qkv, forward_batch)
        return self.attend(*self.split(qkv), forward_batch)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, forward_batch: ForwardBatch
    ) -> Tensor:
        """Run `forward` on q, k and v as the backend takes them; attention is not
        captured."""
        tokens = q.shape[0]
        out = q.new_empty(tokens, self.num_heads, self.v_head_dim)
        backend = get_forward_context().attn_backend
        backend.forward(q, k, v, self, forward_batch, out=out)
        return out.view(tokens, -1)


def run_stack(
    plan: StackPlan, given: StackInput, forward_batch: ForwardBatch
) -> StackRun | None:
    """Call `run_stack` of this forward's backend. Also returns None if attention is not
    captured with its layers, or if a token has an adapter."""
    context = get_forward_context()
    if context.attention_breaks is not None or context.adapters is not None:
        return None
    return context.attn_backend.run_stack(plan, given, forward_batch)
