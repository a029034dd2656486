"""Attention backends that read `req_to_token` itself as the page table.

Every page_size-th column of a row is the first slot of a page, so a step needs no
metadata of its own: kernels read the pools directly, inside and outside graphs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kv_canary.op import native_available
from kv_canary.view import KVReadView
from sglang.srt.layers.attention.base_attn_backend import (
    AttentionBackend,
    CallWrapper,
    DraftDecodeBackend,
    StackWrapper,
)
from sglang.srt.layers.attention.window_tables import (
    WindowForward,
    WindowTables,
    make_window_tables,
)
from sglang.srt.mem_cache.ops.branch_slots.op import (
    BranchPaths,
    SlotRows,
    branch_ancestors,
    branch_table,
)

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import BranchLayout
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.ops.decoder_stack import StackInput, StackPlan, StackRun
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.kv_dtype import KVScales
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool

logger = logging.getLogger(__name__)


def store_kv(
    store_op: Callable[..., None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    *,
    kv_pool: KVCache,
    out_cache_loc: Tensor | None = None,
    update_k: bool = False,
) -> None:
    """Norm and rotate q and k in place, write k and v to the slots of the new tokens.

    Args:
        store_op: `layers.ops.rope.op.rope_store_kv`, or `latent_store`, which takes the
            same arguments.
        q, k, v: as in `AttentionBackend.forward`.
        out_cache_loc: slots in this layer's pool. Defaults to the batch's slots.
        update_k: also norm and rotate k in place.
    """
    k_cache, v_cache = kv_pool.get_kv_buffer(layer.layer_id)
    q_norm, k_norm = layer.q_norm, layer.k_norm
    store_op(
        q,
        k,
        v,
        positions=forward_batch.positions,
        cos_sin_cache=layer.cos_sin_cache,
        k_cache=k_cache,
        v_cache=v_cache,
        out_cache_loc=(
            forward_batch.out_cache_loc if out_cache_loc is None else out_cache_loc
        ),
        q_norm_weight=None if q_norm is None else q_norm.weight,
        k_norm_weight=None if k_norm is None else k_norm.weight,
        eps=next((norm.eps for norm in (q_norm, k_norm) if norm is not None), 1e-6),
        update_k=update_k,
        scales=kv_pool.layer_scales(layer.layer_id),
    )


class AttendedRows(NamedTuple):
    """The rows as attention of one layer takes them; as in `layers.ops.attention`.
    `first_position`: int64 [R], position of each row's element 0, or None for 0."""

    page_table: Tensor | None
    row_index: Tensor | None
    prefix_lens: Tensor
    read_lens: Tensor
    positions: Tensor
    first_position: Tensor | None = None


class AttentionPlan:
    """What all layers of one forward share.

    Attributes:
        batch: the forward.
        view: the slots that attention reads. `attend` takes its arguments from it too.
    """

    def __init__(self, backend: PagedAttnBackend, batch: ForwardBatch) -> None:
        self.batch = batch
        self._backend = backend
        takes_new = not backend._reads_new(batch)
        self.view = KVReadView(
            read_lens=batch.seq_lens if takes_new else batch.prefix_lens,
            page_size=backend._page_size,
            page_table=backend.page_table,
            row_index=None if backend._is_own_table else batch.req_pool_indices,
            takes_new=takes_new,
        )


class PagedAttnBackend(AttentionBackend):
    """Base of the paged backends. Subclasses differ in the ops they call.

    All ops take the arguments of `layers.ops.attention` and `layers.ops.rope`;
    `latent_store_op` writes latents.
    """

    store_op: Callable[..., None]
    latent_store_op: Callable[..., None]
    decode_op: Callable[..., None]
    extend_op: Callable[..., None]
    # Runs a whole stack (`layers.ops.decoder_stack`), or None if there is no such op.
    stack_op: Callable[..., StackRun] | None = None

    def __init__(self, *, req_to_token_pool: ReqToTokenPool, kv_pool: KVCache) -> None:
        self._req_to_token_pool = req_to_token_pool
        self._kv_pool = kv_pool
        self._page_size = kv_pool.page_size
        self._is_latent = kv_pool.values_in_keys
        if self._is_latent:
            self.store_op = self.latent_store_op
        self.page_table = req_to_token_pool.req_to_token[:, :: self._page_size]
        # Whether row r of a forward reads row r of the table.
        self._is_own_table = False
        # Of the newest forward.
        self._plan: AttentionPlan | None = None
        # By name of the secondary group.
        self._tables = make_window_tables(kv_pool, max_rows=req_to_token_pool.size)

    def draft_decode(
        self, layout: BranchLayout, *, max_requests: int
    ) -> DraftDecodeBackend:
        if layout.topk == 1:
            return PlainDraftDecode(self)
        return BranchDraftDecode(self, layout=layout, max_requests=max_requests)

    def with_table(self, page_table: Tensor, *, page_size: int) -> PagedAttnBackend:
        """Return the same kernels over the same KV, where row r of a forward reads row
        r of `page_table` (int32, first slots of pages)."""
        other = copy.copy(self)
        other.page_table = page_table
        other._page_size = page_size
        other._is_own_table = True
        other._plan = None
        other._tables = {
            name: tables.for_table(len(page_table))
            for name, tables in self._tables.items()
        }
        return other

    def wrap_calls(
        self, on_store: CallWrapper, on_attend: CallWrapper, on_stack: StackWrapper
    ) -> bool:
        self.store_op = on_store(self.store_op)
        self.decode_op = on_attend(self.decode_op)
        self.extend_op = on_attend(self.extend_op)
        if self.stack_op is not None:
            self.stack_op = on_stack(self.stack_op)
        return True

    def run_stack(
        self, plan: StackPlan, given: StackInput, forward_batch: ForwardBatch
    ) -> StackRun | None:
        if self.stack_op is None or self._tables or not native_available():
            return None
        if self._kv_pool.dtype != given.x.dtype:
            return None
        view, batch = self._get_plan(forward_batch).view, forward_batch
        is_decode = batch.forward_mode.is_decode
        pool = self._kv_pool
        caches = [pool.get_kv_buffer(layer) for layer in range(plan.num_layers)]
        return self.stack_op(
            plan,
            given.x,
            k_caches=[k for k, _ in caches],
            v_caches=[v for _, v in caches],
            positions=batch.positions,
            out_cache_loc=batch.out_cache_loc,
            page_table=view.page_table,
            row_index=view.row_index,
            read_lens=view.read_lens if is_decode else None,
            prefix_lens=None if is_decode else batch.prefix_lens,
            qo_indptr=None if is_decode else batch.qo_indptr,
            tree_mask=None if is_decode else batch.tree_mask,
            page_size=view.page_size,
            first=given.first,
            captured=given.captured,
        )

    def init_eager(self, forward_batch: ForwardBatch) -> None:
        """Nothing to prepare: the pools' own tables are read."""

    def init_capture(self, forward_batch: ForwardBatch, rows: int) -> None:
        """Nothing to prepare: a graph reads the static batch and the pools."""

    def init_replay(self, forward_batch: ForwardBatch) -> None:
        """Nothing to fill: a graph reads the static batch and the pools."""

    def read_view(self, forward_batch: ForwardBatch) -> Sequence[KVReadView]:
        return (self._get_plan(forward_batch).view,)

    def group_forwards(self, forward_batch: ForwardBatch) -> dict[str, WindowForward]:
        view = self._get_plan(forward_batch).view
        return {
            name: tables.make(view, forward_batch)
            for name, tables in self._tables.items()
        }

    def _get_plan(self, forward_batch: ForwardBatch) -> AttentionPlan:
        if self._plan is None or self._plan.batch is not forward_batch:
            self._plan = self._make_plan(forward_batch)
        return self._plan

    def _make_plan(self, forward_batch: ForwardBatch) -> AttentionPlan:
        return AttentionPlan(self, forward_batch)

    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> None:
        store_kv(
            self.store_op,
            q,
            k,
            v,
            layer,
            forward_batch,
            kv_pool=self._kv_pool,
            out_cache_loc=self._group_cache_loc(layer, forward_batch),
        )

    def _layer_tables(self, layer: RadixAttention) -> WindowTables | None:
        """Return the tables of a layer's group, or None for the primary group."""
        if not self._tables:
            return None
        return self._tables.get(self._kv_pool.layer_place(layer.layer_id)[0].name)

    def _group_cache_loc(
        self, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> Tensor | None:
        """Return the slots of the new tokens in a layer's group, or None for the
        primary ones."""
        tables = self._layer_tables(layer)
        if tables is None:
            return None
        return tables.cache_loc(layer.layer_id, forward_batch)

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
        k_cache, v_cache = self._kv_pool.get_kv_buffer(layer.layer_id)
        view = self._get_plan(forward_batch).view
        rows = AttendedRows(
            view.page_table,
            view.row_index,
            forward_batch.prefix_lens,
            view.read_lens,
            forward_batch.positions,
        )
        tables = self._layer_tables(layer)
        if tables is not None:
            rows = self._window_rows(tables, view, layer.layer_id, forward_batch)
        scales = self._kv_pool.layer_scales(layer.layer_id)
        common = {
            "page_table": rows.page_table,
            "row_index": rows.row_index,
            "page_size": view.page_size,
            # K as it is stored, times its scale, is K.
            "sm_scale": layer.scaling * scales.k,
            "window": layer.window,
            "logit_cap": layer.logit_cap,
            "sinks": layer.sinks,
            "out": out,
        }
        if forward_batch.forward_mode.is_decode:
            options = self._decode_options(layer, forward_batch, rows)
            self.decode_op(
                q,
                k_cache,
                v_cache,
                read_lens=rows.read_lens,
                **common,
                **options,
            )
            self._unscale(out, scales)
            return
        extend_op, options = self._extend_call(k, v, layer, forward_batch)
        extend_op(
            q,
            k_cache,
            v_cache,
            qo_indptr=forward_batch.qo_indptr,
            prefix_lens=rows.prefix_lens,
            tree_mask=forward_batch.tree_mask,
            positions=rows.positions,
            **common,
            **options,
        )
        self._unscale(out, scales)

    def _unscale(self, out: Tensor, scales: KVScales) -> None:
        """Multiply averages of V as it is stored by its scale."""
        scale = scales.k if self._is_latent else scales.v
        if scale != 1.0:
            out.mul_(scale)

    def _window_rows(
        self,
        windows: WindowTables,
        view: KVReadView,
        layer_id: int,
        forward_batch: ForwardBatch,
    ) -> AttendedRows:
        made = windows.rows(layer_id, view, forward_batch)
        positions = forward_batch.positions
        if forward_batch.tree_mask is not None:
            positions = windows.tree_positions(layer_id, forward_batch)
        return AttendedRows(
            made.page_table,
            None,
            made.prefix_lens,
            made.read_lens,
            positions,
            made.first_position,
        )

    def _decode_options(
        self, layer: RadixAttention, forward_batch: ForwardBatch, rows: AttendedRows
    ) -> dict[str, Any]:
        """Return this backend's extra arguments for decode."""
        return {}

    def _extend_call(
        self, k: Tensor, v: Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> tuple[Callable[..., None], dict[str, Any]]:
        """Return the op of an extend, and its extra arguments."""
        return self.extend_op, {}

    def _reads_new(self, forward_batch: ForwardBatch) -> bool:
        """Whether attention takes new K and V from the model, not from the pool."""
        return False


class PlainDraftDecode:
    """Draft phases of chains. Draft slots are the slots of a request's next tokens."""

    def __init__(self, backend: PagedAttnBackend) -> None:
        self._backend = backend

    def plan(self, seq_lens: Sequence[int] | None, *, graph_rows: int = 0) -> None:
        """Nothing to plan."""

    def prepare(self, rows: SlotRows) -> None:
        """Nothing to prepare: the request rows list the slots."""

    def follow(self, step: int, paths: BranchPaths) -> None:
        """Nothing to do: a chain has one branch."""

    def step(self, index: int) -> AttentionBackend:
        return self._backend


class BranchDraftDecode:
    """Draft phases of trees. One table row per branch serves all steps of a phase.
    Where branches read their ancestors, `follow` corrects the rows before each step.

    Attributes:
        layout: layout of the branches.
        entry_slots: KV slots that each entry of the table covers.
        page_table: int32 [max_requests * topk, columns].
    """

    def __init__(
        self, backend: PagedAttnBackend, *, layout: BranchLayout, max_requests: int
    ) -> None:
        self.layout = layout
        needs_pages = backend.capabilities.needs_paged_draft_rows
        self._is_paged = needs_pages and layout.region is None
        pool = backend._req_to_token_pool
        self.entry_slots = layout.page_size if self._is_paged else 1
        # A branch is at most as long as a context, its root, its drafts and a page.
        longest = pool.context_len + 1 + layout.num_steps + layout.page_size
        self.page_table = torch.zeros(
            (max_requests * layout.topk, -(-longest // self.entry_slots)),
            dtype=torch.int32,
            device=pool.device,
        )
        self._begins = torch.arange(
            0, self.page_table.numel(), self.page_table.shape[1], device=pool.device
        )
        self._backend = backend.with_table(self.page_table, page_size=self.entry_slots)

    def plan(self, seq_lens: Sequence[int] | None, *, graph_rows: int = 0) -> None:
        """Nothing to plan: the device fills the table."""

    def prepare(self, rows: SlotRows) -> None:
        count = len(rows.req_pool_indices) * self.layout.topk
        branch_table(
            rows,
            layout=self.layout,
            paged=self._is_paged,
            out=self.page_table[:count],
        )

    def follow(self, step: int, paths: BranchPaths) -> None:
        count = len(paths.seq_lens) * self.layout.topk
        branch_ancestors(
            step, paths, begins=self._begins[:count], out=self.page_table.view(-1)
        )

    def step(self, index: int) -> AttentionBackend:
        return self._backend
