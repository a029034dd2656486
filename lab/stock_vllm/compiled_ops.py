"""Takes the place of vLLM's compiled `_C_stable_libtorch`, where no CUDA library is.

A dense model with Triton attention and `custom_ops: none` calls few of its 300 ops.
These are here, in torch; a call of any other one fails by name.
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
setattr(torch.ops._C_cache_ops, swap_blocks_batch.__name__, swap_blocks_batch)
