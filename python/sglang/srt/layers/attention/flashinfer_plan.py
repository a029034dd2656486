"""Host side of the FlashInfer backend: the inputs of a plan, without FlashInfer.

Lengths come from the host copies of a batch; nothing here waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.radix_attention import RadixAttention

# Query heads per KV head up to which the CUDA cores keep up with the memory.
_CUDA_CORE_GROUP = 2
# FlashInfer splits the KV of few rows over at most this many blocks per KV head times
# KV heads: two per multiprocessor of the largest GPU it is built for.
_SPLIT_BLOCKS = 2 * 160
# The largest tile of packed queries of a prefill kernel.
_QUERY_TILE = 128
_MIN_WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Properties of a layer that a plan depends on. Layers of one shape share plans.

    Fields:
        window: newest elements that a token attends, itself included; -1 means all.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    window: int

    @classmethod
    def of(cls, layer: RadixAttention) -> LayerShape:
        return cls(
            q_heads=layer.num_heads,
            kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            scaling=layer.scaling,
            window=layer.window,
        )

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether decode packs the query heads of a KV head into a matrix tile."""
        return self.q_heads // self.kv_heads > _CUDA_CORE_GROUP

    @property
    def window_left(self) -> int:
        """The window as FlashInfer counts it, without the token's own; -1 means all."""
        return self.window - 1 if self.window > 0 else -1

    def workspace_bytes(self, rows: int) -> int:
        """Bytes of the partial results of split-KV decode over `rows` padded rows.

        One tile of queries per block, each with a float32 output and two statistics.
        """
        group = self.q_heads // self.kv_heads
        tile = 16 if group <= 16 else 64
        blocks = max(_SPLIT_BLOCKS, rows * group // tile + rows)
        return self._partial_bytes(blocks * tile)

    def extend_workspace_bytes(self, rows: int, tokens_per_row: int) -> int:
        """Bytes of the partial results of `rows` padded rows of `tokens_per_row`
        tokens.

        FlashInfer lays a graph out for any distribution of the tokens over the rows:
        one tile per row beyond those that the tokens fill.
        """
        packed = rows * tokens_per_row * (self.q_heads // self.kv_heads)
        queries = packed + (rows + 1) * _QUERY_TILE
        split = (_SPLIT_BLOCKS // self.kv_heads + 1) * _QUERY_TILE
        return self._partial_bytes(max(queries, split))

    def _partial_bytes(self, queries: int) -> int:
        needed = self.q_heads * queries * (self.head_dim + 2) * 4
        return max(_MIN_WORKSPACE_BYTES, -(-needed // 4096) * 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """Offsets of one batch, int32 on the host; page-locked if a GPU is used.

    Fields:
        qo_indptr: [R + 1]; new tokens of each row.
        kv_indptr: [R + 1]; pages of each row.
        last_page_lens: [R]; elements in a row's last page, 1 to page_size.
        max_pages: pages of the longest row.
        total_pages: kv_indptr[R].
        new_tokens: qo_indptr[R].
        has_prefix: whether any row reads elements older than its new tokens.
        mask_indptr: [R + 1], trees only; bytes of each row's packed mask.
        max_mask_bytes: mask bytes of the longest row; 0 without trees.
        total_mask_bytes: mask_indptr[R].
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_lens: Tensor
    max_pages: int
    total_pages: int
    new_tokens: int
    has_prefix: bool
    mask_indptr: Tensor
    max_mask_bytes: int
    total_mask_bytes: int

    @property
    def rows(self) -> int:
        return self.last_page_lens.shape[0]

    @property
    def tokens_per_row(self) -> int:
        """New tokens of each row, if all rows of the batch have equally many."""
        return self.new_tokens // self.rows


def host_plan(
    forward_batch: ForwardBatch, *, page_size: int, pin_memory: bool
) -> HostPlan:
    """Compute offsets from the host copies of the lengths. Every row has an element.

    Raises:
        RuntimeError: the batch does not carry host lengths.
    """
    lens = forward_batch.lens_cpu
    if lens is None or len(lens.extend_lens) != forward_batch.batch_size:
        raise RuntimeError(
            f"a batch of {forward_batch.batch_size} rows lacks their host lengths: "
            "the backend declares needs_cpu_seq_lens"
        )
    new = np.asarray(lens.extend_lens, dtype=np.int64)
    total = new + np.asarray(lens.prefix_lens, dtype=np.int64)
    pages = -(-total // page_size)
    rows = len(new)
    has_tree = forward_batch.tree_mask is not None
    mask_bytes = -(-new * total // 8) if has_tree else np.zeros_like(new)
    block = np.zeros((4, rows + 1), dtype=np.int32)
    np.cumsum(new, out=block[0, 1:])
    np.cumsum(pages, out=block[1, 1:])
    block[2, :rows] = total - (pages - 1) * page_size
    np.cumsum(mask_bytes, out=block[3, 1:])
    tensor = torch.from_numpy(block)
    if pin_memory:
        tensor = tensor.pin_memory()
    return HostPlan(
        qo_indptr=tensor[0],
        kv_indptr=tensor[1],
        last_page_lens=tensor[2, :rows],
        max_pages=int(pages.max()),
        total_pages=int(block[1, rows]),
        new_tokens=int(block[0, rows]),
        has_prefix=any(lens.prefix_lens),
        mask_indptr=tensor[3],
        max_mask_bytes=int(mask_bytes.max()),
        total_mask_bytes=int(block[3, rows]),
    )
