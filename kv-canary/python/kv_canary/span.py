"""The memory of several tensors as one tensor.

The memory between them is never touched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_INTEGERS = {
    dtype.itemsize: dtype
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
}


def memory_span(layers: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Return (the memory that holds all layers as one vector of integers, its address).

    The vector does not keep the layers alive. All layers share one dtype and device.
    """
    dtype = _INTEGERS[layers[0].element_size()]
    storages = {
        layer.untyped_storage().data_ptr(): layer.untyped_storage() for layer in layers
    }
    begin = min(storages)
    end = max(at + storage.nbytes() for at, storage in storages.items())
    count = (end - begin) // dtype.itemsize
    device = layers[0].device
    if len(storages) == 1:
        flat = torch.empty(0, dtype=dtype, device=device)
        with torch.no_grad():
            flat.set_(storages[begin], 0, (count,), (1,))
        return flat, begin
    if device.type == "cpu":
        memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(begin)
        return torch.frombuffer(memory, dtype=dtype), begin
    return torch.as_tensor(_CudaMemory(begin, count, dtype), device=device), begin


class _CudaMemory:
    """Device memory in the form in which other libraries pass it to torch."""

    def __init__(self, begin: int, count: int, dtype: torch.dtype) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (count,),
            "typestr": "|i1" if dtype.itemsize == 1 else f"<i{dtype.itemsize}",
            "data": (begin, False),
            "version": 3,
        }


def stack_layers(layers: Sequence[Tensor]) -> Tensor | None:
    """Stack layers of equal shapes and strides as one tensor of integers of their size,
    [layers, *shape], in the order of their addresses. Returns None if they are not
    equally spaced.

    The stack does not keep the layers alive.
    """
    first = layers[0]
    size = first.element_size()
    places = sorted(layer.data_ptr() for layer in layers)
    steps = {after - before for before, after in zip(places, places[1:], strict=False)}
    if len(steps) > 1 or any(step == 0 or step % size for step in steps):
        return None
    step = steps.pop() // size if steps else 0
    flat, begin = memory_span(layers)
    return flat.as_strided(
        (len(layers), *first.shape),
        (step, *first.stride()),
        (places[0] - begin) // size,
    )
