"""Typed functions over the native CPU ops. Every one checks its arguments and raises
`RuntimeError` naming the argument; none allocates a result.

Tensors are float32, bfloat16 or float16 on the CPU unless said; sums are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_kernels.library import load_library

load_library()

_OPS = torch.ops.sglang_kernels
# The builtin behind an op: calling it directly saves a Python frame per call.
_rmsnorm = _OPS.rmsnorm.default._op
_fused_add_rmsnorm = _OPS.fused_add_rmsnorm.default._op
_silu_and_mul = _OPS.silu_and_mul.default._op
_rope_store_kv = _OPS.rope_store_kv.default._op
_decode_attention = _OPS.decode_attention.default._op
_extend_attention = _OPS.extend_attention.default._op
_packed_linear = _OPS.packed_linear.default._op
_exp = _OPS.exp.default._op
_canary_verify = _OPS.canary_verify.default._op
_canary_write_head = _OPS.canary_write_head.default._op
_canary_write_tail = _OPS.canary_write_tail.default._op
_canary_poison = _OPS.canary_poison.default._op
_canary_advance_lineage = _OPS.canary_advance_lineage.default._op
_canary_before_model = _OPS.canary_before_model.default._op
_canary_finish = _OPS.canary_finish.default._op


def rmsnorm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / sqrt(mean(x ** 2) + eps) * weight.

    Args:
        x: [..., H], contiguous, or two dimensions with contiguous rows.
        weight: [H]; out: like x, contiguous, may be x.
    """
    _rmsnorm(x, weight, eps, out)


def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """residual += x; x = rmsnorm(residual) * weight; both [..., H] contiguous."""
    _fused_add_rmsnorm(x, residual, weight, eps)


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    """out [T, I] = silu(x[:, :I]) * x[:, I:]; rows of x contiguous, out contiguous."""
    _silu_and_mul(x, out)


def rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    out_cache_loc: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
) -> None:
    """q = rope(norm(q)); k_cache[loc] = rope(norm(k)); v_cache[loc] = v.

    Args:
        q: [T, Hq, D]; k, v: [T, Hkv, D]; any token stride.
        positions, out_cache_loc: [T] int64.
        cos_sin_cache: [max_position, rot] float32 or None.
        k_cache, v_cache: [slots, Hkv, D].
        q_norm_weight, k_norm_weight: [D] or None.
    """
    _rope_store_kv(
        q,
        k,
        v,
        positions,
        cos_sin_cache,
        k_cache,
        v_cache,
        out_cache_loc,
        q_norm_weight,
        k_norm_weight,
        eps,
    )


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_index: Tensor | None,
    read_lens: Tensor,
    page_size: int,
    sm_scale: float,
    window: int,
    out: Tensor,
) -> None:
    """One query per row over KV elements 0 .. read_lens[r] - 1 (the newest `window`).

    Args:
        q, out: [R, Hq, D]; k_cache, v_cache: [slots, Hkv, D].
        page_table: [rows, columns] int32, first slots of pages, any strides.
        row_index: [R] int64 or None; read_lens: [R] int64.
    """
    _decode_attention(
        q,
        k_cache,
        v_cache,
        page_table,
        row_index,
        read_lens,
        page_size,
        sm_scale,
        window,
        out,
    )


def extend_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_index: Tensor | None,
    qo_indptr: Tensor,
    prefix_lens: Tensor,
    page_size: int,
    sm_scale: float,
    window: int,
    tree_mask: Tensor | None,
    out: Tensor,
) -> None:
    """Causal (or tree-masked) attention of several new tokens per row.

    Args:
        q, out: [T, Hq, D]; k_cache, v_cache: [slots, Hkv, D].
        page_table: [rows, columns] int32, first slots of pages, any strides.
        row_index: [R] int64 or None; qo_indptr: [R + 1] int64; prefix_lens: [R] int64.
        tree_mask: [R, N, N] bool, contiguous, or None.
    """
    _extend_attention(
        q,
        k_cache,
        v_cache,
        page_table,
        row_index,
        qo_indptr,
        prefix_lens,
        page_size,
        sm_scale,
        window,
        tree_mask,
        out,
    )


def packed_linear(
    x: Tensor, weight: Tensor, n: int, bias: Tensor | None, out: Tensor
) -> None:
    """out [..., N] = x [..., K] @ W.T + bias; float32.

    Args:
        weight: [ceil(N / 32), K, 32] float32 or bfloat16, as `pack_weight` makes it.
        bias: [N] float32 or None.
    """
    _packed_linear(x, weight, n, bias, out)


def canary_verify(
    state: list[Tensor],
    rows: list[Tensor | None],
    table: list[Tensor | None],
    k_words: Tensor | None,
    v_words: Tensor | None,
    req_to_token: Tensor | None,
    tokens: Tensor | None,
    numbers: list[int],
) -> None:
    """Check the records of all slots that a forward is about to read.

    Args:
        state, rows, table: fields of the canary's state, rows and read table, in the
            order that `csrc/cpu/canary.cpp` takes them.
        k_words, v_words: [layers, slots, words] int64 or None.
        req_to_token, tokens: [rows, columns] int32 or None.
        numbers: page size, token offset, fingerprint mode, rotation period, tree
            depth, manager, pool.
    """
    _canary_verify(state, rows, table, k_words, v_words, req_to_token, tokens, numbers)


def canary_write_head(
    state: list[Tensor],
    rows: list[Tensor | None],
    req_to_token: Tensor | None,
    oracle_tokens: Tensor | None,
    oracle_positions: Tensor | None,
    numbers: list[int],
) -> None:
    """Check the slots of the new tokens and write their head records.

    Args:
        numbers: page size, writer kind, fingerprint mode, rotation period, tree depth,
            manager, pool.
    """
    _canary_write_head(
        state, rows, req_to_token, oracle_tokens, oracle_positions, numbers
    )


def canary_write_tail(
    state: list[Tensor],
    rows: list[Tensor | None],
    k_words: Tensor | None,
    v_words: Tensor | None,
    numbers: list[int],
) -> None:
    """Compare the head records with this forward, write the tail records, advance the
    clock; `numbers` as in `canary_write_head`."""
    _canary_write_tail(state, rows, k_words, v_words, numbers)


def canary_poison(state: list[Tensor], slots: Tensor, n_live: Tensor | None) -> None:
    """Poison the records of slots [n] int64, or of the first n_live[0] of them."""
    _canary_poison(state, slots, n_live)


def canary_advance_lineage(
    state: list[Tensor], rows: list[Tensor | None], max_depth: int
) -> None:
    """Add the terms of the rows' new tokens to their expected lineages."""
    _canary_advance_lineage(state, rows, max_depth)


def exp(x: Tensor, out: Tensor) -> None:
    """out = e ** x with the exponential that the kernels use; float32 [N]."""
    _exp(x, out)


def simd_level() -> str:
    """The SIMD level in use: avx512, avx2 or baseline."""
    return str(_OPS.simd_level.default())


def set_simd_level(name: str) -> None:
    """Use a level by name, or `auto` for the best one; process-wide, for tests.

    Raises:
        RuntimeError: unknown name, or the processor does not have it.
    """
    _OPS.set_simd_level.default(name)


def canary_finish(
    state: list[Tensor],
    rows: list[Tensor | None],
    token_ids: Tensor,
    max_depth: int,
    out: Tensor,
) -> None:
    """`canary_advance_lineage`; out = tokens, verdicts (cleared), ring entries,
    counters."""
    _canary_finish(state, rows, token_ids, max_depth, out)


def canary_before_model(
    state: list[Tensor],
    rows: list[Tensor | None],
    table: list[Tensor | None],
    k_words: Tensor | None,
    v_words: Tensor | None,
    req_to_token: Tensor,
    tokens: Tensor | None,
    oracle_tokens: Tensor | None,
    oracle_positions: Tensor | None,
    numbers: list[int],
) -> None:
    """`canary_verify`, then `canary_write_head`; `numbers` are those of verify and the
    writer kind."""
    _canary_before_model(
        state,
        rows,
        table,
        k_words,
        v_words,
        req_to_token,
        tokens,
        oracle_tokens,
        oracle_positions,
        numbers,
    )
