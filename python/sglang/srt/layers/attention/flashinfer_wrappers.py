"""FlashInfer's wrappers by layer shape, and when they may be planned.

The only file that imports `flashinfer`, an optional package. `attention_registry`
imports it, through the backend, when a user asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import flashinfer
import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.layers.attention.flashinfer_plan import HostPlan, LayerShape

_LAYOUT = "NHD"
# Tile lists of a plan with few tokens per row; others keep FlashInfer's own 8 MiB.
_INT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBuffers:
    """Buffers shared by plans of one kind. They are static because graphs read them.

    Fields:
        kv_indptr: int32; pages of a row in `kv_indices`, see `indptr`.
        kv_indices: int32; page numbers, as FlashInfer reads them.
        last_page_lens: int32 [rows]; written by the plans of graphs.
        qo_indptr: int32 [rows + 1]; written by the plans of extends of fixed width.
        dtype: dtype of queries, KV cache and outputs.
        place: index among the offset lists, which follow one another in `kv_indptr`.
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_lens: Tensor
    qo_indptr: Tensor
    page_size: int
    dtype: torch.dtype
    place: int = 0

    @property
    def rows(self) -> int:
        return self.last_page_lens.shape[0]

    def indptr(self, rows: int) -> Tensor:
        """Return the offsets of a batch of `rows` rows, [rows + 1]."""
        begin = self.place * (rows + 1)
        return self.kv_indptr[begin : begin + rows + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMasks:
    """Packed masks of trees. They are static because graphs read them.

    Fields:
        indptr: int32 [rows + 1]; bytes of each row. packed: uint8.
    """

    indptr: Tensor
    packed: Tensor


class Workspaces:
    """Memory for partial results. Forwards do not overlap on the device, so all that
    fit share one buffer; memory that a graph has captured is never freed."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._blocks: list[Tensor] = []

    def of(self, size: int) -> Tensor:
        """uint8 [at least `size`], zero before its first use."""
        for block in self._blocks:
            if len(block) >= size:
                return block
        block = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._blocks.append(block)
        return block


class Planned:
    """A FlashInfer wrapper that waits before a new plan overwrites the last one.

    A plan is written to the wrapper's page-locked memory and copied from there on the
    stream. When the next plan is made, under overlap, that copy may still be queued
    behind the forward in flight, so `plan` waits for it. By then the caller has waited
    for that forward's result, so this wait takes no time.
    """

    def __init__(self, wrapper: Any) -> None:
        self.run = wrapper.run
        self._plan = wrapper.plan
        self._copied = torch.cuda.Event()

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._copied.synchronize()
        self._plan(*args, **kwargs)
        self._copied.record()


class ShapePlans:
    """The wrappers of one layer shape over one set of buffers.

    Graph wrappers read the indices in place, so their plans get none to copy.
    """

    def __init__(
        self, shape: LayerShape, *, buffers: PlanBuffers, workspaces: Workspaces
    ) -> None:
        self._shape = shape
        self._buffers = buffers
        self._workspaces = workspaces
        self._workspace = workspaces.of(shape.workspace_bytes(buffers.rows))
        # Forwards do not overlap on the device, so their plans may share memory.
        self._int_workspace = self._workspace.new_empty(_INT_BYTES)
        # By padded rows of the graph; 0 outside graphs.
        self._decode: dict[int, Planned] = {}
        # By rows, tokens per row and whether they are trees.
        self._fixed: dict[tuple[int, int, bool], Planned] = {}
        self._extend: Planned | None = None
        self._dense: Planned | None = None

    def has_decode(self, rows: int) -> bool:
        """Whether a decode graph of `rows` rows has been planned."""
        return rows in self._decode

    def has_fixed(self, rows: int, tokens_per_row: int, *, is_tree: bool) -> bool:
        """Whether an extend of this width has been planned."""
        return (rows, tokens_per_row, is_tree) in self._fixed

    def plan_decode(
        self, kv_indptr: Tensor, last_page_lens: Tensor, *, graph_rows: int
    ) -> Planned:
        """Plan a decode.

        Args:
            kv_indptr, last_page_lens: on the host; see `HostPlan`.
            graph_rows: padded rows of the graph; 0 outside graphs.
        """
        planned = self._decode.get(graph_rows)
        if planned is None:
            planned = self._decode[graph_rows] = self._new_decode(graph_rows)
        indices = self._buffers.kv_indices
        planned.plan(
            kv_indptr,
            indices[:0] if graph_rows else indices,
            last_page_lens,
            self._shape.q_heads,
            self._shape.kv_heads,
            self._shape.head_dim,
            self._buffers.page_size,
            **self._options(),
        )
        return planned

    def plan_fixed(self, host: HostPlan, *, masks: TreeMasks | None) -> Planned:
        """Plan an extend with equally many tokens per row, inside or outside a graph.
        With `masks` the rows are trees, without them attention is causal."""
        key = (host.rows, host.tokens_per_row, masks is not None)
        planned = self._fixed.get(key)
        if planned is None:
            planned = self._fixed[key] = self._new_fixed(host, masks)
        # Without this FlashInfer looks for the longest row element by element.
        longest = {"max_token_per_sequence": host.tokens_per_row}
        self._plan_paged(planned, host, self._buffers.kv_indices[:0], **longest)
        return planned

    def plan_extend(self, host: HostPlan) -> Planned:
        """Plan a causal extend of any lengths, outside of graphs."""
        if self._extend is None:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, _LAYOUT
            )
            self._extend = Planned(wrapper)
        indices = self._buffers.kv_indices[: host.total_pages]
        self._plan_paged(self._extend, host, indices)
        return self._extend

    def plan_dense(self, host: HostPlan) -> Planned:
        """Plan prompts without a prefix whose K and V are contiguous."""
        if self._dense is None:
            wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                self._workspace, _LAYOUT, backend="fa3"
            )
            self._dense = Planned(wrapper)
        self._dense.plan(
            host.qo_indptr,
            host.qo_indptr,
            self._shape.q_heads,
            self._shape.kv_heads,
            self._shape.head_dim,
            causal=True,
            **self._options(),
        )
        return self._dense

    def _plan_paged(
        self, planned: Planned, host: HostPlan, indices: Tensor, **options: Any
    ) -> None:
        # A wrapper that was made with mask buffers reads those and ignores `causal`.
        planned.plan(
            host.qo_indptr,
            host.kv_indptr,
            indices,
            host.last_page_lens,
            self._shape.q_heads,
            self._shape.kv_heads,
            self._shape.head_dim,
            self._buffers.page_size,
            causal=True,
            **self._options(),
            **options,
        )

    def _options(self) -> dict[str, Any]:
        return {
            "sm_scale": self._shape.scaling,
            "window_left": self._shape.window_left,
            "q_data_type": self._buffers.dtype,
            "kv_data_type": self._buffers.dtype,
        }

    def _new_decode(self, graph_rows: int) -> Planned:
        static: dict[str, Any] = {}
        if graph_rows:
            static = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": self._buffers.indptr(graph_rows),
                "paged_kv_indices_buffer": self._buffers.kv_indices,
                "paged_kv_last_page_len_buffer": self._buffers.last_page_lens[
                    :graph_rows
                ],
            }
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            _LAYOUT,
            use_tensor_cores=self._shape.uses_tensor_cores,
            **static,
        )
        wrapper.reset_workspace_buffer(self._workspace, self._int_workspace)
        return Planned(wrapper)

    def _new_fixed(self, host: HostPlan, masks: TreeMasks | None) -> Planned:
        rows, buffers = host.rows, self._buffers
        static: dict[str, Any] = {}
        if masks is not None:
            static = {
                "custom_mask_buf": masks.packed,
                "mask_indptr_buf": masks.indptr[: rows + 1],
            }
        workspace = self._workspaces.of(
            self._shape.extend_workspace_bytes(buffers.rows, host.tokens_per_row)
        )
        # Few queries over a long prefix: fa2 splits it over blocks and takes masks.
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            _LAYOUT,
            use_cuda_graph=True,
            qo_indptr_buf=buffers.qo_indptr[: rows + 1],
            paged_kv_indptr_buf=buffers.indptr(rows),
            paged_kv_indices_buf=buffers.kv_indices,
            paged_kv_last_page_len_buf=buffers.last_page_lens[:rows],
            backend="fa2",
            **static,
        )
        wrapper.reset_workspace_buffer(workspace, self._int_workspace)
        return Planned(wrapper)
