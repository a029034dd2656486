"""Chooses the form of attention over latents in a forward: absorbed or expanded.

In the absorbed form, every query is multiplied by its head's key projection and attends
latents. In the expanded form, every latent is multiplied by the projections of all
heads, and queries attend narrower keys and values. The choice depends only on lengths
and sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.configs.latent_config import LatentConfig
    from sglang.srt.forward.batch import HostLens

MIN_TOKENS = 1024
"""Below this many new tokens a forward is not expanded: it is bound by launches, which
CUDA graphs avoid for absorbed attention.
"""
MIN_GAIN = 1.0
"""Operations that the expanded form must save for each operation it spends."""
PREFIX_BLOCK = 8192
"""Maximum number of cached elements expanded at a time."""


def pays_to_expand(lens: HostLens, latent: LatentConfig) -> bool:
    """Whether a causal extend of these lengths is faster in the expanded form.

    It spends rank * (nope + value) multiplications for each cached element and head,
    and saves 2 * rank - nope - value for each pair of query and element: with
    DeepSeek's sizes it pays off from 171 queries per cached element. New elements are
    free: their expansion takes as much as the absorbed form takes for queries and
    results.
    """
    rows = list(zip(lens.prefix_lens, lens.extend_lens, strict=True))
    if sum(lens.extend_lens) < MIN_TOKENS:
        return False
    pairs = sum(new * prefix + new * (new + 1) // 2 for prefix, new in rows)
    projected = latent.nope_dim + latent.value_dim
    spent = sum(lens.prefix_lens) * latent.rank * projected
    return pairs * (2 * latent.rank - projected) > MIN_GAIN * spent
