"""Minimum bytes of a decode step and minimum flops of a prefill, for any supported
model.

Weights are counted from the loaded model, with only the experts that the tokens choose;
a sliding layer reads and multiplies only its window, and a layer with a recurrent
state reads and writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.experts import Experts

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


@dataclass(kw_only=True)
class ChosenExperts:
    """Numbers of distinct experts in each call of a layer's experts."""

    counts: list[int] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return sum(self.counts) / len(self.counts) if self.counts else 0.0


@contextmanager
def counting_experts() -> Iterator[ChosenExperts]:
    """Count the experts of every forward launched in this scope outside of graphs."""
    chosen, forward = ChosenExperts(), Experts.forward

    def counted(self: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        chosen.counts.append(len(ids.unique()))
        return forward(self, x, weights, ids)

    Experts.forward = counted  # type: ignore[method-assign]
    try:
        yield chosen
    finally:
        Experts.forward = forward  # type: ignore[method-assign]


class ModelFloors:
    """Minimum work of a loaded model's forwards.

    Attributes:
        slot_bytes: KV bytes of one token in the layers that attend everything;
            window_bytes: the same in sliding layers.
        state_bytes: bytes of one request's recurrent state.
    """

    def __init__(
        self, model: nn.Module, config: ModelConfig, *, state_bytes: int = 0
    ) -> None:
        self._config = config
        experts = [m for m in model.modules() if isinstance(m, Experts)]
        of_experts = {id(p) for module in experts for p in module.parameters()}
        tied = config.tie_word_embeddings
        plain = {
            name: parameter
            for name, parameter in model.named_parameters()
            if id(parameter) not in of_experts and (tied or name != _EMBEDDING)
        }
        self._plain_bytes = sum(p.nbytes for p in plain.values())
        self._expert_bytes = sum(module.bytes_of_one for module in experts)
        is_head = {_HEAD, _EMBEDDING}
        self._weights = sum(
            p.numel() for n, p in plain.items() if p.dim() == 2 and n not in is_head
        )
        itemsize = next(model.parameters()).itemsize
        if config.moe is not None:
            self._weights += config.moe.top_k * self._expert_bytes // itemsize
        halves = 1 if config.latent is not None else 2
        of_layer = halves * config.num_kv_heads * config.head_dim * itemsize
        self._windows = [config.layer_window(i) for i in config.attention_layers]
        full = self._windows.count(None)
        self.slot_bytes = full * of_layer
        self.window_bytes = (len(self._windows) - full) * of_layer
        self.state_bytes = state_bytes

    def decode_bytes(self, *, rows: int, context: float, experts: float) -> float:
        """Return the bytes that a decode step reads, and of states also writes, with
        `experts` chosen by a layer's tokens.
        """
        window = min(context, self._config.sliding_window or 0)
        kv = context * self.slot_bytes + window * self.window_bytes
        of_row = kv + 2 * self.state_bytes
        return self._plain_bytes + experts * self._expert_bytes + rows * of_row

    def prefill_flops(self, length: int) -> float:
        """Return the flops of one prompt: all tokens' products, attention, states, one
        token's head.
        """
        config = self._config
        channels = 2 * config.head_dim
        if config.latent is not None:
            # Multiplied out, as a prompt may be: fewer flops than the absorbed form.
            channels = config.latent.query_dim + config.latent.value_dim
        pairs = sum(attended_pairs(length, window) for window in self._windows)
        attention = 2.0 * config.num_heads * channels * pairs
        head = 2.0 * config.hidden_size * config.vocab_size
        products = 2.0 * self._weights * length
        return products + attention + self._state_flops() * length + head

    def _state_flops(self) -> float:
        """Flops of a token that meets its matrix three times in every layer with one:
        what it holds, what it gains, what it answers.
        """
        state = self._config.state
        if state is None or state.delta is None:
            return 0.0
        matrix = state.delta.heads * state.delta.d_k * state.delta.d_v
        return 6.0 * matrix * len(state.layers)

    def kv_share(self, *, tokens: int, window_slots: int) -> float:
        """Return KV bytes in use relative to a pool whose layers keep every token."""
        used = tokens * self.slot_bytes + window_slots * self.window_bytes
        return used / (tokens * (self.slot_bytes + self.window_bytes))


def attended_pairs(length: int, window: int | None) -> int:
    """Return the number of attended query-key pairs of one prompt."""
    short = length if window is None else min(length, window)
    return short * (short + 1) // 2 + (length - short) * short
