"""The common part of all speculative inputs."""

from __future__ import annotations

from typing import Protocol

import torch


class SpecInput(Protocol):
    """State that a speculative worker hands to a forward; the worker chooses the
    shapes."""

    @property
    def hidden_states(self) -> torch.Tensor | None:
        """Hidden states [T, H_d] that the draft model reads, or None."""
