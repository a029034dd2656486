"""Rows of a paged pool for one attention layer, and two backends over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.srt.forward.batch import ForwardBatch, ForwardMode, HostLens
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.cpu_backends import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEAD_DIM = 64
PAGE_SIZES = [1, 4, 16, 64]
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Rows with shuffled pages, and the two backends over one pool."""

    batch: ForwardBatch
    layer: RadixAttention
    qkv: Tensor
    pool: MHATokenToKVPool
    rows: ReqToTokenPool

    def outputs(self, backend: AttentionBackend) -> Tensor:
        heads = self.layer.num_heads, self.layer.num_kv_heads, self.layer.num_kv_heads
        q, k, v = self.qkv.clone().split(heads, dim=1)
        out = torch.full_like(q, 7.0, memory_format=torch.contiguous_format)
        backend.init_eager(self.batch)
        backend.forward(q, k, v, self.layer, self.batch, out=out)
        return out

    def make(self, backend: Callable[..., AttentionBackend]) -> AttentionBackend:
        return backend(req_to_token_pool=self.rows, kv_pool=self.pool)

    def expected(self) -> Tensor:
        return self.outputs(self.make(TorchNativeAttnBackend))

    def compare(self, backend: Callable[..., AttentionBackend]) -> None:
        with torch.inference_mode():
            expected = self.expected()
            assert_close(self.outputs(self.make(backend)), expected)

    def shortened(self, prefix_lens: list[int]) -> Problem:
        """The same rows over shorter prefixes, in the same tensors."""
        batch = self.batch
        assert batch.lens_cpu is not None
        new = batch.lens_cpu.extend_lens
        slots = [
            self.rows.row_slots(row, prefix, prefix + count)
            for row, prefix, count in zip(
                batch.req_pool_indices.tolist(), prefix_lens, new, strict=True
            )
        ]
        batch.out_cache_loc.copy_(torch.cat(slots))
        batch.prefix_lens.copy_(torch.tensor(prefix_lens))
        batch.seq_lens.copy_(batch.prefix_lens + batch.extend_lens)
        lens = HostLens(prefix_lens=prefix_lens, extend_lens=new)
        return dataclasses.replace(
            self, batch=dataclasses.replace(batch, lens_cpu=lens)
        )


def make_problem(
    *,
    page_size: int,
    prefix_lens: list[int],
    new_lens: list[int] | None = None,
    heads: tuple[int, int] = (8, 2),
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tree_nodes: int = 0,
    mode: ForwardMode | None = None,
) -> Problem:
    """Decode without `new_lens`; verification of random trees with `tree_nodes`."""
    rng = torch.Generator().manual_seed(page_size)
    count = len(prefix_lens)
    new_lens = [tree_nodes] * count if tree_nodes else new_lens
    if mode is None:
        mode = ForwardMode.EXTEND if new_lens else ForwardMode.DECODE
        mode = ForwardMode.TARGET_VERIFY if tree_nodes else mode
    lens = new_lens or [1] * count
    ends = [a + b for a, b in zip(prefix_lens, lens, strict=True)]
    pages = [-(-end // page_size) for end in ends]
    size = (sum(pages) + 3) * page_size
    order = (torch.randperm(sum(pages) + 3, generator=rng) + 1) * page_size
    rows = ReqToTokenPool(size=count, row_width=1024, device=DEVICE, context_len=1024)
    indices = rows.alloc(count)
    assert indices is not None
    written, taken = [], 0
    for row, begin, end, held in zip(indices, prefix_lens, ends, pages, strict=True):
        first = order[taken : taken + held]
        taken += held
        slots = (first[:, None] + torch.arange(page_size)).flatten()[:end]
        rows.write(row, 0, slots)
        written.append(slots[begin:end])
    pool = MHATokenToKVPool(
        size=size,
        page_size=page_size,
        dtype=dtype,
        layer_num=1,
        head_num=heads[1],
        head_dim=HEAD_DIM,
        device=DEVICE,
    )
    for buffer in (pool.k_buffer, pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=rng))
    layer = RadixAttention(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=HEAD_DIM,
        layer_id=0,
        scaling=0.17,
        sliding_window=window,
    )
    tokens = sum(lens)
    qkv = torch.randn(tokens, heads[0] + 2 * heads[1], HEAD_DIM, generator=rng)
    new, prefix = torch.tensor(lens).to(DEVICE), torch.tensor(prefix_lens).to(DEVICE)
    identity = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    batch = ForwardBatch(
        forward_mode=mode,
        input_ids=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
        positions=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
        out_cache_loc=torch.cat(written).to(DEVICE),
        req_pool_indices=torch.tensor(indices).to(DEVICE),
        prefix_lens=prefix,
        extend_lens=new,
        seq_lens=prefix + new,
        req_serial=identity,
        salt=identity,
        rids_int=identity,
        qo_indptr=torch.nn.functional.pad(new.cumsum(0), (1, 0)),
        lens_cpu=HostLens(prefix_lens=prefix_lens, extend_lens=lens),
        tree_mask=random_trees(count, tree_nodes, rng) if tree_nodes else None,
    )
    return Problem(
        batch=batch, layer=layer, qkv=qkv.to(DEVICE, dtype), pool=pool, rows=rows
    )


def random_trees(rows: int, nodes: int, rng: torch.Generator) -> Tensor:
    """[rows, nodes, nodes] bool: a node attends itself and the ancestors it drew."""
    mask = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
    for row in range(rows):
        for node in range(1, nodes):
            parent = int(torch.randint(-1, node, (), generator=rng))
            if parent >= 0:
                mask[row, node] |= mask[row, parent]
    return mask.to(DEVICE)
