"""Paged attention with the C++ kernels, and with the torch references on any device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kv_canary.op import native_available
from sglang.srt.layers.attention.paged_backend import PagedAttnBackend
from sglang.srt.layers.ops.attention.op import (
    decode_attention,
    decode_attention_ref,
    extend_attention,
    extend_attention_ref,
)
from sglang.srt.layers.ops.decoder_stack import run_stack
from sglang.srt.layers.ops.latent_store.op import latent_store, latent_store_ref
from sglang.srt.layers.ops.rope.op import rope_store_kv, rope_store_kv_ref
from sglang.srt.mem_cache.kv_dtype import kv_dtype_name

if TYPE_CHECKING:
    from sglang.srt.configs.attention_backends import AttentionBackendCapabilities
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool

logger = logging.getLogger(__name__)


class CpuNativeAttnBackend(PagedAttnBackend):
    """The C++ kernels of `sgl-kernel`. Without them the ops fall back, logged once."""

    name = "cpu_native"

    def __init__(self, *, req_to_token_pool: ReqToTokenPool, kv_pool: KVCache) -> None:
        super().__init__(req_to_token_pool=req_to_token_pool, kv_pool=kv_pool)
        if kv_pool.dtype.itemsize == 1:
            logger.warning(
                "--kv-cache-dtype %s: attention on the CPU runs on its torch "
                "references, which are several times slower; --kv-cache-dtype auto "
                "runs the native kernels",
                kv_dtype_name(kv_pool.dtype),
            )
            self.store_op = rope_store_kv_ref
            if self._is_latent:
                self.store_op = latent_store_ref
            self.decode_op = decode_attention_ref
            self.extend_op = extend_attention_ref

    @property
    def capabilities(self) -> AttentionBackendCapabilities:
        known = super().capabilities
        # The references read lengths on the host.
        is_native = native_available() and self._kv_pool.dtype.itemsize > 1
        return replace(known, captures_prefill=is_native)

    store_op: Callable[..., None] = staticmethod(rope_store_kv)
    latent_store_op = staticmethod(latent_store)
    decode_op: Callable[..., None] = staticmethod(decode_attention)
    extend_op: Callable[..., None] = staticmethod(extend_attention)
    stack_op = staticmethod(run_stack)


class TorchNativeAttnBackend(PagedAttnBackend):
    """The torch references, on any device: slow, readable, the oracle for the
    others."""

    name = "torch_native"
    store_op = staticmethod(rope_store_kv_ref)
    latent_store_op = staticmethod(latent_store_ref)
    decode_op = staticmethod(decode_attention_ref)
    extend_op = staticmethod(extend_attention_ref)
