"""Pools of more than 2**31 elements per layer: their last slots are stored, read and
moved.

Without a GPU the pool is memory that is only promised, and interpreted kernels wrap
around at 32 bits as compiled ones do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attention_problem import DEVICE, ON_GPU

from sglang.srt.layers.ops.attention.decode.launch import (
    decode_attention,
    decode_workspace,
)
from sglang.srt.layers.ops.attention.extend.launch import extend_attention
from sglang.srt.layers.ops.attention.extend_split.launch import extend_workspace
from sglang.srt.layers.ops.attention.latent.launch import latent_decode_attention
from sglang.srt.layers.ops.attention.op import decode_attention_ref
from sglang.srt.layers.ops.latent_store.op import latent_store_ref
from sglang.srt.layers.ops.latent_store.triton import latent_store
from sglang.srt.layers.ops.rope.op import rope_store_kv_ref
from sglang.srt.layers.ops.rope.triton import rope_store_kv
from sglang.srt.mem_cache.kv_dtype import KVScales
from sglang.srt.mem_cache.ops.move_kv.op import move_kv_cache_ref
from sglang.srt.mem_cache.ops.move_kv.triton import move_kv_cache
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.lazy_memory import lazy_zeros

register_cpu_ci(est_time=4, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")

KV = torch.float8_e5m2
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
TOKENS, PAGE = 5, 4
LIMIT = 1 << 31


def large(heads: int, dim: int, dtype: torch.dtype = KV) -> Tensor:
    """[slots, heads, dim], of which the last 32 slots lie beyond 2**31 elements."""
    slots = LIMIT // (heads * dim) + 32
    slots += -slots % PAGE
    if ON_GPU:
        return torch.zeros(slots, heads, dim, dtype=dtype, device=DEVICE)
    # Not every dtype can be read from a buffer.
    made = lazy_zeros((slots, heads, dim * dtype.itemsize), torch.uint8)
    return made.view(dtype)


def last_slots(cache: Tensor) -> Tensor:
    return torch.arange(len(cache) - TOKENS, len(cache), device=DEVICE)


def exact(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape).to(DEVICE, DTYPE)


def pages(cache: Tensor) -> dict[str, Any]:
    """The last two pages as a row's, the newest first."""
    starts = [len(cache) - PAGE, len(cache) - 2 * PAGE]
    table = torch.tensor([starts], dtype=torch.int32, device=DEVICE)
    return {"page_table": table, "row_index": None, "page_size": PAGE}


def test_k_and_v() -> None:
    torch.manual_seed(0)
    k_cache, v_cache = large(8, 64), large(8, 64)
    q, k, v = exact(TOKENS, 8, 64), exact(TOKENS, 8, 64), exact(TOKENS, 8, 64)
    slots = last_slots(k_cache)
    store: dict[str, Any] = {
        "positions": torch.arange(TOKENS, device=DEVICE),
        "cos_sin_cache": None,
        "out_cache_loc": slots,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "scales": KVScales(k=0.5, v=0.5),
    }
    for run in (rope_store_kv, rope_store_kv_ref):
        run(q.clone(), k.clone(), v.clone(), **store)
        assert torch.equal(k_cache[slots].float() / 2, k.float())
        assert torch.equal(v_cache[slots].float() / 2, v.float())
        k_cache[slots] = 0
        v_cache[slots] = 0
    rope_store_kv(q.clone(), k.clone(), v.clone(), **store)
    compare_attention(q[:1].contiguous(), k_cache, v_cache)
    for move in (move_kv_cache, move_kv_cache_ref):
        before = k_cache[slots[1:3]].clone(), v_cache[slots[1:3]].clone()
        move(k_cache[None], v_cache[None], dst=slots[:2] - 4, src=slots[1:3])
        moved = k_cache[slots[:2] - 4], v_cache[slots[:2] - 4]
        for found, expected in zip(moved, before, strict=True):
            assert torch.equal(found.float(), expected.float())
        k_cache[slots[:2] - 4] = 0


def compare_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    common = {**pages(k_cache), "sm_scale": 0.125}
    lens = torch.tensor([2 * PAGE], device=DEVICE)
    expected, out = torch.empty_like(q), torch.empty_like(q)
    decode_attention_ref(q, k_cache, v_cache, **common, read_lens=lens, out=expected)
    assert bool(expected.any())
    workspace = decode_workspace(
        rows=1, q_heads=8, kv_heads=8, head_dim=64, max_context=8, device=DEVICE
    )
    decode_attention(
        q, k_cache, v_cache, **common, read_lens=lens, out=out, workspace=workspace
    )
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
    out.zero_()
    extend_attention(
        q,
        k_cache,
        v_cache,
        **common,
        qo_indptr=torch.tensor([0, 1], device=DEVICE),
        prefix_lens=lens - 1,
        out=out,
        workspace=extend_workspace(head_dim=64, max_context=64, device=DEVICE),
    )
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


def test_latents() -> None:
    torch.manual_seed(1)
    rank, rope = 56, 8
    cache = large(1, rank + rope)
    slots = last_slots(cache)
    q, k = exact(TOKENS, 4, rank + rope), exact(TOKENS, 1, rank + rope)
    turn = torch.cat((torch.ones(TOKENS, 4), torch.zeros(TOKENS, 4)), 1).to(DEVICE)
    store: dict[str, Any] = {
        "positions": torch.arange(TOKENS, device=DEVICE),
        "cos_sin_cache": turn,
        "out_cache_loc": slots,
        "k_cache": cache,
        "v_cache": cache[..., :rank],
        "k_norm_weight": torch.ones(rank, device=DEVICE, dtype=DTYPE),
        "eps": 1e-6,
    }
    made = []
    for run in (latent_store, latent_store_ref):
        run(q.clone(), k.clone(), k[..., :rank].clone(), **store)
        made.append(cache[slots].float())
        assert torch.equal(made[-1][..., rank:], k[..., rank:].float())
        if run is latent_store:
            cache[slots] = 0
    assert (made[0] - made[1]).abs().max() <= 0.5  # a code, where it is rounded
    lens, query = torch.tensor([2 * PAGE], device=DEVICE), q[:1].contiguous()
    common = {**pages(cache), "sm_scale": 0.125, "read_lens": lens}
    expected = query.new_empty(1, 4, rank)
    out = torch.empty_like(expected)
    values = cache[..., :rank]
    decode_attention_ref(query, cache, values, **common, out=expected)
    workspace = extend_workspace(head_dim=rank, max_context=64, device=DEVICE)
    latent_decode_attention(
        query, cache, values, **common, out=out, workspace=workspace
    )
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
