"""The functions of `flashinfer.sampling` that draft verification calls, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k_renorm_probs(probs: Tensor, top_k: Tensor | int) -> Tensor:
    """Keep only the `top_k` most probable tokens of each row, renormalized to sum to
    one.

    Args:
        probs: float [R, V].
        top_k: [R], or one value for all; values above V keep the whole row. Ties with
            the last kept token are all kept.
    """
    counts = _of_rows(top_k, probs).long().clamp(1, probs.shape[1])
    falling = probs.sort(dim=1, descending=True).values
    least = falling.gather(1, counts - 1)
    return _renormed(probs, probs >= least)


def top_p_renorm_probs(probs: Tensor, top_p: Tensor | float) -> Tensor:
    """Keep the fewest most probable tokens of each row whose sum is at least `top_p`,
    renormalized to sum to one.

    Args:
        probs: float [R, V].
        top_p: [R], or one value for all.
    """
    falling, order = probs.sort(dim=1, descending=True)
    before = falling.cumsum(dim=1) - falling
    stays = before < _of_rows(top_p, probs)
    stays[:, 0] = True
    return _renormed(probs, torch.zeros_like(stays).scatter(1, order, stays))


def _of_rows(value: Tensor | float, probs: Tensor) -> Tensor:
    """[R, 1]."""
    values = torch.as_tensor(value, device=probs.device)
    return values.reshape(-1, 1).expand(len(probs), 1)


def _renormed(probs: Tensor, stays: Tensor) -> Tensor:
    left = torch.where(stays, probs, 0)
    return left / left.sum(dim=1, keepdim=True)
