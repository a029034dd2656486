"""Attention on the CPU: the native kernels, or their torch references.

Both read `req_to_token` itself as the page table (every page_size-th column is the
first slot of a page), so a step needs no metadata of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.ops.attention import (
    decode_attention,
    decode_attention_ref,
    extend_attention,
    extend_attention_ref,
)
from sglang.srt.layers.ops.rope import rope_store_kv, rope_store_kv_ref
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, KVReadView

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool


class PagedCpuAttnBackend(AttentionBackend):
    """Common part of the CPU backends; they differ in the ops they call."""

    decode_op = staticmethod(decode_attention)
    extend_op = staticmethod(extend_attention)
    store_op = staticmethod(rope_store_kv)

    def __init__(self, *, req_to_token_pool: ReqToTokenPool, kv_pool: KVCache) -> None:
        self._kv_pool = kv_pool
        self._page_size = kv_pool.page_size
        self._page_table = req_to_token_pool.req_to_token[:, :: self._page_size]

    def init_eager(self, forward_batch: ForwardBatch) -> None:
        """Nothing to prepare: the tables are the pools' own."""

    def read_view(self, forward_batch: ForwardBatch) -> Sequence[KVReadView]:
        view = KVReadView(
            read_lens=forward_batch.seq_lens,
            page_size=self._page_size,
            page_table=self._page_table,
            row_index=forward_batch.req_pool_indices,
        )
        return (view,)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        *,
        out: Tensor,
    ) -> None:
        k_cache, v_cache = self._kv_pool.get_kv_buffer(layer.layer_id)
        q_norm, k_norm = layer.q_norm, layer.k_norm
        self.store_op(
            q,
            k,
            v,
            positions=forward_batch.positions,
            cos_sin_cache=layer.cos_sin_cache,
            k_cache=k_cache,
            v_cache=v_cache,
            out_cache_loc=forward_batch.out_cache_loc,
            q_norm_weight=None if q_norm is None else q_norm.weight,
            k_norm_weight=None if k_norm is None else k_norm.weight,
            eps=1e-6 if q_norm is None else q_norm.eps,
        )
        if forward_batch.forward_mode.is_decode:
            self.decode_op(
                q,
                k_cache,
                v_cache,
                page_table=self._page_table,
                row_index=forward_batch.req_pool_indices,
                read_lens=forward_batch.seq_lens,
                page_size=self._page_size,
                sm_scale=layer.scaling,
                window=layer.window,
                out=out,
            )
            return
        assert forward_batch.qo_indptr is not None
        self.extend_op(
            q,
            k_cache,
            v_cache,
            page_table=self._page_table,
            row_index=forward_batch.req_pool_indices,
            qo_indptr=forward_batch.qo_indptr,
            prefix_lens=forward_batch.prefix_lens,
            page_size=self._page_size,
            sm_scale=layer.scaling,
            window=layer.window,
            tree_mask=forward_batch.tree_mask,
            out=out,
        )


class CpuNativeAttnBackend(PagedCpuAttnBackend):
    """The C++ kernels of `sgl-kernel`; without them the ops fall back, logged once."""

    name = "cpu_native"


class TorchNativeAttnBackend(PagedCpuAttnBackend):
    """The torch references: slow, readable, and the oracle of the other backends."""

    name = "torch_native"
    decode_op = staticmethod(decode_attention_ref)
    extend_op = staticmethod(extend_attention_ref)
    store_op = staticmethod(rope_store_kv_ref)
