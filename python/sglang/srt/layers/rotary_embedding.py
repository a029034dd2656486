"""Tables of rotary angles; the rotation itself is fused with the KV write."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from sglang.srt.configs.rope_config import RopeConfig


def build_cos_sin_cache(config: RopeConfig, *, head_dim: int, rows: int) -> Tensor:
    """Compute the angles of positions `0 .. rows - 1` (Su et al., 2021).

    Returns:
        float32 [rows, rotated channels]: cosines in the first half of the columns,
        sines in the second, times the attention factor if the type has one.
    """
    dim = config.rotary_dim(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    inv_freq = _SCALINGS[config.rope_type](1.0 / config.theta**exponents, config)
    angles = torch.outer(torch.arange(rows, dtype=torch.float32), inv_freq)
    factor = config.scaling.get("attention_factor", 1.0)
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


@lru_cache(maxsize=8)
def _cached(
    theta: float,
    rope_type: str,
    scaling: tuple[tuple[str, float], ...],
    rotary_share: float,
    head_dim: int,
    rows: int,
    device: torch.device,
) -> Tensor:
    config = RopeConfig(
        theta=theta,
        rope_type=rope_type,
        scaling=dict(scaling),
        rotary_share=rotary_share,
    )
    with torch.device("cpu"):
        cache = build_cos_sin_cache(config, head_dim=head_dim, rows=rows)
    return cache.to(device)


def shared_cos_sin_cache(config: RopeConfig, *, head_dim: int, rows: int) -> Tensor:
    """`build_cos_sin_cache` on the default device. Layers (and models) with equal
    parameters share one table.
    """
    return _cached(
        config.theta,
        config.rope_type,
        tuple(sorted(config.scaling.items())),
        config.rotary_share,
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


def _scale_yarn(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """YaRN (Peng et al., 2023). Waves that turn less than `beta_slow` times within the
    old context are slowed by `factor`, waves that turn more than `beta_fast` times are
    kept, and a ramp lies between them."""
    numbers, half = config.scaling, len(inv_freq)

    def turns_to_index(turns: float) -> float:
        """Return the (fractional) frequency index at which a wave turns `turns`
        times."""
        length = numbers["original_max_position_embeddings"] / (2 * math.pi * turns)
        return half * math.log(length) / math.log(config.theta)

    first = turns_to_index(numbers["beta_fast"])
    last = turns_to_index(numbers["beta_slow"])
    if numbers["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    if first == last:
        last += 0.001  # avoids division by zero
    channel = torch.arange(half, dtype=torch.float32)
    slowed = ((channel - first) / (last - first)).clamp(0, 1)
    return inv_freq / numbers["factor"] * slowed + inv_freq * (1 - slowed)


_SCALINGS = {
    "default": _scale_default,
    "linear": _scale_linear,
    "llama3": _scale_llama3,
    "yarn": _scale_yarn,
}
