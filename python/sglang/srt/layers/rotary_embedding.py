"""Tables of rotary angles; the rotation itself is fused with the KV write."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from sglang.srt.configs.model_config import RopeConfig


def build_cos_sin_cache(config: RopeConfig, *, head_dim: int, rows: int) -> Tensor:
    """Angles of positions `0 .. rows - 1` (Su et al., 2021).

    Returns:
        float32 [rows, head_dim]: half of the columns cosines, then as many sines.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = _SCALINGS[config.rope_type](1.0 / config.theta**exponents, config)
    angles = torch.outer(torch.arange(rows, dtype=torch.float32), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@lru_cache(maxsize=8)
def _cached(
    theta: float,
    rope_type: str,
    scaling: tuple[tuple[str, float], ...],
    head_dim: int,
    rows: int,
    device: torch.device,
) -> Tensor:
    config = RopeConfig(theta=theta, rope_type=rope_type, scaling=dict(scaling))
    with torch.device("cpu"):
        cache = build_cos_sin_cache(config, head_dim=head_dim, rows=rows)
    return cache.to(device)


def shared_cos_sin_cache(config: RopeConfig, *, head_dim: int, rows: int) -> Tensor:
    """`build_cos_sin_cache` on the default device, one table for all layers (and
    models) of equal numbers.
    """
    return _cached(
        config.theta,
        config.rope_type,
        tuple(sorted(config.scaling.items())),
        head_dim,
        rows,
        torch.get_default_device(),
    )


def _scale_default(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    return inv_freq


def _scale_linear(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    return inv_freq / config.scaling["factor"]


def _scale_llama3(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1: low frequencies are divided by `factor`, with a smooth transition."""
    low, high = config.scaling["low_freq_factor"], config.scaling["high_freq_factor"]
    old_context = config.scaling["original_max_position_embeddings"]
    wavelen = 2 * math.pi / inv_freq
    slow = inv_freq / config.scaling["factor"]
    share = (old_context / wavelen - low) / (high - low)
    smooth = (1 - share) * slow + share * inv_freq
    scaled = torch.where(wavelen > old_context / low, slow, inv_freq)
    is_medium = (wavelen <= old_context / low) & (wavelen >= old_context / high)
    return torch.where(is_medium, smooth, scaled)


_SCALINGS = {
    "default": _scale_default,
    "linear": _scale_linear,
    "llama3": _scale_llama3,
}
