"""Attention through FlashInfer: a plan on the host per forward, kernels per layer.

Knows batches and the pool; `flashinfer_wrappers` knows the library, `flashinfer_plan`
the arithmetic of a plan.

A plan needs the lengths on the host and the shape of a layer. The lengths come with the
batch; shapes show at the first forward, so the first layer of a shape plans for all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kv_canary.view import KVReadView
from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.layers.attention.base_attn_backend import (
    AttentionBackend,
    DraftDecodeBackend,
)
from sglang.srt.layers.attention.branch_lists import BranchLists
from sglang.srt.layers.attention.flashinfer_draft import FlashInferDraftDecode
from sglang.srt.layers.attention.flashinfer_plan import (
    HostPlan,
    LayerShape,
    host_plan,
)
from sglang.srt.layers.attention.flashinfer_wrappers import (
    PlanBuffers,
    Planned,
    ShapePlans,
    TreeMasks,
    Workspaces,
)
from sglang.srt.layers.attention.paged_backend import store_kv
from sglang.srt.layers.ops.attention.tables.page_indices import page_indices
from sglang.srt.layers.ops.attention.tables.tree_mask import pack_tree_mask
from sglang.srt.layers.ops.rope.op import rope_store_kv

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import BranchLayout
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool

logger = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
# Extends whose rows all have the same small number of new tokens.
_FIXED_WIDTH = frozenset({ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2})
# From this length on, prompts without a prefix are worth gathering (see `_dense_kv`).
_DENSE_TOKENS = 512
_HOPPER = 9


class FlashInferAttnBackend(AttentionBackend):
    """Attention through FlashInfer.

    Static buffers hold the offsets and page numbers of the forward that was set up
    last; their first rows are the batch's.

    Raises:
        ValueError: a dtype or head size that FlashInfer has no kernels for.
    """

    name = "flashinfer"

    def __init__(self, *, req_to_token_pool: ReqToTokenPool, kv_pool: KVCache) -> None:
        k_cache, _ = kv_pool.get_kv_buffer(kv_pool.layers[0])
        head_dim = k_cache.shape[-1]
        _check_supported(kv_pool.dtype, head_dim)
        rows, device = req_to_token_pool.size, req_to_token_pool.device
        self._page_size = kv_pool.page_size
        self._pool = req_to_token_pool
        self._page_table = req_to_token_pool.req_to_token[:, :: self._page_size]
        int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._buffers = PlanBuffers(
            kv_indptr=torch.zeros(rows + 1, **int32),
            # Rows may share pages, so the pool does not bound the sum of their pages.
            kv_indices=torch.zeros(rows * self._page_table.shape[1], **int32),
            last_page_lens=torch.ones(rows, **int32),
            qo_indptr=torch.zeros(rows + 1, **int32),
            page_size=self._page_size,
            dtype=kv_pool.dtype,
        )
        self._workspaces = Workspaces(device)
        # By nodes of a tree.
        self._masks: dict[int, TreeMasks] = {}
        self._kv_pool = kv_pool
        self._is_hopper = torch.cuda.get_device_capability(device)[0] == _HOPPER
        self._gathered = k_cache.new_empty(0)
        self._shapes: dict[LayerShape, ShapePlans] = {}
        # Of the forward that was set up last.
        self._host: HostPlan | None = None
        self._graph_rows = 0
        self._is_dense = False
        self._tree_masks: TreeMasks | None = None
        self._planned: dict[LayerShape, Planned] = {}

    def draft_decode(
        self, layout: BranchLayout, *, max_requests: int
    ) -> DraftDecodeBackend:
        lists = BranchLists(layout, max_requests=max_requests, pool=self._pool)
        return FlashInferDraftDecode(
            lists, kv_pool=self._kv_pool, workspaces=self._workspaces
        )

    def init_eager(self, forward_batch: ForwardBatch) -> None:
        self._begin(forward_batch, graph_rows=0)

    def init_capture(self, forward_batch: ForwardBatch, rows: int) -> None:
        """Let the forwards before the capture plan for the padded batch: the layout of
        a graph depends only on its rows, never on lengths."""
        self._begin(forward_batch, graph_rows=rows)

    def init_replay(self, forward_batch: ForwardBatch) -> None:
        bs = forward_batch.batch_size
        host = self._begin(forward_batch, graph_rows=bs)
        for shape, plans in self._shapes.items():
            if forward_batch.forward_mode.is_decode:
                is_captured = plans.has_decode(bs)
            else:
                is_captured = plans.has_fixed(
                    bs,
                    host.tokens_per_row,
                    is_tree=forward_batch.tree_mask is not None,
                )
            if is_captured:
                self._planned[shape] = self._plan(shape, forward_batch)

    def _begin(self, forward_batch: ForwardBatch, *, graph_rows: int) -> HostPlan:
        """Enqueue the copy of the offsets and the gathering of the pages."""
        host = host_plan(
            forward_batch,
            page_size=self._page_size,
            pin_memory=self._page_table.is_cuda,
        )
        indptr = self._buffers.indptr(host.rows)
        indptr.copy_(host.kv_indptr, non_blocking=True)
        page_indices(
            self._page_table,
            row_index=forward_batch.req_pool_indices,
            indptr=indptr,
            out=self._buffers.kv_indices,
            max_pages=host.max_pages,
            page_size=self._page_size,
        )
        self._host, self._graph_rows = host, graph_rows
        self._tree_masks = self._pack_masks(forward_batch, host)
        self._is_dense = (
            self._is_hopper
            and forward_batch.forward_mode is ForwardMode.EXTEND
            and self._tree_masks is None
            and not host.has_prefix
            and host.new_tokens >= _DENSE_TOKENS
        )
        self._planned = {}
        return host

    def _pack_masks(
        self, forward_batch: ForwardBatch, host: HostPlan
    ) -> TreeMasks | None:
        """Enqueue the packing of the trees' masks into static memory."""
        tree_mask = forward_batch.tree_mask
        if tree_mask is None:
            return None
        masks = self._static_masks(nodes=tree_mask.shape[1])
        if host.total_mask_bytes > len(masks.packed):
            raise RuntimeError(
                f"the masks of {host.rows} trees take {host.total_mask_bytes} bytes, "
                f"but their buffer has {len(masks.packed)}"
            )
        indptr = masks.indptr[: host.rows + 1]
        indptr.copy_(host.mask_indptr, non_blocking=True)
        pack_tree_mask(
            tree_mask,
            prefix_lens=forward_batch.prefix_lens,
            indptr=indptr,
            out=masks.packed,
            max_bytes=host.max_mask_bytes,
        )
        return masks

    def _static_masks(self, *, nodes: int) -> TreeMasks:
        """Return mask memory for `nodes` tree nodes per row over the longest prefix."""
        masks = self._masks.get(nodes)
        if masks is None:
            longest = self._page_table.shape[1] * self._page_size
            size = self._buffers.rows * -(-nodes * longest // 8)
            indptr = self._buffers.kv_indptr
            masks = self._masks[nodes] = TreeMasks(
                indptr=torch.zeros_like(indptr),
                packed=torch.zeros(size, dtype=torch.uint8, device=indptr.device),
            )
        return masks

    def read_view(self, forward_batch: ForwardBatch) -> Sequence[KVReadView]:
        view = KVReadView(
            read_lens=forward_batch.seq_lens,
            page_size=self._page_size,
            indptr=self._buffers.indptr(forward_batch.batch_size),
            page_indices=self._buffers.kv_indices,
        )
        return (view,)

    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> None:
        store_kv(rope_store_kv, q, k, v, layer, forward_batch, kv_pool=self._kv_pool)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        *,
        out: Tensor,
    ) -> None:
        caches = self._kv_pool.get_kv_buffer(layer.layer_id)
        shape = LayerShape.of(layer)
        planned = self._planned.get(shape)
        if planned is None:
            planned = self._planned[shape] = self._plan(shape, forward_batch)
        if self._is_dense:
            planned.run(q, *self._dense_kv(caches, forward_batch), out=out)
            return
        pages = tuple(cache.unflatten(0, (-1, self._page_size)) for cache in caches)
        planned.run(q, pages, out=out)

    def _dense_kv(
        self, caches: tuple[Tensor, Tensor], forward_batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Gather K and V of the new tokens from their slots.

        The Hopper kernels fetch whole tiles of K and V at once if tokens are
        contiguous, which saves more than the copy costs. The elements are the ones the
        view names, read from the pool. The memory is kept and only grows.
        """
        slots = forward_batch.out_cache_loc
        shape = (2, len(slots), *caches[0].shape[1:])
        if self._gathered.numel() < math.prod(shape):
            self._gathered = caches[0].new_empty(math.prod(shape))
        k, v = self._gathered[: math.prod(shape)].view(shape)
        for cache, gathered in zip(caches, (k, v), strict=True):
            torch.index_select(cache, 0, slots, out=gathered)
        return k, v

    def _plan(self, shape: LayerShape, forward_batch: ForwardBatch) -> Planned:
        plans = self._shapes.get(shape)
        if plans is None:
            logger.info(
                "FlashInfer plans for %s; on first use its kernels are compiled, which "
                "takes minutes",
                shape,
            )
            plans = self._shapes[shape] = ShapePlans(
                shape, buffers=self._buffers, workspaces=self._workspaces
            )
        host, masks = self._host, self._tree_masks
        assert host is not None
        if forward_batch.forward_mode.is_decode:
            return plans.plan_decode(
                host.kv_indptr, host.last_page_lens, graph_rows=self._graph_rows
            )
        if self._is_dense:
            return plans.plan_dense(host)
        if masks is None and forward_batch.forward_mode not in _FIXED_WIDTH:
            return plans.plan_extend(host)
        if masks is not None and shape.window > 0:
            raise ValueError(
                f"--attention-backend flashinfer: a sliding window of {shape.window} "
                "with a tree mask is not supported; drop the speculative top-k to 1"
            )
        return plans.plan_fixed(host, masks=masks)


def _check_supported(dtype: torch.dtype, head_dim: int) -> None:
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"--attention-backend flashinfer has no kernels for --dtype {name}; use "
            "bfloat16 or float16, or --attention-backend triton"
        )
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"--attention-backend flashinfer has no kernels for a head size of "
            f"{head_dim}, only for {', '.join(map(str, HEAD_DIMS))}; use "
            "--attention-backend triton"
        )
