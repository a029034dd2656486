"""Takes the place of vLLM's compiled `_C_stable_libtorch`, where no CUDA library is.

A model of dense layers, of K and V or of latents, with Triton attention and
`custom_ops: none` calls few of its 300 ops. These are here, in torch; a call of any
other one fails by name.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor
from torch.nn import functional

_TYPES = {
    torch.bool: "|b1",
    torch.uint8: "|u1",
    torch.int8: "|i1",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.float32: "<f4",
    torch.float64: "<f8",
}


class _Memory:
    """Memory that a GPU can address, as torch takes it from other libraries."""

    def __init__(self, host: Tensor) -> None:
        self.host = host  # keeps it alive
        size = host.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "strides": tuple(stride * size for stride in host.stride()),
            "typestr": _TYPES[host.dtype],
            "data": (host.data_ptr(), False),
            "version": 2,
        }


def get_cuda_view_from_cpu_tensor(tensor: Tensor) -> Tensor:
    """Return the same pinned memory as a tensor of the GPU."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
    return torch.as_tensor(_Memory(tensor), device="cuda")


def weak_ref_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor itself: its memory is kept longer than by the compiled op."""
    return tensor


def rms_norm(out: Tensor, x: Tensor, weight: Tensor | None, epsilon: float) -> None:
    out.copy_(functional.rms_norm(x, x.shape[-1:], weight, epsilon))


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float
) -> None:
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(functional.silu(gate) * up)


def gelu_tanh_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(functional.gelu(gate, approximate="tanh") * up)


def swap_blocks_batch(
    src: Tensor, dst: Tensor, sizes: Tensor, any_order: bool = False
) -> None:
    """Copy `sizes` bytes from each of the addresses `src` to `dst`, one after the other
    in the current stream."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    triples = zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True)
    for begin, target, size in triples:
        error = _runtime().cudaMemcpyAsync(
            ctypes.c_void_p(target),
            ctypes.c_void_p(begin),
            ctypes.c_size_t(size),
            _BY_ADDRESS,
            stream,
        )
        if error:
            raise RuntimeError(f"cudaMemcpyAsync: error {error}")


def concat_and_cache_mla(
    latent: Tensor,
    rotated: Tensor,
    cache: Tensor,
    slots: Tensor,
    cache_dtype: str,
    scale: Tensor,
    skip_scale: bool = False,
) -> None:
    """Store a latent per token; nothing for a slot of -1.

    Args:
        latent, rotated: [tokens, size] each, stored next to each other.
        cache: [blocks, slots of a block, both sizes].

    Raises:
        NotImplementedError: the cache has 8 bits.
    """
    _require_whole(cache_dtype)
    rows = torch.cat((latent, rotated), dim=-1)[: len(slots)].to(cache.dtype)
    # Padding writes what is there to slot 0, of a block that no request has: in a graph
    # it cannot be left out.
    index = slots.clamp(min=0)
    flat = cache.view(-1, cache.shape[-1])
    flat[index] = torch.where(slots[:, None] >= 0, rows, flat[index])


def gather_and_maybe_dequant_cache(
    cache: Tensor,
    out: Tensor,
    block_table: Tensor,
    starts_in_out: Tensor,
    row_of_token: Tensor,
    num_tokens: int,
    cache_dtype: str,
    scale: Tensor,
    starts: Tensor | None = None,
) -> None:
    """Copy the slots of some requests' tokens into `out`, one request after another.

    Args:
        cache: [blocks, slots of a block, size]. block_table: [requests, blocks].
        starts_in_out: int32 [requests + 1]. starts: each request's first position, or
            0.
        row_of_token: int32, the request of each row of `out`.

    Raises:
        NotImplementedError: the cache has 8 bits.
    """
    _require_whole(cache_dtype)
    row = row_of_token[:num_tokens].long()
    position = torch.arange(num_tokens, device=row.device) - starts_in_out[row]
    if starts is not None:
        position = position + starts[row]
    block_size = cache.shape[1]
    block = block_table[row, position // block_size].long()
    out[:num_tokens] = cache[block, position % block_size]


def _require_whole(cache_dtype: str) -> None:
    if cache_dtype not in ("auto", "bfloat16", "float16"):
        raise NotImplementedError(f"a KV cache of {cache_dtype}: only 16 bits are here")


def merge_attn_states(
    output: Tensor,
    output_lse: Tensor | None,
    prefix: Tensor,
    prefix_lse: Tensor,
    suffix: Tensor,
    suffix_lse: Tensor,
    num_with_prefix: int | None = None,
    output_scale: Tensor | None = None,
) -> None:
    """Join attention over a prefix with that over the tokens behind it (section 2.2 of
    https://arxiv.org/abs/2501.01005).

    Args:
        output, prefix, suffix: [tokens, heads, size]. *_lse: [heads, tokens].
        num_with_prefix: tokens, from the first one, that have a prefix; None: all.

    Raises:
        NotImplementedError: the output has 8 bits.
    """
    if output_scale is not None:
        raise NotImplementedError("an output of 8 bits")
    end = len(output) if num_with_prefix is None else num_with_prefix
    lse = torch.stack((prefix_lse[:, :end], suffix_lse[:, :end])).float()
    of_prefix, of_suffix = lse.softmax(dim=0).transpose(1, 2)[..., None]
    joined = of_prefix * prefix[:end].float() + of_suffix * suffix[:end].float()
    output[end:] = suffix[end:]
    output[:end] = joined.to(output.dtype)
    if output_lse is not None:
        output_lse[:, end:] = suffix_lse[:, end:]
        output_lse[:, :end] = lse.logsumexp(dim=0)


_BY_ADDRESS = 4
"""`cudaMemcpyDefault`: the addresses say which way."""


@functools.cache
def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded."""
    version = str(torch.version.cuda).partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{version}")


def _unsupported(capability: int) -> bool:
    """Answer whether this build has a kernel."""
    return False


_OPS = {
    op.__name__: op
    for op in (
        get_cuda_view_from_cpu_tensor,
        weak_ref_tensor,
        rms_norm,
        fused_add_rms_norm,
        silu_and_mul,
        gelu_tanh_and_mul,
        merge_attn_states,
    )
} | dict.fromkeys(
    (
        "cutlass_scaled_mm_supports_fp8",
        "cutlass_scaled_mm_supports_block_fp8",
        "cutlass_scaled_mm_supports_fp4",
    ),
    _unsupported,
)


for _name, _op in _OPS.items():
    setattr(torch.ops._C, _name, _op)
for _op in (swap_blocks_batch, concat_and_cache_mla, gather_and_maybe_dequant_cache):
    setattr(torch.ops._C_cache_ops, _op.__name__, _op)
