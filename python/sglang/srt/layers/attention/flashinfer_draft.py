"""Draft steps through FlashInfer: decode over lists of slots, one backend per step.

Every step has its own lists and plans, because all of them are made before the first
step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kv_canary.view import KVReadView
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.flashinfer_plan import LayerShape
from sglang.srt.layers.attention.flashinfer_wrappers import (
    PlanBuffers,
    Planned,
    ShapePlans,
    Workspaces,
)
from sglang.srt.layers.attention.paged_backend import store_kv
from sglang.srt.layers.ops.rope.op import rope_store_kv

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.attention.branch_lists import BranchLists, HostOffsets
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.ops.branch_slots.op import BranchPaths, SlotRows


class FlashInferDraftDecode:
    """Draft phases of chains and trees. A chain is a tree with one branch."""

    def __init__(
        self, lists: BranchLists, *, kv_pool: KVCache, workspaces: Workspaces
    ) -> None:
        self._lists = lists
        self._planned_rows = 0
        last_page_lens = lists.indptr.new_ones(lists.max_rows)
        self._steps = [
            FlashInferDraftStep(
                PlanBuffers(
                    kv_indptr=lists.indptr,
                    kv_indices=lists.indices[step],
                    last_page_lens=last_page_lens,
                    qo_indptr=lists.indptr[:0],
                    page_size=1,
                    dtype=kv_pool.dtype,
                    place=step,
                ),
                kv_pool=kv_pool,
                workspaces=workspaces,
            )
            for step in range(lists.steps)
        ]

    def plan(self, seq_lens: Sequence[int] | None, *, graph_rows: int = 0) -> None:
        """Plan all steps; see `DraftDecodeBackend`.

        Raises:
            RuntimeError: host lengths are missing, or the lists do not fit.
        """
        if seq_lens is None:
            raise RuntimeError(
                "a draft phase needs host lengths: the backend declares "
                "needs_cpu_seq_lens"
            )
        host = self._lists.plan(seq_lens, requests=graph_rows or len(seq_lens))
        self._planned_rows = host.rows
        for place, step in enumerate(self._steps):
            step.begin(host.indptr[place], host, is_graph=graph_rows > 0)

    def prepare(self, rows: SlotRows) -> None:
        """Fill the lists of all steps; see `DraftDecodeBackend`.

        Raises:
            RuntimeError: the phase was planned for another batch.
        """
        branches = len(rows.req_pool_indices) * self._lists.topk
        if branches != self._planned_rows:
            raise RuntimeError(
                f"a draft phase of {branches} branches was planned for "
                f"{self._planned_rows}"
            )
        self._lists.fill(rows)

    def follow(self, step: int, paths: BranchPaths) -> None:
        self._lists.follow(step, paths)

    def step(self, index: int) -> AttentionBackend:
        return self._steps[index]


class FlashInferDraftStep(AttentionBackend):
    """One step, planned at the first layer of each shape, as in
    `FlashInferAttnBackend`."""

    name = "flashinfer"

    def __init__(
        self, buffers: PlanBuffers, *, kv_pool: KVCache, workspaces: Workspaces
    ) -> None:
        self._buffers = buffers
        self._kv_pool = kv_pool
        self._workspaces = workspaces
        self._shapes: dict[LayerShape, ShapePlans] = {}
        self._planned: dict[LayerShape, Planned] = {}
        self._indptr: Tensor | None = None
        self._ones: Tensor | None = None
        self._graph_rows = 0

    def begin(self, indptr: Tensor, host: HostOffsets, *, is_graph: bool) -> None:
        """Start a phase. Plan at once for graphs, which replay without this code.

        Args:
            indptr: this step's row of `host`.
        """
        self._indptr, self._ones = indptr, host.ones
        self._graph_rows = host.rows if is_graph else 0
        self._planned = {}
        for shape, plans in self._shapes.items():
            if self._graph_rows and plans.has_decode(self._graph_rows):
                self._planned[shape] = self._plan(plans)

    def init_eager(self, forward_batch: ForwardBatch) -> None:
        """Nothing to prepare: the phase was planned as a whole."""

    def read_view(self, forward_batch: ForwardBatch) -> Sequence[KVReadView]:
        view = KVReadView(
            read_lens=forward_batch.seq_lens,
            indptr=self._buffers.indptr(forward_batch.batch_size),
            slot_indices=self._buffers.kv_indices,
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
            plans = self._shapes.get(shape)
            if plans is None:
                plans = self._shapes[shape] = ShapePlans(
                    shape, buffers=self._buffers, workspaces=self._workspaces
                )
            planned = self._planned[shape] = self._plan(plans)
        planned.run(q, tuple(cache.unsqueeze(1) for cache in caches), out=out)

    def _plan(self, plans: ShapePlans) -> Planned:
        assert self._indptr is not None and self._ones is not None
        return plans.plan_decode(self._indptr, self._ones, graph_rows=self._graph_rows)
