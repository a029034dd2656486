"""Latent attention as described in `config.json` (DeepSeek-V2, 2024, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.configs.rope_config import RopeConfig, yarn_mscale

if TYPE_CHECKING:
    from sglang.srt.utils.checked_values import ConfigValues

MAX_WIDTH = 1024
_CHANNELS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Numbers of channels in latent attention.

    Fields:
        rank: channels of the compressed latent, which is the key and value of all
            heads.
        rope_dim: channels of the rotated key next to it, and of a query's rotated part.
        nope_dim: channels of a query's other part, before it is projected to the
            latent.
        value_dim: channels of a head's result.
        query_rank: channels of the compressed query, or None if queries are not
            compressed.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None

    @property
    def width(self) -> int:
        """Number of channels stored per token and layer."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Number of channels of a head's query after the projection."""
        return self.nope_dim + self.rope_dim

    def num_weights(self, *, hidden_size: int, num_heads: int) -> int:
        """Number of weights in the matrices of a layer's attention."""
        queries = num_heads * self.query_dim
        if self.query_rank is None:
            total = hidden_size * queries
        else:
            total = self.query_rank * (hidden_size + queries)
        total += hidden_size * self.width
        total += self.rank * num_heads * (self.nope_dim + self.value_dim)
        return total + hidden_size * num_heads * self.value_dim

    def attention_scale(self, rope: RopeConfig) -> float:
        """Scale factor of the scores. YaRN's `mscale_all_dim` multiplies q and k."""
        mscale = rope.scaling.get("mscale_all_dim", 0.0)
        factor = yarn_mscale(rope.scaling["factor"], mscale) if mscale else 1.0
        return float(self.query_dim**-0.5 * factor * factor)


def read_latent_config(values: ConfigValues) -> LatentConfig | None:
    """Return the latents described by `values`, or None if the model has keys and
    values.

    Raises:
        ValueError: a value is missing or not allowed; names the key.
    """
    rank = values.get("kv_lora_rank")
    if rank is None:
        return None
    rope_dim = values.get("qk_rope_head_dim")
    for name, size in (("kv_lora_rank", rank), ("qk_rope_head_dim", rope_dim)):
        if size % _CHANNELS:
            raise values.wrong(name, f"must be a multiple of {_CHANNELS}")
    if rank + rope_dim > MAX_WIDTH:
        raise values.wrong(
            "kv_lora_rank",
            f"and qk_rope_head_dim, {rope_dim}, must be at most {MAX_WIDTH} together",
        )
    if values.get("sliding_window") is not None:
        raise values.error("sliding_window", "is not supported beside kv_lora_rank")
    return LatentConfig(
        rank=rank,
        rope_dim=rope_dim,
        nope_dim=values.get("qk_nope_head_dim"),
        value_dim=values.get("v_head_dim"),
        query_rank=values.get("q_lora_rank"),
    )
