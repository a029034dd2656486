"""Argument checks shared by the attention launchers; they read shapes, never values."""

from __future__ import annotations

from torch import Tensor

MAX_HEAD_DIM = 256


def check_page_size(page_size: int) -> None:
    """Raises:
    ValueError: not a power of two.
    """
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(
            f"page_size={page_size}: the Triton kernels need a power of two"
        )


def check_dtypes(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
    """Check that there is one dtype, except for caches of 8 bits.

    Raises:
        ValueError: there are several.
    """
    is_one = k_cache.dtype == v_cache.dtype and q.dtype == out.dtype
    if not is_one or (k_cache.dtype != q.dtype and k_cache.dtype.itemsize > 1):
        raise ValueError(
            f"q is {q.dtype}, k_cache {k_cache.dtype}, v_cache {v_cache.dtype}, "
            f"out {out.dtype}: pass one dtype, or caches of 8 bits"
        )


def check_inputs(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    *,
    page_size: int,
    sinks: Tensor | None,
) -> None:
    """Reject what the kernels cannot address.

    Raises:
        ValueError: naming the argument, its value and what is expected.
    """
    _, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    check_page_size(page_size)
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim={head_dim}: the Triton kernels need a multiple of 8 up to "
            f"{MAX_HEAD_DIM}"
        )
    if q_heads % kv_heads:
        raise ValueError(
            f"q has {q_heads} heads, the cache {kv_heads}: pass a multiple"
        )
    check_dtypes(q, k_cache, v_cache, out)
    for name, tensor in (("q", q), ("out", out)):
        if tensor.stride(2) != 1 or (q_heads > 1 and tensor.stride(1) != head_dim):
            raise ValueError(
                f"{name} has strides {tensor.stride()}: heads and channels must be "
                "contiguous"
            )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride(2) != 1:
            raise ValueError(
                f"{name} has strides {cache.stride()}: channels must be contiguous"
            )
    if sinks is not None and (sinks.shape != (q_heads,) or sinks.stride(0) != 1):
        raise ValueError(
            f"sinks is {tuple(sinks.shape)}: pass one contiguous logit for each of the "
            f"{q_heads} query heads"
        )
