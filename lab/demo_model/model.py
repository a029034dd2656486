"""The demo model in plain torch, for training and as a reference: a Llama decoder with
transformers' parameter names, so that its state dict is the checkpoint.

Knows the architecture; refuses to know data, optimisers and files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.demo_model.paths import ENDOFTEXT_ID, IM_END_ID

INIT_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Sizes of the model. The intermediate size keeps the bf16 weights at 22.4 MB, so
    that the draft heads still fit into the 33 MB that the package may carry."""

    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 704
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def to_transformers(self) -> dict[str, object]:
        """Return the content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": INIT_STD,
            "use_cache": True,
            "bos_token_id": ENDOFTEXT_ID,
            "eos_token_id": [ENDOFTEXT_ID, IM_END_ID],
            "pad_token_id": ENDOFTEXT_ID,
            "torch_dtype": "bfloat16",
        }


def rope_tables(config: DemoConfig, length: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, fp32 [length, head_dim]; a head's halves share the angles."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(
        torch.arange(length, dtype=torch.float32), config.rope_theta**-half
    )
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [B, heads, T, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean of squares in fp32."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention over the whole window; no cache."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, -1, self.head_dim)
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    """One decoder layer; dropout acts on what the branches add to the stream."""

    def __init__(self, config: DemoConfig, *, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps=eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        branch: Tensor = self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return x + branch


class Decoder(nn.Module):
    """Embedding, layers and final norm: `model` in transformers."""

    def __init__(self, config: DemoConfig, *, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, dropout=dropout) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.dropout(self.embed_tokens(input_ids))
        for layer in self.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.norm(x)
        return normed


class DemoModel(nn.Module):
    """The language model; the head is the transposed embedding.

    `forward` takes input_ids int64 [B, T] with T up to max_position_embeddings and
    returns logits [B, T, vocab_size] in the dtype of the weights (or of autocast).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DemoConfig, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, dropout=dropout)
        cos, sin = rope_tables(config, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._init)
        # Branches add up over the depth, so their last matrices start smaller.
        scale = 1.0 / math.sqrt(2 * config.num_hidden_layers)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.data.mul_(scale)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=INIT_STD)

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        hidden = self.model(input_ids, self.cos[:length], self.sin[:length])
        return F.linear(hidden, self.model.embed_tokens.weight)

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean next-token loss in nats over windows int64 [B, T + 1]."""
        logits = self(windows[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def parameter_count(model: nn.Module) -> int:
    """Count the trained scalars, the tied embedding once."""
    return sum(weight.numel() for weight in model.parameters())
