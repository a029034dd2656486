"""Values of earlier steps, for faults that use one of them instead of today's."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

T = TypeVar("T")
_kept: dict[str, Any] = {}


def earlier(place: str, value: T) -> T:
    """Keep `value`, and return what this place got before. A tensor of another shape
    cannot be mistaken for it, so then `value` is returned.
    """
    before = _kept.get(place, value)
    _kept[place] = value.clone() if isinstance(value, torch.Tensor) else value
    if isinstance(value, torch.Tensor) and (
        not isinstance(before, torch.Tensor) or before.shape != value.shape
    ):
        return value
    return before  # type: ignore[no-any-return]
