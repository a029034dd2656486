"""Which form attention over latents takes in a forward: absorbed or expanded.

Absorbed, every query is multiplied with its head's key projection and attends latents.
Expanded, every latent is multiplied with the projections of all heads, and queries
attend narrower keys and values. The choice is a rule on lengths and sizes alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.configs.latent_config import LatentConfig
    from sglang.srt.forward.batch import HostLens

MIN_TOKENS = 1024
"""New tokens below which a forward is not expanded: it is bound by launches, which CUDA
graphs spare where attention is absorbed."""
MIN_GAIN = 1.0
"""Operations that the expanded form must save for each that it spends."""
PREFIX_BLOCK = 8192
"""Most cached elements that are expanded at a time."""


def pays_to_expand(lens: HostLens, latent: LatentConfig) -> bool:
    """Whether a causal extend of these lengths is faster in the expanded form.

    It spends rank * (nope + value) multiplications for each cached element and head,
    and saves 2 * rank - nope - value for each pair of query and element: with the sizes
    of DeepSeek it pays from 171 queries for each cached element on. New elements cost
    nothing: what their expansion takes, the absorbed form takes for queries and
    results.
    """
    rows = list(zip(lens.prefix_lens, lens.extend_lens, strict=True))
    if sum(lens.extend_lens) < MIN_TOKENS:
        return False
    pairs = sum(new * prefix + new * (new + 1) // 2 for prefix, new in rows)
    projected = latent.nope_dim + latent.value_dim
    spent = sum(lens.prefix_lens) * latent.rank * projected
    return pairs * (2 * latent.rank - projected) > MIN_GAIN * spent
