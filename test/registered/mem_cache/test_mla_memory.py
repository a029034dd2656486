"""Pool of latents: views, moves, bytes."""

from __future__ import annotations

import random

import pytest
import torch

from sglang.srt.mem_cache.mla_memory_pool import (
    MLATokenToKVPool,
    latent_bytes_per_token,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=3, suite="cpu")
register_cuda_ci(est_time=5, suite="cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mla_pool(dtype: torch.dtype = torch.float32) -> MLATokenToKVPool:
    return MLATokenToKVPool(
        size=24,
        page_size=4,
        dtype=dtype,
        layer_num=3,
        kv_lora_rank=24,
        rope_dim=8,
        device=DEVICE,
    )


def test_values_are_the_first_channels_of_keys() -> None:
    pool = mla_pool(torch.bfloat16)
    k, v = pool.get_kv_buffer(1)
    assert k.shape == (28, 1, 32) and v.shape == (28, 1, 24)
    assert v.data_ptr() == k.data_ptr() and not pool.kv_buffer.any()
    again = pool.get_kv_buffer(1)
    assert again[0] is k and again[1] is v
    new = torch.randn(2, 1, 32, device=DEVICE)
    slots = torch.tensor([5, 9], device=DEVICE)
    pool.set_kv_buffer(1, slots, new, new[..., :24])
    assert torch.equal(k[slots], new.bfloat16())
    assert torch.equal(v[slots], new[..., :24].bfloat16())
    assert pool.kv_buffer.count_nonzero() == k[slots].count_nonzero()


def test_moves_read_before_they_write() -> None:
    rng = random.Random(4)
    for _ in range(30):
        pool = mla_pool()
        pool.kv_buffer.normal_()
        dst = rng.sample(range(28), rng.randrange(29))
        src = [rng.randrange(28) for _ in dst]
        expected = pool.kv_buffer.clone()
        expected[:, dst] = pool.kv_buffer[:, src]
        seen = []
        pool.register_on_move(lambda d, s, seen=seen: seen.append(len(d)))
        slots = [torch.tensor(x, device=DEVICE, dtype=torch.int64) for x in (dst, src)]
        pool.move_kv_cache(*slots)
        assert torch.equal(pool.kv_buffer, expected)
        assert seen == [len(dst)]


def test_bytes_are_described_once() -> None:
    pool = mla_pool(torch.bfloat16)
    (source,) = pool.canary_sources()
    assert source.name == "k" and source.bytes_per_slot == 64
    slot = torch.tensor([11], device=DEVICE)
    latent = torch.ones(1, 1, 32, device=DEVICE)
    pool.set_kv_buffer(2, slot, latent, latent[..., :1])
    raw = source.buffer.view(torch.uint8).reshape(-1)
    begin = 2 * source.layer_stride_bytes + 11 * source.slot_stride_bytes
    inside = raw[begin : begin + source.bytes_per_slot].view(torch.bfloat16)
    assert (inside == 1).all() and int(raw.count_nonzero()) == 32 * 2
    width = latent_bytes_per_token(layer_num=3, width=32, dtype=torch.bfloat16)
    assert pool.nbytes == pool.kv_buffer.nbytes == width * 28


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
