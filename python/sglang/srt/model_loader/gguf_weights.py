"""Tensors of a GGUF file under the names and in the layout of a checkpoint folder."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sglang.srt.configs.gguf_config import (
    TOP_TENSORS,
    GgufArchitecture,
    gguf_architecture,
    gguf_heads,
)
from sglang.srt.configs.gguf_rope import ROPE_FACTORS
from sglang.srt.utils.gguf_header import GgufTensor, read_gguf_header
from sglang.srt.utils.json_file import shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

NORM_SUFFIX = "norm.weight"


def gguf_tensor_names(path: Path) -> frozenset[str]:
    """Return the checkpoint's names of all tensors. Reads no data.

    Raises:
        ValueError: as in `iterate_gguf`, except for errors in the data.
    """
    header = read_gguf_header(path)
    known = gguf_architecture(header)
    return frozenset(
        _checkpoint_name(name, known, path)
        for name in header.tensors
        if name != ROPE_FACTORS
    )


def iterate_gguf(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor float32) for every tensor, dequantised.

    Raises:
        ValueError: an unsupported architecture, a tensor of another one, an unknown
            block format, or a truncated file. The message names file and tensor.
    """
    quants = _block_formats(path)
    header = read_gguf_header(path)
    known = gguf_architecture(header)
    rotated = gguf_heads(header) if known.pairs_rotary else {}
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        for name, tensor in header.tensors.items():
            if name == ROPE_FACTORS:
                continue
            own_name = _checkpoint_name(name, known, path)
            where = f"{path}: tensor {shown(name)}"
            # Infinities and NaN come from the file; numpy would warn about each.
            with np.errstate(all="ignore"):
                values = _dequantize(quants, tensor, data, where=where)
                if known.norm_offset and name.endswith(NORM_SUFFIX):
                    values -= np.float32(known.norm_offset)
            if heads := rotated.get(name.split(".")[-2]):
                values = _halves(values, heads, where=where)
            yield own_name, torch.from_numpy(values)


def _block_formats(path: Path) -> Any:
    """Import the library's module of block formats."""
    try:
        from gguf import quants
    except ImportError as error:
        raise ValueError(
            f"{path}: GGUF files need the package gguf: pip install "
            "'sglang-canary[gguf]'"
        ) from error
    return quants


def _dequantize(
    quants: Any, tensor: GgufTensor, data: mmap.mmap, *, where: str
) -> Floats:
    try:
        kind = quants.GGMLQuantizationType(tensor.kind)
        shape = quants.quant_shape_to_byte_shape(tensor.shape, kind)
    except ValueError as error:
        raise ValueError(
            f"{where} has an unknown format, or a row length that does not fit it: "
            f"{error}"
        ) from error
    size = math.prod(shape)
    left = max(len(data) - tensor.offset, 0)
    if size > left:
        raise ValueError(
            f"{where} needs {size} bytes at {tensor.offset}, but {left} are left; "
            "the file is truncated: download it again"
        )
    part = data[tensor.offset : tensor.offset + size]
    try:
        values = quants.dequantize(
            np.frombuffer(part, dtype=np.uint8).reshape(shape), kind
        )
    except NotImplementedError as error:
        raise ValueError(
            f"{where} has the format {kind.name}, which is not supported"
        ) from error
    return np.array(values, dtype=np.float32).reshape(tensor.shape)


def _checkpoint_name(name: str, known: GgufArchitecture, path: Path) -> str:
    """Map a name: `blk.3.ffn_up.weight` -> `model.layers.3.mlp.up_proj.weight`."""
    if name in TOP_TENSORS:
        return TOP_TENSORS[name]
    match name.split("."):
        case ["blk", layer, module, ("weight" | "bias") as part]:
            if layer.isdecimal() and module in known.layer_tensors:
                own = known.layer_tensors[module]
                return f"model.layers.{layer}.{own}.{part}"
    raise ValueError(f"{path}: tensor {shown(name)} has no place in {known.model}")


def _halves(values: Floats, num_heads: int, *, where: str) -> Floats:
    """Reorder rows per head: from pairs `[x0, y0, x1, ..]` to halves `[x0.., y0..]`."""
    if len(values) % (2 * num_heads):
        raise ValueError(
            f"{where} has {len(values)} rows, which do not form pairs for "
            f"{num_heads} heads"
        )
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
