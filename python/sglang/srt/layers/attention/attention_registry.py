"""Attention backends by the name that `--attention-backend` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.configs.attention_backends import refuse_fa3
from sglang.srt.layers.attention.paged_backend import (
    CpuNativeAttnBackend,
    TorchNativeAttnBackend,
)

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool


def _flashinfer() -> Callable[..., AttentionBackend]:
    # A part of the extra `cuda`, and large.
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
    # Triton is an extra: a CPU installation does not have it.
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
    "fa3": refuse_fa3,
}


def create_attention_backend(
    name: str, *, req_to_token_pool: ReqToTokenPool, kv_pool: KVCache
) -> AttentionBackend:
    """The backend `name`, which argument checks have made sure to be in the table.

    Raises:
        ValueError: a package that it needs is not installed.
    """
    return _BACKENDS[name]()(req_to_token_pool=req_to_token_pool, kv_pool=kv_pool)
