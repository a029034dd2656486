"""Attention on CUDA with the Triton kernels of `layers.ops.attention`.

Imported only if Triton is installed; `attention_registry` sees to that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.configs import latent_form
from sglang.srt.forward.batch import ForwardMode
from sglang.srt.layers.attention.compared_bytes import ComparedBytes
from sglang.srt.layers.attention.paged_backend import (
    AttendedRows,
    AttentionPlan,
    PagedAttnBackend,
    store_kv,
)
from sglang.srt.layers.latent_attention import ExpandedAttention
from sglang.srt.layers.ops.attention.decode.launch import (
    DecodeWorkspace,
    decode_attention,
    decode_workspace,
)
from sglang.srt.layers.ops.attention.decode_hopper.launch import serves_decode
from sglang.srt.layers.ops.attention.extend.launch import extend_attention
from sglang.srt.layers.ops.attention.extend_dense.launch import reads_new
from sglang.srt.layers.ops.attention.extend_hopper.launch import MIN_TOKENS
from sglang.srt.layers.ops.attention.extend_hopper.launch import serves as hopper_serves
from sglang.srt.layers.ops.attention.extend_hopper.plan import (
    ExtendPlan,
    gathered_elements,
    plan_extend,
    plan_size,
)
from sglang.srt.layers.ops.attention.extend_split.launch import (
    ExtendWorkspace,
    extend_workspace,
)
from sglang.srt.layers.ops.attention.latent.launch import (
    latent_decode_attention,
    latent_extend_attention,
)
from sglang.srt.layers.ops.attention.latent_expanded.launch import (
    Expansion,
    PrefixBlock,
    expanded_extend_attention,
    prefix_blocks,
)
from sglang.srt.layers.ops.attention.latent_expanded.table import serves
from sglang.srt.layers.ops.latent_store.op import latent_store
from sglang.srt.layers.ops.rope.op import rope_store_kv
from sglang.srt.mem_cache.kv_dtype import kv_dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from kv_canary.attended import AttendedBytes
    from sglang.srt.configs.attention_backends import AttentionBackendCapabilities
    from sglang.srt.configs.latent_config import LatentConfig
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.attention.base_attn_backend import CallWrapper, StackWrapper
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool

logger = logging.getLogger(__name__)


class TritonPlan(AttentionPlan):
    """Adds the parts of long prefills, made when a layer first needs them."""

    _backend: TritonAttnBackend

    @cached_property
    def prefix(self) -> tuple[PrefixBlock, ...]:
        """Cached latents that the forward expands."""
        view, lens = self.view, self.batch.lens_cpu
        assert view.page_table is not None and lens is not None
        return prefix_blocks(
            view.page_table,
            row_index=view.row_index,
            prefix_lens=self.batch.prefix_lens,
            lens=lens.prefix_lens,
            page_size=view.page_size,
            most=latent_form.PREFIX_BLOCK,
        )

    @cached_property
    def extend(self) -> ExtendPlan | None:
        """The plan of `extend_hopper`, or None if it does not serve this forward."""
        batch, lens = self.batch, self.batch.lens_cpu
        is_prefill = batch.forward_mode is ForwardMode.EXTEND
        if not self._backend.plans_prefills or not is_prefill or lens is None:
            return None
        if sum(lens.extend_lens) < MIN_TOKENS:
            return None
        size = plan_size(lens.prefix_lens, lens.extend_lens)
        if size.elements > gathered_elements(self._backend.max_context):
            return None
        view = self.view
        assert view.page_table is not None and batch.qo_indptr is not None
        return plan_extend(
            view.page_table,
            row_index=view.row_index,
            page_size=view.page_size,
            qo_indptr=batch.qo_indptr,
            prefix_lens=batch.prefix_lens,
            new_slots=batch.out_cache_loc if self._backend.has_8_bits else None,
            size=size,
        )


class TritonAttnBackend(PagedAttnBackend):
    """Attention with Triton kernels. All layers and graphs share one workspace of each
    kind, because forwards do not overlap."""

    name = "triton"
    store_op = staticmethod(rope_store_kv)
    latent_store_op = staticmethod(latent_store)
    decode_op: Callable[..., None] = staticmethod(decode_attention)
    extend_op: Callable[..., None] = staticmethod(extend_attention)
    expanded_op: Callable[..., None] = staticmethod(expanded_extend_attention)

    def __init__(self, *, req_to_token_pool: ReqToTokenPool, kv_pool: KVCache) -> None:
        super().__init__(req_to_token_pool=req_to_token_pool, kv_pool=kv_pool)
        self._rows = req_to_token_pool.size
        self.max_context = req_to_token_pool.context_len
        self._device = req_to_token_pool.device
        k_cache, v_cache = kv_pool.get_kv_buffer(kv_pool.layers[0])
        self._head_dim, self._v_head_dim = k_cache.shape[-1], v_cache.shape[-1]
        if self._is_latent:
            self.decode_op = latent_decode_attention
            self.extend_op = latent_extend_attention
        self._compared: ComparedBytes | None = None
        # By (query heads, KV heads, head size). Layers of one shape share.
        self._workspaces: dict[tuple[int, int, int], DecodeWorkspace] = {}
        # All layers have one head size.
        self._extend_workspace: ExtendWorkspace | None = None
        # New tokens attend what is stored of them.
        self.has_8_bits = kv_pool.dtype.itemsize == 1
        if self.has_8_bits and self._is_latent:
            logger.warning(
                "--kv-cache-dtype %s: long prefills attend latents without expanding "
                "them, which is slower than with auto",
                kv_dtype_name(kv_pool.dtype),
            )
        # What queries have then is not known here; float32 takes the slower kernels.
        dtype = torch.bfloat16 if self.has_8_bits else kv_pool.dtype
        heads: dict[str, Any] = {"head_dim": self._head_dim, "dtype": dtype}
        heads["device"] = k_cache.device
        self.plans_prefills = not self._is_latent and hopper_serves(**heads)
        self._decodes_on_hopper = serves_decode(**heads)

    @property
    def capabilities(self) -> AttentionBackendCapabilities:
        """On a GPU only the Hopper kernel compares bytes; in the other kernel that
        costs more than the separate pass of the read check. On the CPU kernels are
        interpreted."""
        known = super().capabilities
        is_cheap = self._decodes_on_hopper or torch.device(self._device).type != "cuda"
        return replace(known, compares_bytes=is_cheap and not self._is_latent)

    def compare_bytes(self, groups: Mapping[str, AttendedBytes]) -> None:
        if self._is_latent:
            super().compare_bytes(groups)
        self._compared = ComparedBytes(self._kv_pool, groups)

    def with_table(self, page_table: Tensor, *, page_size: int) -> TritonAttnBackend:
        other = super().with_table(page_table, page_size=page_size)
        assert isinstance(other, TritonAttnBackend)
        other._rows = len(page_table)
        other._workspaces = {}
        return other

    def wrap_calls(
        self, on_store: CallWrapper, on_attend: CallWrapper, on_stack: StackWrapper
    ) -> bool:
        self.expanded_op = on_attend(self.expanded_op)
        return super().wrap_calls(on_store, on_attend, on_stack)

    def expands(self, latent: LatentConfig, forward_batch: ForwardBatch) -> bool:
        lens = forward_batch.lens_cpu
        is_prefill = forward_batch.forward_mode is ForwardMode.EXTEND
        if self.has_8_bits or not is_prefill or lens is None:
            return False
        sizes = {"nope": latent.nope_dim, "value": latent.value_dim}
        is_served = serves(rope=latent.rope_dim, **sizes)
        return is_served and latent_form.pays_to_expand(lens, latent)

    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> None:
        # A captured store works on a one-row batch. If that does not read the new k,
        # neither does any live batch that fits, with at most as many tokens and no
        # fewer rows.
        store_kv(
            self.store_op,
            q,
            k,
            v,
            layer,
            forward_batch,
            kv_pool=self._kv_pool,
            out_cache_loc=self._group_cache_loc(layer, forward_batch),
            update_k=self._reads_new(forward_batch),
        )

    def _decode_options(
        self, layer: RadixAttention, forward_batch: ForwardBatch, rows: AttendedRows
    ) -> dict[str, Any]:
        if self._is_latent:
            return {"workspace": self._shared_workspace()}
        options: dict[str, Any] = {"workspace": self._workspace(layer)}
        if self._compared is not None:
            options["compared"] = self._compared.of_layer(
                layer.layer_id, forward_batch, rows
            )
        return options

    def _workspace(self, layer: RadixAttention) -> DecodeWorkspace:
        shape = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        workspace = self._workspaces.get(shape)
        if workspace is None:
            workspace = self._workspaces[shape] = decode_workspace(
                rows=self._rows,
                q_heads=layer.num_heads,
                kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                max_context=self.max_context,
                device=self._device,
            )
        return workspace

    def _extend_call(
        self, k: Tensor, v: Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> tuple[Callable[..., None], dict[str, Any]]:
        if isinstance(layer, ExpandedAttention):
            expansion = Expansion(
                weight=layer.weight,
                new_slots=forward_batch.out_cache_loc,
                prefix=self._get_triton_plan(forward_batch).prefix,
            )
            return self.expanded_op, {"expansion": expansion}
        options: dict[str, Any] = {"workspace": self._shared_workspace()}
        reads_new = self._reads_new(forward_batch)
        if reads_new:
            # The store left k as the pool holds it.
            options = {"k_new": k, "v_new": v}
        is_half = k.dtype.itemsize == 2
        if (reads_new or (self.has_8_bits and is_half)) and (
            layer.window <= 0 and layer.logit_cap == 0
        ):
            options["plan"] = self._get_triton_plan(forward_batch).extend
        return self.extend_op, options

    def _make_plan(self, forward_batch: ForwardBatch) -> TritonPlan:
        return TritonPlan(self, forward_batch)

    def _get_triton_plan(self, forward_batch: ForwardBatch) -> TritonPlan:
        plan = self._get_plan(forward_batch)
        assert isinstance(plan, TritonPlan)
        return plan

    def _shared_workspace(self) -> ExtendWorkspace:
        """Return the workspace of extends and of decodes over latents."""
        if self._extend_workspace is None:
            self._extend_workspace = extend_workspace(
                head_dim=self._v_head_dim,
                max_context=self.max_context,
                device=self._device,
            )
        return self._extend_workspace

    def _reads_new(self, forward_batch: ForwardBatch) -> bool:
        is_decode = forward_batch.forward_mode.is_decode
        if self._is_latent or self.has_8_bits or is_decode:
            return False
        return reads_new(
            tokens=forward_batch.num_tokens,
            rows=forward_batch.batch_size,
            head_dim=self._head_dim,
            dtype=self._kv_pool.dtype,
            has_tree=forward_batch.tree_mask is not None,
        )
