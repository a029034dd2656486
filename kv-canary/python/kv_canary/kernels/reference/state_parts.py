"""Sums of runs of states in torch: the oracle of the Triton version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kv_canary.head_sums import mix32
from kv_canary.state_parts import Turn

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.state_parts import StateParts


def sum_states(
    slots: Tensor, groups: Tensor, turns: Tensor, parts: StateParts, found: Tensor
) -> None:
    """See `launches.sum_states`."""
    found.zero_()
    for group, of_group in enumerate(parts.words):
        is_own = groups == group
        for part, words in enumerate(of_group):
            sums, wild = _sum_part(
                words,
                slots * is_own,
                torch.where(is_own, turns, Turn.NOTHING),
                parts.runs[group][part],
                parts.exponents[group][part],
            )
            found[0, :, part] += sums
            found[1, :, part] += wild


def _sum_part(
    words: Tensor, slots: Tensor, turns: Tensor, run: int, exponents: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return the sums [N] of the runs of states, and how many of their words have a
    value that is not finite.

    Args:
        words: int32 [slots, count], of which slots [N] are summed.
    """
    count = words.shape[1]
    begin = turns.clamp(min=0) % -(-count // run) * run
    length = torch.where(turns == Turn.WHOLE, count, run)
    length = torch.where(turns == Turn.NOTHING, 0, length)
    # On the CPU this waits for nobody.
    is_short = turns.is_cpu and not bool((turns == Turn.WHOLE).any())
    step = torch.arange(run if is_short else count, device=words.device)
    place = begin[:, None] + step
    inside = (step < length[:, None]) & (place < count)
    place = place.clamp(max=count - 1)
    word = words[slots[:, None], place]
    sums = (word.long() * (mix32(place) | 1) * inside).sum(dim=1)
    wild = torch.zeros_like(inside)
    for exponent in filter(None, exponents):
        wild |= word & exponent == exponent
    return sums, (wild & inside).sum(dim=1)
