"""The Triton functions that `layers/ops` calls on CUDA tensors, under one name."""

from __future__ import annotations

from sglang.srt.layers.triton_ops.activation import silu_and_mul
from sglang.srt.layers.triton_ops.gemm import choose, gemm, gemm_silu_and_mul
from sglang.srt.layers.triton_ops.norm import fused_add_rmsnorm, rmsnorm
from sglang.srt.layers.triton_ops.rope import rope_store_kv
from sglang.srt.mem_cache.triton_ops.move_kv import move_kv_cache
from sglang.srt.sampling.triton_ops.choose_tokens import choose_tokens

__all__ = [
    "choose",
    "choose_tokens",
    "fused_add_rmsnorm",
    "gemm",
    "gemm_silu_and_mul",
    "move_kv_cache",
    "rmsnorm",
    "rope_store_kv",
    "silu_and_mul",
]
