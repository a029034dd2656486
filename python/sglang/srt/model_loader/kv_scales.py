"""Scales of stored KV that a checkpoint or a file holds.

Checkpoints name them after attention (`k_scale`), its projections (`k_proj.k_scale`,
`k_proj.output_scale`) or both at once (`kv_scale`). --quantization-param-path names a
JSON file of vLLM's format instead. Knows no pools.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sglang.srt.mem_cache.kv_dtype import KVScales
from sglang.srt.model_loader.weight_utils import iterate_weights, tensor_headers
from sglang.srt.utils.gguf_header import is_gguf
from sglang.srt.utils.json_file import read_json_object, shown

logger = logging.getLogger(__name__)

PARAM_FLAG = "--quantization-param-path"
_NAME = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>[0-9]{1,6})\.self_attn\."
    r"(?:attn\.)?(?:(?P<half>[kv])_proj\.(?:[kv]_scale|output_scale)"
    r"|(?P<own>k|v|kv)_scale)"
)


def find_kv_scales(
    path: Path,
    *,
    layers: Iterable[int],
    param_path: str | None,
    rank: int,
    has_file: bool,
) -> dict[int, KVScales]:
    """Return the scales of a model's layers, and warn if there are none.

    Args:
        path: folder of the checkpoint, or a GGUF file.
        layers: layers that have KV.
        param_path: value of `PARAM_FLAG`, whose scales take precedence.
        has_file: whether the checkpoint's tensors are read at all.

    Raises:
        ValueError: a scale is not one positive number. The message names its tensor or
            the file.
    """
    known = set(layers)
    if param_path is not None:
        found = _read_params(Path(param_path), known, rank=rank)
    elif has_file and not is_gguf(path):
        found = _read_tensors(path, known)
    else:
        found = {}
    missing = len(known - found.keys())
    if missing:
        logger.warning(
            "%d of %d layers have no KV scales in %s; their keys and values are "
            "stored with scale 1, which may cost accuracy (%s names a file of scales)",
            missing,
            len(known),
            param_path or path,
            PARAM_FLAG,
        )
    return found


def _read_tensors(path: Path, known: set[int]) -> dict[int, KVScales]:
    matched = {
        name: found
        for name in tensor_headers(path)
        if (found := _NAME.fullmatch(name)) and int(found["layer"]) in known
    }
    halves: dict[int, dict[str, float]] = {}
    for name, tensor in iterate_weights(path, matched):
        found = matched[name]
        value = _one_number(f"{path}: tensor {name}", tensor)
        for half in found["half"] or found["own"]:
            halves.setdefault(int(found["layer"]), {})[half] = value
    return {
        layer: KVScales(k=values.get("k", 1.0), v=values.get("v", 1.0))
        for layer, values in halves.items()
    }


def _one_number(what: str, tensor: Tensor) -> float:
    if tensor.numel() != 1:
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)}; KV is stored with one scale per "
            "layer"
        )
    return _positive(what, float(tensor.float()))


def _positive(what: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what} is {value}; a scale must be a positive number")
    return value


def _read_params(path: Path, known: set[int], *, rank: int) -> dict[int, KVScales]:
    """Read {"kv_cache": {"scaling_factor": {rank: {layer: factor}}}}; a factor is the
    scale of K and of V."""
    where = f"{PARAM_FLAG} {path}"
    factors = _member(read_json_object(path), "kv_cache", where)
    factors = _member(factors, "scaling_factor", where)
    of_rank = _member(factors, str(rank), where)
    scales = {}
    for layer, factor in of_rank.items():
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not layer.isdecimal() or not is_number:
            raise ValueError(
                f"{where}: scaling_factor has {shown(layer)}: {shown(factor)}; "
                "expected the number of a layer and a number"
            )
        if int(layer) in known:
            value = _positive(f"{where}: the factor of layer {layer}", float(factor))
            scales[int(layer)] = KVScales(k=value, v=value)
    return scales


def _member(raw: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = raw.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {key} must be an object, got {shown(value)}")
    return value
