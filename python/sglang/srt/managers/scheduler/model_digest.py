"""A digest of loaded models: of everything besides tokens that their KV depends on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.model_executor.model_runner import ModelRunner

DIGEST_BYTES = 16
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def model_digest(runners: Sequence[ModelRunner], layout: bytes) -> bytes:
    """Return a digest of the models' weights on this rank and their configurations,
    16 bytes. Reads all weights once.

    Args:
        layout: digest of what is kept of them.
    """
    digest = blake2b(layout, digest_size=DIGEST_BYTES)
    for runner in runners:
        config = runner.model_config.raw
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
        state = runner.model.state_dict(keep_vars=True)
        for name in sorted(state):
            tensor = state[name].detach()
            about = (name, tuple(tensor.shape), str(tensor.dtype))
            digest.update(repr(about).encode())
            digest.update(_row_sums(tensor).cpu().numpy().tobytes())
    return digest.digest()


def _row_sums(tensor: Tensor) -> Tensor:
    """Return the sum of each row's bits as integers, int64 [rows]."""
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor[None]
    words = rows.contiguous().view(_WORDS[tensor.element_size()])
    return words.sum(dim=1, dtype=torch.int64)
