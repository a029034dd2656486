"""Paged attention problems for the CPU kernels, whose every foreign slot holds NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang.srt.layers.ops.attention import op as attention

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Rows with a prefix and new tokens; every slot that no row owns holds NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    row_index: Tensor
    prefix_lens: Tensor
    new_lens: Tensor
    page_size: int
    sm_scale: float

    @property
    def qo_indptr(self) -> Tensor:
        return torch.cat((torch.zeros(1, dtype=torch.int64), self.new_lens.cumsum(0)))

    def slots(self, row: int) -> Tensor:
        total = int(self.prefix_lens[row] + self.new_lens[row])
        element = torch.arange(total)
        table_row = self.page_table[self.row_index[row]]
        return table_row[element // self.page_size].long() + element % self.page_size

    def extend(self, *, ref: bool = False, **options: Any) -> Tensor:
        """`options`: window, logit_cap, sinks, tree_mask; a tree's positions are those
        of the depths in its mask."""
        tree_mask = options.get("tree_mask")
        if tree_mask is not None:
            options.setdefault("positions", self.tree_positions(tree_mask))
        function = attention.extend_attention_ref if ref else attention.extend_attention
        out = torch.full_like(self.q, 7.0)
        function(
            self.q,
            self.k_cache,
            self.v_cache,
            page_table=self.page_table,
            row_index=self.row_index,
            qo_indptr=self.qo_indptr,
            prefix_lens=self.prefix_lens,
            page_size=self.page_size,
            sm_scale=self.sm_scale,
            out=out,
            **options,
        )
        return out

    def tree_positions(self, tree_mask: Tensor) -> Tensor:
        depths = tree_mask.sum(-1) - 1
        return (self.prefix_lens[:, None] + depths).flatten()

    def decode(
        self,
        read_lens: Tensor,
        row_index: Tensor,
        q: Tensor,
        *,
        ref: bool = False,
        **options: Any,
    ) -> Tensor:
        function = attention.decode_attention_ref if ref else attention.decode_attention
        out = torch.full_like(q, 7.0)
        function(
            q,
            self.k_cache,
            self.v_cache,
            page_table=self.page_table,
            row_index=row_index,
            read_lens=read_lens,
            page_size=self.page_size,
            sm_scale=self.sm_scale,
            out=out,
            **options,
        )
        return out

    def token_by_token(self, **options: Any) -> Tensor:
        """Decode each new token of `extend` as a row of its own."""
        rows = torch.repeat_interleave(self.row_index, self.new_lens)
        lens = torch.cat(
            [
                torch.arange(n) + prefix + 1
                for prefix, n in zip(
                    self.prefix_lens.tolist(), self.new_lens.tolist(), strict=True
                )
            ]
        )
        return self.decode(lens, rows, self.q, **options)


def make_problem(
    *,
    prefix: list[int],
    new: list[int],
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    page_size: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    rows = len(prefix)
    totals = [p + n for p, n in zip(prefix, new, strict=True)]
    pages = [-(-total // page_size) for total in totals]
    pool_pages = 1 + sum(pages) + 3
    order = torch.randperm(pool_pages - 1, generator=generator) + 1
    width = max(pages, default=1) + 2
    # A table as the engine has it: a strided view of one row per request.
    token_table = torch.zeros(rows + 2, width * page_size, dtype=torch.int32)
    page_table = token_table[:, ::page_size]
    row_index = torch.randperm(rows + 2, generator=generator)[:rows]
    hq, hkv = heads
    shape = (pool_pages * page_size, hkv, dim)
    k_cache = torch.full(shape, NAN, dtype=dtype)
    v_cache = torch.full(shape, NAN, dtype=dtype)
    used = 0
    for row, total in enumerate(totals):
        own = order[used : used + pages[row]] * page_size
        used += pages[row]
        page_table[row_index[row], : pages[row]] = own.int()
        element = torch.arange(total)
        slots = own[element // page_size] + element % page_size
        for cache in (k_cache, v_cache):
            values = torch.randn(total, hkv, dim, generator=generator)
            cache[slots] = values.to(dtype)
    tokens = sum(new)
    # q is a view into a wider tensor, as after a fused q, k, v product.
    qkv = torch.randn(tokens, (hq + 2 * hkv) * dim, generator=generator).to(dtype)
    return Problem(
        q=qkv[:, : hq * dim].view(tokens, hq, dim),
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        row_index=row_index,
        prefix_lens=torch.tensor(prefix, dtype=torch.int64),
        new_lens=torch.tensor(new, dtype=torch.int64),
        page_size=page_size,
        sm_scale=dim**-0.5,
    )


def random_tree(rows: int, nodes: int, seed: int) -> Tensor:
    """Ancestor masks of random trees: [rows, nodes, nodes] bool."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(rows, nodes, nodes, dtype=torch.bool)
    for row in range(rows):
        for node in range(nodes):
            if node > 0:
                parent = int(torch.randint(0, node, (1,), generator=generator))
                mask[row, node] = mask[row, parent]
            mask[row, node, node] = True
    return mask


def make_sinks(heads: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """[heads]: sinks that weigh nothing, as much as the scores, and almost all."""
    return torch.linspace(-30.0, 12.0, heads).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=tolerance, atol=tolerance
    )
