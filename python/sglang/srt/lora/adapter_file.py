"""Reads and checks the tensors of a `peft` adapter against the layers of a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sglang.srt.lora.adapter_config import naming
from sglang.srt.model_loader.weight_utils import open_tensors, read_tensor
from sglang.srt.utils.hashing import hash_file
from sglang.srt.utils.json_file import shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sglang.srt.lora.adapter_config import AdapterConfig
    from sglang.srt.lora.layout import AdapterLayout, ModuleShard

WEIGHTS_FILE = "adapter_model.safetensors"
REVISION_BYTES = 8
MAX_HEADER_BYTES = 1 << 20
_PREFIX = re.compile(r"^(?:base_model\.model\.)?")
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")


class Pair(NamedTuple):
    """The whole matrices of one module.

    Fields:
        a: [rank, inputs]. b: [outputs, rank], scaled; float32.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTensors:
    """A checked adapter.

    Fields:
        pairs: by shard of a module of the model.
        rank: largest rank of a pair.
        revision: digest of its content.
    """

    pairs: Mapping[ModuleShard, Pair]
    rank: int
    revision: str


def read_adapter(
    config: AdapterConfig, layout: AdapterLayout, *, max_rank: int, dtype: torch.dtype
) -> AdapterTensors:
    """Read an adapter whose modules are all in `layout`.

    All shapes are checked before a tensor is read.

    Args:
        dtype: computes its products.

    Raises:
        ValueError: a tensor is missing, unknown or of the wrong shape, type or rank, or
            its values do not fit the dtype; names the file, the tensor and what it
            should be.
    """
    with naming(config.folder):
        return _read_adapter(config, layout, max_rank=max_rank, dtype=dtype)


def _read_adapter(
    config: AdapterConfig, layout: AdapterLayout, *, max_rank: int, dtype: torch.dtype
) -> AdapterTensors:
    file = config.folder / WEIGHTS_FILE
    if not file.is_file():
        raise ValueError(f"{file}: no such file; an adapter is read from safetensors")
    _check_header(file)
    with open_tensors(file) as tensors:
        found = _find(tensors, file, layout)
        for shard, names in found.items():
            _check(tensors, file, config, shard, names, max_rank=max_rank)
        _check_whole(found, file, config, layout)
        pairs = {
            shard: _read_pair(tensors, file, config, names)
            for shard, names in found.items()
        }
    for shard, pair in pairs.items():
        if not all(half.to(dtype).isfinite().all() for half in pair):
            raise ValueError(
                f"{file}: the tensors of {shard.name}, with their scale, hold a number "
                f"that is not finite in {str(dtype).removeprefix('torch.')}"
            )
    return AdapterTensors(
        pairs=pairs,
        rank=max(len(pair.a) for pair in pairs.values()),
        revision=_revision(file, config),
    )


def _check_header(file: Path) -> None:
    """Refuse a file whose list of tensors would keep the engine waiting."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError(
            f"{file}: not a valid safetensors file: its header has {size} bytes, more "
            f"than {MAX_HEADER_BYTES}"
        )


class _Names(NamedTuple):
    """Names of a module's tensors in the file."""

    a: str
    b: str


def _find(tensors: Any, file: Path, layout: AdapterLayout) -> dict[ModuleShard, _Names]:
    """Return the tensors of each adapted module."""
    sides: dict[ModuleShard, dict[str, str]] = {}
    for name in sorted(tensors.keys()):
        match = _TENSOR.fullmatch(_PREFIX.sub("", name))
        if match is None:
            raise ValueError(
                f"{file}: tensor {shown(name)} is not an A or B of a linear layer; "
                "adapters of embeddings, heads and other modules are not served"
            )
        shard = layout.find(match["module"])
        if isinstance(shard, str):
            raise ValueError(f"{file}: tensor {shown(name)} {shard}")
        if match["side"] in sides.setdefault(shard, {}):
            raise ValueError(
                f"{file}: tensor {shown(name)} repeats the {match['side']} of "
                f"{shard.name}"
            )
        sides[shard][match["side"]] = name
    for shard, names in sides.items():
        for side in "AB":
            if side not in names:
                raise ValueError(
                    f"{file}: the lora_{side} of {shard.name} is missing; an adapter "
                    "has both matrices"
                )
    if not sides:
        raise ValueError(f"{file}: there is no tensor")
    return {shard: _Names(names["A"], names["B"]) for shard, names in sides.items()}


def _check(
    tensors: Any,
    file: Path,
    config: AdapterConfig,
    shard: ModuleShard,
    names: _Names,
    *,
    max_rank: int,
) -> None:
    a, b = (tuple(tensors.get_slice(name).get_shape()) for name in names)
    rank = a[0] if len(a) == 2 and config.has_ranks else config.rank
    if rank > max_rank:
        raise ValueError(
            f"{file}: {shard.name} has rank {rank}, more than --max-lora-rank "
            f"{max_rank}; start the server with --max-lora-rank {rank}"
        )
    due = ((rank, shard.inputs), (shard.outputs, rank))
    for name, shape, wanted in zip(names, (a, b), due, strict=True):
        if shape != wanted or 0 in shape:
            raise ValueError(
                f"{file}: tensor {shown(name)} has shape {shape}, but for rank {rank} "
                f"{shard.name} of this model needs {wanted}; is it an adapter of "
                "another base model?"
            )


def _check_whole(
    found: Mapping[ModuleShard, _Names],
    file: Path,
    config: AdapterConfig,
    layout: AdapterLayout,
) -> None:
    """Check that no layer lacks a module that the configuration names."""
    if config.targets is None or not config.is_whole:
        return
    for shard in layout.shards:
        if shard.leaf in config.targets and shard not in found:
            raise ValueError(
                f"{file}: there are no tensors of {shard.name}, which target_modules "
                "of adapter_config.json names"
            )
    left = config.targets - {shard.leaf for shard in found}
    if left:
        raise ValueError(
            f"{file}: there are no tensors of {', '.join(sorted(left))}, which "
            "target_modules of adapter_config.json names"
        )


def _read_pair(tensors: Any, file: Path, config: AdapterConfig, names: _Names) -> Pair:
    a, b = (_read(tensors, name, file) for name in names)
    return Pair(a, b * config.scale(len(a)))


def _read(tensors: Any, name: str, file: Path) -> Tensor:
    tensor = read_tensor(tensors, name, file)
    if not tensor.is_floating_point():
        raise ValueError(
            f"{file}: tensor {shown(name)} is {tensor.dtype}; it must be floating point"
        )
    return tensor.to(torch.float32)


def _revision(file: Path, config: AdapterConfig) -> str:
    """Return a digest of everything that decides the adapter's products."""
    hashed = blake2b(digest_size=REVISION_BYTES)
    hashed.update(f"{config.rank} {config.alpha!r} {config.is_rank_stable}\n".encode())
    hash_file(hashed, file)
    return hashed.hexdigest()
