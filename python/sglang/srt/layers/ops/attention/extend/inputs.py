"""Tensors of one extend launch, passed between launchers as one value."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang.srt.layers.ops.attention.extend.table import LaunchShape
from sglang.srt.layers.ops.attention.shared.args import (
    Lens,
    PageArgs,
    Pool,
    Scale,
    TokenArgs,
    pages_args,
    pool_args,
    scale_args,
    tokens_args,
)


class ExtendTensors(NamedTuple):
    """The first arguments of every extend kernel."""

    q: TokenArgs
    out: TokenArgs
    pool: Pool
    pages: PageArgs
    lens: Lens


class ExtendInputs(NamedTuple):
    """Checked arguments of `extend_attention`, which describes them."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    row_index: Tensor | None
    qo_indptr: Tensor
    prefix_lens: Tensor
    page_size: int
    sm_scale: float
    out: Tensor
    window: int = -1
    logit_cap: float = 0.0
    sinks: Tensor | None = None
    tree_mask: Tensor | None = None
    positions: Tensor | None = None

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

    def softmax_args(self) -> tuple[Tensor | None, Scale, int | None]:
        """Return `sinks`, `scale` and `window`, which every extend kernel takes."""
        window = self.window if self.window > 0 else None
        return self.sinks, scale_args(self.sm_scale, self.logit_cap), window

    def tree_args(self) -> tuple[Tensor | None, Tensor | None]:
        """Return `tree_mask` and `positions` for the extend kernels that take them."""
        mask = None if self.tree_mask is None else self.tree_mask.view(torch.uint8)
        return mask, self.positions
