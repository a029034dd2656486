"""EAGLE and EAGLE3 draft heads in plain torch, with the parameter names of published
checkpoints, and their unrolling over a window.

Knows the architectures; refuses to know losses, data and files. Anchor n of a window
is the slot from which a chain starts: step j reads token n + 1 + j at rotary position
n + j and predicts token n + 2 + j. The first step reads the target's states of position
n, later ones the head's own output for the same anchor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.demo_model.chain_attention import chain_attention
from lab.demo_model.model import MLP, DemoConfig, rope_tables, rotate

INIT_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStep:
    """`hidden` [B, N, H] feeds the next step; `logits` [B, N, draft vocabulary]."""

    hidden: Tensor
    logits: Tensor


@dataclass(slots=True)
class ChainCache:
    """Keys and values [B, heads, N, head_dim] by step; entry 0 is the true prefix."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Norm(nn.Module):
    """x / rms(x) * weight, in the dtype of x."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, self.eps).to(x.dtype)


class HeadAttention(nn.Module):
    """Grouped-query attention of one chain step; keys and values go to the cache."""

    def __init__(self, config: DemoConfig, *, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.group = config.num_attention_heads // config.num_key_value_heads
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=False)
        self.k_proj = nn.Linear(input_size, kv_width, bias=False)
        self.v_proj = nn.Linear(input_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: ChainCache) -> Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, -1, self.head_dim)
        q = rotate(self.q_proj(x).view(shape).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(shape).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
        if not cache.pairs:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            cache.pairs.append((k, v))
        else:
            cache.pairs.append((k, v))
            out = chain_attention(q, *cache.pairs[0], cache.pairs[1:])
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class HeadLayer(nn.Module):
    """Attention and MLP of a head, which computes their input."""

    def __init__(self, config: DemoConfig, *, input_size: int) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, input_size=input_size)
        self.mlp = MLP(config)
        self.post_attention_layernorm = Norm(
            config.hidden_size, eps=config.rms_norm_eps
        )

    def attend(
        self, x: Tensor, stream: Tensor, rope: tuple[Tensor, Tensor], cache: ChainCache
    ) -> Tensor:
        stream = stream + self.self_attn(x, *rope, cache)
        result: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return result


class Midlayer(HeadLayer):
    """EAGLE3's layer: q, k and v read the normed token and the normed state."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__(config, input_size=2 * config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)


class DraftHead(nn.Module):
    """Base of both heads: holds the target's embedding [V, H], frozen, not exported."""

    cos: Tensor
    sin: Tensor
    embedding: Tensor

    def __init__(self, config: DemoConfig, embedding: Tensor) -> None:
        super().__init__()
        self.config = config
        cos, sin = rope_tables(config, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("embedding", embedding.clone(), persistent=False)

    def step(
        self,
        embeds: Tensor,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: ChainCache,
    ) -> HeadStep:
        """Run one chain step of all anchors: embeds [B, N, H], hidden [B, N, *]."""
        raise NotImplementedError

    def unroll(self, ids: Tensor, states: Tensor, *, steps: int) -> Iterator[HeadStep]:
        """Yield `steps` steps of N = L - steps anchors.

        ids int64 [B, L] are fed unchanged, states [B, L, *] are the target's.
        """
        count = ids.shape[1] - steps
        embeds = F.embedding(ids, self.embedding)
        hidden = states[:, :count]
        cache = ChainCache()
        for j in range(steps):
            rope = (self.cos[j : j + count], self.sin[j : j + count])
            tokens = embeds[:, j + 1 : j + 1 + count]
            result = self.step(tokens, hidden, rope, cache)
            hidden = result.hidden
            yield result

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)


class EagleHead(DraftHead):
    """EAGLE (Li et al., 2024): one decoder layer over fc(token, state).

    The target's own head follows. The state is the target's final, normalised one.
    """

    def __init__(self, config: DemoConfig, embedding: Tensor) -> None:
        super().__init__(config, embedding)
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(config, input_size=size)])
        self.reset_parameters()
        # The state passes; the token is added to it at the scale of a unit, which an
        # embedding of small numbers would take too many steps to reach.
        with torch.no_grad():
            scale = 1.0 / (size**0.5 * float(embedding.std()))
            self.fc.weight[:, :size].normal_(std=scale)
            self.fc.weight[:, size:] += torch.eye(size)

    def step(
        self,
        embeds: Tensor,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: ChainCache,
    ) -> HeadStep:
        layer = self.layers[0]
        assert isinstance(layer, HeadLayer)
        x = self.fc(torch.cat((embeds, hidden.to(embeds.dtype)), -1))
        stream = layer.attend(x, x, rope, cache)
        return HeadStep(hidden=stream, logits=F.linear(stream, self.embedding))


class Eagle3Head(DraftHead):
    """EAGLE-3 (Li et al., 2025): reads three layers of the target.

    Has a head of its own over `draft_ids` [draft vocabulary] and reads its own pre-norm
    state. Head and norm are initialised with the target's.
    """

    def __init__(
        self,
        config: DemoConfig,
        embedding: Tensor,
        draft_ids: Tensor,
        *,
        final_norm: Tensor,
    ) -> None:
        super().__init__(config, embedding)
        size = config.hidden_size
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = Norm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(draft_ids), bias=False)
        self.reset_parameters()
        with torch.no_grad():
            self.norm.weight.copy_(final_norm)
            self.lm_head.weight.copy_(embedding[draft_ids])

    def step(
        self,
        embeds: Tensor,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: ChainCache,
    ) -> HeadStep:
        layer = self.midlayer
        if hidden.shape[-1] != embeds.shape[-1]:
            hidden = self.fc(hidden.to(embeds.dtype))
        x = torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(hidden)), -1)
        stream = layer.attend(x, hidden, rope, cache)
        return HeadStep(hidden=stream, logits=self.lm_head(self.norm(stream)))
