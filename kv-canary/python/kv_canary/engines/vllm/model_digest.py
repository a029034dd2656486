"""What KV depends on besides tokens: the model, its weights, the form of its KV."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from kv_canary.layer_sums import place_keys

_PER_DIMENSION = 8
"""Values that are sampled of a dimension of a weight."""


def model_digest(runner: Any) -> bytes:
    """Return 32 bytes. Waits for the device.

    Weights are sampled, at the same places in each process: another revision of a model
    differs in most of its values.
    """
    config = runner.vllm_config
    model, parallel = config.model_config, config.parallel_config
    named = [
        model.dtype,
        config.cache_config.cache_dtype,
        config.cache_config.block_size,
        model.quantization,
        parallel.tensor_parallel_size,
    ]
    digest = hashlib.sha256(repr([str(part) for part in named]).encode())
    names, sums = [], []
    for name, weight in runner.model.named_parameters():
        names.append(name)
        sums.append(_sampled(weight.detach()))
    digest.update(repr(names).encode())
    digest.update(torch.stack(sums).cpu().numpy().tobytes())
    return digest.digest()


def _sampled(weight: Tensor) -> Tensor:
    """Return a sum over sampled values, int64 []."""
    places = tuple(
        slice(None, None, max(1, size // _PER_DIMENSION)) for size in weight.shape
    )
    values = weight[places].contiguous().flatten().view(torch.uint8).long()
    return (values * place_keys(len(values)).to(values.device)).sum()
