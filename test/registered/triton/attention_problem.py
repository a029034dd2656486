"""Paged KV with new tokens, and attention over it beside the torch references."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang.srt.layers.ops.attention.decode.launch import (
    DecodeWorkspace,
    decode_attention,
    decode_workspace,
)
from sglang.srt.layers.ops.attention.extend.inputs import ExtendInputs
from sglang.srt.layers.ops.attention.extend.launch import extend_attention
from sglang.srt.layers.ops.attention.extend.table import ExtendTile
from sglang.srt.layers.ops.attention.extend_split.launch import (
    ExtendWorkspace,
    extend_split,
    extend_workspace,
)
from sglang.srt.layers.ops.attention.op import (
    decode_attention_ref,
    extend_attention_ref,
)
from sglang.srt.mem_cache.kv_dtype import to_stored
from sglang.test.scale import is_full

ON_GPU = torch.cuda.is_available()
on_hopper = pytest.mark.skipif(
    not ON_GPU or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernel runs on compute capability 9.0 alone",
)
# (query heads, KV heads): groups of 1, 4, 8, 3 and 20.
HEADS = [(2, 2), (4, 1), (8, 1), (6, 2), (20, 1)]

DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter gets bf16 wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NAN = float("nan")


def head_cases(*head_dims: int) -> list[tuple[tuple[int, int], int]]:
    """Every heads with every head size; of the interpreter, which is slow, every heads
    and every size once."""
    if ON_GPU or is_full():
        return list(itertools.product(HEADS, head_dims))
    return [
        (HEADS[i % len(HEADS)], head_dims[i % len(head_dims)])
        for i in range(max(len(HEADS), len(head_dims)))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Rows with a prefix and new tokens; every slot that no row owns holds NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    row_index: Tensor | None
    prefix_lens: Tensor
    new_lens: Tensor
    page_size: int
    sm_scale: float
    k_new: Tensor | None = None
    v_new: Tensor | None = None

    def stored_as(self, kv: torch.dtype) -> Problem:
        """The same with K and V of 8 bits."""
        return replace(
            self,
            k_cache=to_stored(self.k_cache, kv, 1.0),
            v_cache=to_stored(self.v_cache, kv, 1.0),
        )

    @property
    def qo_indptr(self) -> Tensor:
        return torch.nn.functional.pad(self.new_lens.cumsum(0), (1, 0))

    def slot(self, row: int, element: int) -> int:
        table_row = row if self.row_index is None else int(self.row_index[row])
        page, offset = divmod(element, self.page_size)
        return int(self.page_table[table_row, page]) + offset

    @property
    def _extend_inputs(self) -> dict[str, Any]:
        return {
            "page_table": self.page_table,
            "row_index": self.row_index,
            "qo_indptr": self.qo_indptr,
            "prefix_lens": self.prefix_lens,
            "page_size": self.page_size,
            "sm_scale": self.sm_scale,
        }

    def with_positions(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options of an extend; a tree's positions are those of the depths in its
        mask."""
        mask = options.get("tree_mask")
        if mask is None or "positions" in options:
            return options
        positions = self.prefix_lens[:, None] + mask.sum(-1) - 1
        return {**options, "positions": positions.flatten()}

    def extend(self, *, max_context: int | None = None, **options: Any) -> None:
        """Compare one extend launch with the reference; with `max_context`, one that
        has a workspace for rows of so many elements.

        `options`: window, logit_cap, sinks, tree_mask, positions.
        """
        common = {**self._extend_inputs, **self.with_positions(options)}
        common |= {"k_new": self.k_new, "v_new": self.v_new}
        workspace = None if max_context is None else self.workspace(max_context)
        out, expected = torch.full_like(self.q, 7.0), torch.full_like(self.q, 7.0)
        caches = (self.k_cache, self.v_cache)
        extend_attention_ref(self.q, *caches, **common, out=expected)
        extend_attention(self.q, *caches, **common, out=out, workspace=workspace)
        assert_same(out, expected)

    def split(self, tile: ExtendTile, splits: int, **options: Any) -> None:
        """Compare one launch of the split kernels with the reference; options as of
        `extend`."""
        common = {**self._extend_inputs, **self.with_positions(options)}
        out, expected = torch.full_like(self.q, 7.0), torch.full_like(self.q, 7.0)
        caches = (self.k_cache, self.v_cache)
        extend_attention_ref(self.q, *caches, **common, out=expected)
        extend_split(
            self.extend_inputs(out, **options),
            tile=tile,
            splits=splits,
            workspace=self.workspace(4096),
        )
        assert_same(out, expected)

    def extend_inputs(self, out: Tensor, **options: Any) -> ExtendInputs:
        """Arguments of the launchers below `extend_attention`; options as there."""
        return ExtendInputs(
            q=self.q,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            **self._extend_inputs,
            **self.with_positions(options),
            out=out,
        )

    def workspace(self, max_context: int) -> ExtendWorkspace:
        """A workspace that holds NaN, as one that was used before may."""
        workspace = extend_workspace(
            head_dim=self.q.shape[2], max_context=max_context, device=DEVICE
        )
        workspace.partial.fill_(NAN)
        workspace.lse.fill_(NAN)
        return workspace

    @property
    def new_slots(self) -> Tensor:
        """int64 [tokens], slots of the new tokens."""
        return torch.tensor(
            [
                self.slot(row, element)
                for row, new in enumerate(self.new_lens.tolist())
                for prefix in [int(self.prefix_lens[row])]
                for element in range(prefix, prefix + new)
            ],
            dtype=torch.long,
            device=DEVICE,
        )

    def with_new_kv(self) -> Problem:
        """The same, with new K and V as a model leaves them: views into one tensor,
        NaN after the last token. Of the new tokens the pool holds NaN.
        """
        slots = self.new_slots
        rows, heads = self.q.shape[0], self.k_cache.shape[1]
        packed = self.k_cache.new_full((rows, 3 * heads, self.q.shape[2]), NAN)
        packed[: len(slots), heads : 2 * heads] = self.k_cache[slots]
        packed[: len(slots), 2 * heads :] = self.v_cache[slots]
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        k_cache[slots] = v_cache[slots] = NAN
        return replace(
            self,
            k_cache=k_cache,
            v_cache=v_cache,
            k_new=packed[:, heads : 2 * heads],
            v_new=packed[:, 2 * heads :],
        )

    def decode_workspace(self, max_context: int) -> DecodeWorkspace:
        """A workspace of decode launches that holds NaN, as one that was used may."""
        workspace = decode_workspace(
            rows=len(self.prefix_lens),
            q_heads=self.q.shape[1],
            kv_heads=self.k_cache.shape[1],
            head_dim=self.q.shape[2],
            max_context=max_context,
            device=DEVICE,
        )
        workspace.partial.fill_(NAN)
        workspace.lse.fill_(NAN)
        return workspace

    def decode(
        self,
        *,
        max_context: int = 4096,
        workspace: DecodeWorkspace | None = None,
        **options: Any,
    ) -> Tensor:
        """Compare one decode launch, one query per row, with the reference; its result.

        `options`: window, logit_cap, sinks.
        """
        q = self.q[: len(self.prefix_lens)]
        if workspace is None:
            workspace = self.decode_workspace(max_context)
        out, expected = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
        common = {
            "page_table": self.page_table,
            "row_index": self.row_index,
            "read_lens": self.prefix_lens + self.new_lens,
            "page_size": self.page_size,
            "sm_scale": self.sm_scale,
            **options,
        }
        decode_attention_ref(q, self.k_cache, self.v_cache, **common, out=expected)
        decode_attention(
            q, self.k_cache, self.v_cache, **common, out=out, workspace=workspace
        )
        assert_same(out, expected)
        assert not workspace.counters.any()
        return out


def assert_same(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def make_problem(
    *,
    prefix_lens: list[int],
    new_lens: list[int],
    heads: tuple[int, int] = (4, 1),
    head_dim: int = 64,
    page_size: int = 1,
    dtype: torch.dtype = torch.float32,
    has_row_index: bool = True,
    seed: int = 0,
) -> Problem:
    """Shuffled pages, a strided q, a transposed page table, NaN in every other slot."""
    rng = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    rows, tokens = len(prefix_lens), sum(new_lens)
    lens = [a + b for a, b in zip(prefix_lens, new_lens, strict=True)]
    pages = [-(-length // page_size) for length in lens]
    total_pages = sum(pages) + 3
    slots = (total_pages + 1) * page_size
    order = torch.randperm(total_pages, generator=rng).to(torch.int32) * page_size

    table_rows = rows + 2
    # Columns past a row's pages point at slots that hold NaN, or at none at all.
    table = torch.full((max(pages) + 1, table_rows), slots - 1, dtype=torch.int32)
    row_index = torch.arange(rows)
    if has_row_index:
        row_index = torch.randperm(table_rows, generator=rng)[:rows]
    k_cache = torch.full((slots, kv_heads, head_dim), NAN)
    v_cache = torch.full((slots, kv_heads, head_dim), NAN)
    taken = 0
    for row, count in enumerate(pages):
        own = order[taken : taken + count]
        taken += count
        table[:count, row_index[row]] = own
        element = torch.arange(lens[row])
        slot = own[element // page_size].long() + element % page_size
        for cache in (k_cache, v_cache):
            cache[slot] = torch.randn(len(slot), kv_heads, head_dim, generator=rng)
    q = torch.randn(max(tokens, rows), q_heads * head_dim + 16, generator=rng)
    return Problem(
        q=q.to(DEVICE, dtype)[:, : q_heads * head_dim].unflatten(1, (q_heads, -1)),
        k_cache=k_cache.to(DEVICE, dtype),
        v_cache=v_cache.to(DEVICE, dtype),
        page_table=table.to(DEVICE).t(),
        row_index=row_index.to(DEVICE) if has_row_index else None,
        prefix_lens=torch.tensor(prefix_lens, device=DEVICE),
        new_lens=torch.tensor(new_lens, device=DEVICE),
        page_size=page_size,
        sm_scale=head_dim**-0.5,
    )


def make_sinks(heads: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """[heads]: sinks that weigh nothing, as much as the scores, and almost all."""
    return torch.linspace(-30.0, 12.0, heads).to(DEVICE, dtype)


def random_trees(rows: int, nodes: int, seed: int) -> Tensor:
    """[rows, nodes, nodes] bool: a node attends itself and the ancestors it drew."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
    for row in range(rows):
        for node in range(1, nodes):
            parent = int(torch.randint(-1, node, (), generator=rng))
            if parent >= 0:
                mask[row, node] |= mask[row, parent]
    return mask.to(DEVICE)
