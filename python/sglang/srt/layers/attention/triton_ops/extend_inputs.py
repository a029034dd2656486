"""Tensors of one extend launch, passed on from launcher to launcher as one value."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sglang.srt.layers.attention.triton_ops.args import (
    Lens,
    Pages,
    Pool,
    Tokens,
    pages_args,
    pool_args,
    tokens_args,
)
from sglang.srt.layers.attention.triton_ops.extend_table import LaunchShape


class ExtendTensors(NamedTuple):
    """The first arguments of every extend kernel."""

    q: Tokens
    out: Tokens
    pool: Pool
    pages: Pages
    lens: Lens


class ExtendInputs(NamedTuple):
    """Arguments of `extend_attention`, checked; fields as described there."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    row_index: Tensor | None
    qo_indptr: Tensor
    prefix_lens: Tensor
    page_size: int
    sm_scale: float
    window: int
    tree_mask: Tensor | None
    out: Tensor

    def shape(self) -> LaunchShape:
        tokens, q_heads, head_dim = self.q.shape
        return LaunchShape(
            tokens, self.prefix_lens.shape[0], q_heads, self.k_cache.shape[1], head_dim
        )

    def tensor_args(self) -> ExtendTensors:
        return ExtendTensors(
            tokens_args(self.q),
            tokens_args(self.out),
            pool_args(self.k_cache, self.v_cache),
            pages_args(self.page_table, self.row_index),
            Lens(self.qo_indptr, self.prefix_lens),
        )

    def scalar_args(self) -> tuple[float, int | None]:
        """`score_scale` and `window` of every extend kernel."""
        window = self.window if self.window > 0 else None
        return self.sm_scale * math.log2(math.e), window

    def tree_bytes(self) -> Tensor | None:
        """`tree_mask` of every extend kernel that takes one."""
        return None if self.tree_mask is None else self.tree_mask.view(torch.uint8)
