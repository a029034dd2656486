"""Attention backends, by their `--attention-backend` name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch.nn import Module

from sglang.srt.configs.attention_backends import (
    KV_8_BITS,
    LATENT,
    LOGIT_CAP,
    SINKS,
    WINDOWED_TREES,
    AttentionNeed,
    check_needs,
)
from sglang.srt.layers.attention.cpu_backends import (
    CpuNativeAttnBackend,
    TorchNativeAttnBackend,
)
from sglang.srt.layers.radix_attention import RadixAttention

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool


def _flashinfer() -> Callable[..., AttentionBackend]:
    # FlashInfer is part of the extra `cuda`, and large.
    try:
        from sglang.srt.layers.attention.flashinfer_backend import (
            FlashInferAttnBackend,
        )
    except ImportError as error:
        raise ValueError(
            f"--attention-backend flashinfer cannot be imported ({error}); install "
            "the extra: pip install 'sglang-canary[flashinfer]'"
        ) from error
    return FlashInferAttnBackend


def _triton() -> Callable[..., AttentionBackend]:
    # Triton is an extra; a CPU installation does not have it.
    try:
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    except ImportError as error:
        raise ValueError(
            f"--attention-backend triton cannot be imported ({error}); install the "
            "extra: pip install 'sglang-canary[cuda]'"
        ) from error
    return TritonAttnBackend


_BACKENDS: dict[str, Callable[[], Callable[..., AttentionBackend]]] = {
    CpuNativeAttnBackend.name: lambda: CpuNativeAttnBackend,
    TorchNativeAttnBackend.name: lambda: TorchNativeAttnBackend,
    "triton": _triton,
    "flashinfer": _flashinfer,
}


def attention_needs(
    layers: Iterable[Module],
    *,
    has_trees: bool,
    kv_dtype: torch.dtype | None = None,
) -> list[AttentionNeed]:
    """Return what the attention layers among a model's modules need from a backend.

    Args:
        has_trees: whether the model verifies draft trees.
        kv_dtype: dtype of stored KV; None means the model's.
    """
    attention = [layer for layer in layers if isinstance(layer, RadixAttention)]
    found = {
        KV_8_BITS: kv_dtype is not None and kv_dtype.itemsize == 1,
        LATENT: any(layer.is_latent for layer in attention),
        SINKS: any(layer.sinks is not None for layer in attention),
        LOGIT_CAP: any(layer.logit_cap > 0 for layer in attention),
        WINDOWED_TREES: has_trees and any(layer.window > 0 for layer in attention),
    }
    return [need for need, is_needed in found.items() if is_needed]


def create_attention_backend(
    name: str,
    *,
    req_to_token_pool: ReqToTokenPool,
    kv_pool: KVCache,
    needs: Iterable[AttentionNeed] = (),
) -> AttentionBackend:
    """Create the backend `name`. Argument checks have made sure that it exists.

    Args:
        needs: what the model needs, from `attention_needs`.

    Raises:
        ValueError: the backend does not serve these needs, or a package that it needs
            is not installed.
    """
    check_needs(name, needs, device=torch.device(req_to_token_pool.device).type)
    return _BACKENDS[name]()(req_to_token_pool=req_to_token_pool, kv_pool=kv_pool)
