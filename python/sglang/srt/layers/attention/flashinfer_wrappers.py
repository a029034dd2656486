"""FlashInfer's wrappers by layer shape, and when their plans may be made.

The only file that imports `flashinfer`, an optional package; `attention_registry`
imports it, through the backend, where it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flashinfer
import torch
from torch import Tensor

from sglang.srt.layers.attention.flashinfer_plan import HostPlan, LayerShape

_LAYOUT = "NHD"
# Tile lists of a decode plan; prefill plans keep FlashInfer's own 8 MiB.
_DECODE_INT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBuffers:
    """What plans of one backend share; static, because graphs read it.

    Fields:
        kv_indptr: int32 [rows + 1]; pages of a row in `kv_indices`.
        kv_indices: int32 [rows * columns]; page numbers, as FlashInfer reads them.
        last_page_lens: int32 [rows]; written by the plans of graphs.
        dtype: of queries, KV cache and outputs.
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_lens: Tensor
    page_size: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.last_page_lens.shape[0]


class Planned:
    """A FlashInfer wrapper whose plans do not overwrite each other.

    A plan is written to page-locked memory of the wrapper and copied from there on the
    stream. When the next plan is made, under overlap, that copy may still be queued
    behind the forward in flight, so it is waited for; as the result of that forward has
    been waited for by then, this takes no time.
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
    """The wrappers of one layer shape, and the workspace that they share."""

    def __init__(self, shape: LayerShape, *, buffers: PlanBuffers) -> None:
        self._shape = shape
        self._buffers = buffers
        self._workspace = torch.zeros(
            shape.workspace_bytes(buffers.rows),
            dtype=torch.uint8,
            device=buffers.kv_indptr.device,
        )
        self._decode_int = self._workspace.new_empty(_DECODE_INT_BYTES)
        # Of graphs, by padded rows; 0: outside of graphs.
        self._decode: dict[int, Planned] = {}
        self._extend: dict[bool, Planned] = {}
        self._dense: Planned | None = None

    def has_graph(self, rows: int) -> bool:
        return rows in self._decode

    def plan_decode(self, host: HostPlan, *, graph_rows: int) -> Planned:
        """`graph_rows` is 0 outside of graphs."""
        planned = self._decode.get(graph_rows)
        if planned is None:
            planned = self._decode[graph_rows] = self._new_decode(graph_rows)
        planned.plan(
            host.kv_indptr,
            self._buffers.kv_indices[: host.total_pages],
            host.last_page_lens,
            self._shape.q_heads,
            self._shape.kv_heads,
            self._shape.head_dim,
            self._buffers.page_size,
            **self._options(),
        )
        return planned

    def plan_extend(self, host: HostPlan, *, custom_mask: Tensor | None) -> Planned:
        is_tree = custom_mask is not None
        planned = self._extend.get(is_tree)
        if planned is None:
            # Masks are beyond the Hopper kernels, which "auto" takes where it can.
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, _LAYOUT, backend="fa2" if is_tree else "auto"
            )
            planned = self._extend[is_tree] = Planned(wrapper)
        planned.plan(
            host.qo_indptr,
            host.kv_indptr,
            self._buffers.kv_indices[: host.total_pages],
            host.last_page_lens,
            self._shape.q_heads,
            self._shape.kv_heads,
            self._shape.head_dim,
            self._buffers.page_size,
            custom_mask=custom_mask,
            causal=not is_tree,
            **self._options(),
        )
        return planned

    def plan_dense(self, host: HostPlan) -> Planned:
        """Prompts without a prefix, K and V one token after the other."""
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
                "paged_kv_indptr_buffer": self._buffers.kv_indptr[: graph_rows + 1],
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
        # Forwards do not overlap on the device, so their plans may share memory.
        wrapper.reset_workspace_buffer(self._workspace, self._decode_int)
        return Planned(wrapper)
