"""How a checkpoint stores its quantised weights, from `quantization_config`.

Knows the methods by name and what their keys mean. Knows no tensors: the reader of a
checkpoint decides by the tensors which modules are quantised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sglang.srt.utils.checked_values import REQUIRED, ConfigValues, Key
from sglang.srt.utils.json_file import shown

WeightFormat = Literal["e4m3", "int4", "mxfp4"]

FP8, W8A8_FP8, COMPRESSED, MXFP4 = "fp8", "w8a8_fp8", "compressed-tensors", "mxfp4"
AWQ, GPTQ = "awq", "gptq"
METHODS = (FP8, W8A8_FP8, COMPRESSED, AWQ, GPTQ, MXFP4)
"""Values of `quant_method`, and of --quantization."""
ONLINE_METHODS = (FP8, W8A8_FP8)
"""Methods that also quantise a plain checkpoint while it is read."""

KV_CACHE_DTYPES = ("fp8_e4m3", "fp8_e5m2")
"""Values of --kv-cache-dtype in 8 bits."""

MAX_GROUP = 1 << 16
_KEYS: dict[str, Key] = {
    "quant_method": Key(str, default=REQUIRED),
    "fmt": Key(str, default="e4m3"),
    "weight_block_size": Key(list, 1, MAX_GROUP, of=int),
    "modules_to_not_convert": Key(list, of=str),
    "ignored_layers": Key(list, of=str),
    "ignore": Key(list, of=str),
    "config_groups": Key(dict),
    # Keys of AWQ and GPTQ.
    "bits": Key(int, 1, 64, 4),
    "group_size": Key(int, -1, MAX_GROUP, 128),
    "zero_point": Key(bool, default=True),
    "version": Key(str, default="gemm"),
    "desc_act": Key(bool, default=False),
    "sym": Key(bool, default=True),
    "checkpoint_format": Key(str, default="gptq"),
    "dynamic": Key(dict),
}
_GROUP_KEYS: dict[str, Key] = {"weights": Key(dict)}
_WEIGHT_KEYS: dict[str, Key] = {
    "num_bits": Key(int, 1, 64, REQUIRED),
    "type": Key(str, default="int"),
    "strategy": Key(str, default="tensor"),
    "block_structure": Key(list, 1, MAX_GROUP, of=int),
    "symmetric": Key(bool, default=True),
    "group_size": Key(int, -1, MAX_GROUP),
    "actorder": Key(str),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """How a weight [N, K] is stored.

    Fields:
        format: what a code means; see `layers/ops/linear/quantized.py`.
        group_rows: rows that share a scale.
        group_columns: columns that share a scale; None means all of a row.
        quantizes_inputs: products of many rows may round their inputs to 8 bits as
            well.
        has_zeros: groups have a zero besides their scale.
        has_columns: columns may be stored in another order than the inputs'.
        is_kept_on_cpu: the CPU also keeps the codes; otherwise it dequantises them
            while loading.
    """

    format: WeightFormat
    group_rows: int = 1
    group_columns: int | None = None
    quantizes_inputs: bool = True
    has_zeros: bool = False
    has_columns: bool = False
    is_kept_on_cpu: bool = True


CHANNELS = WeightScheme(format="e4m3")
"""A scale per row. A scale per tensor is stored as one per row, because a product of
several tensors has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """How the weights of a model are quantised.

    Fields:
        method: one of `METHODS`.
        weights: how they are stored.
        stores_zeros: whether GPTQ's zeros are stored as they are, not less one.
        ignored: patterns of modules that are not quantised, as the checkpoint has them.
        is_online: the checkpoint is plain, and is quantised while it is read.
    """

    method: str
    weights: WeightScheme
    ignored: tuple[str, ...] = ()
    stores_zeros: bool = False
    is_online: bool = False


def read_quantization(
    values: ConfigValues, *, requested: str | None
) -> QuantizationConfig | None:
    """Return how the weights are quantised, or None if they are not.

    Args:
        requested: value of --quantization, or None.

    Raises:
        ValueError: the method or one of its values is not supported, or it is not the
            requested one. The message names the file and the key.
    """
    if values.get("quantization_config") is None:
        return _online(values, requested)
    found = values.within("quantization_config", _KEYS)
    method: str = found.get("quant_method")
    if method not in METHODS:
        raise found.error(
            "quant_method",
            f"is {shown(method)}, which is not supported; supported: "
            f"{', '.join(METHODS)}, and checkpoints that are not quantised",
        )
    if requested not in (None, method, *_alias(method)):
        raise found.error(
            "quant_method",
            f"is {method}, but --quantization is {requested}; remove the flag",
        )
    scheme = _SCHEMES[method](found)
    ignored = [
        entry
        for key in ("modules_to_not_convert", "ignored_layers", "ignore")
        for entry in found.get(key) or ()
    ]
    return QuantizationConfig(
        method=method,
        weights=scheme,
        ignored=tuple(ignored),
        stores_zeros=found.get("checkpoint_format") == "gptq_v2",
    )


def _online(values: ConfigValues, requested: str | None) -> QuantizationConfig | None:
    if requested is None:
        return None
    if requested not in ONLINE_METHODS:
        raise values.error(
            "quantization_config",
            f"is missing, but --quantization is {requested}, which reads quantised "
            f"checkpoints only; use {' or '.join(ONLINE_METHODS)}, or remove the flag",
        )
    return QuantizationConfig(method=requested, weights=CHANNELS, is_online=True)


def _alias(method: str) -> tuple[str, ...]:
    """Return further names of a method at --quantization."""
    return ONLINE_METHODS if method in ONLINE_METHODS else ()


def _fp8_scheme(found: ConfigValues) -> WeightScheme:
    if found.get("fmt") != "e4m3":
        raise found.wrong("fmt", "must be e4m3")
    return _blocks(found, "weight_block_size") or CHANNELS


def _blocks(found: ConfigValues, key: str) -> WeightScheme | None:
    match found.get(key):
        case None:
            return None
        case [int(rows), int(columns)]:
            return WeightScheme(format="e4m3", group_rows=rows, group_columns=columns)
    raise found.wrong(key, "must be [rows, columns]")


def _compressed_scheme(found: ConfigValues) -> WeightScheme:
    """Return the scheme that all `config_groups` share."""
    names: dict[str, Any] = found.get("config_groups") or {}
    groups = found.within("config_groups", dict.fromkeys(names, Key(dict)))
    schemes = {_group_scheme(groups.within(name, _GROUP_KEYS)) for name in names}
    if len(schemes) != 1:
        raise found.error(
            "config_groups",
            f"has {len(schemes)} different schemes of weights; supported: one",
        )
    return schemes.pop()


def _group_scheme(group: ConfigValues) -> WeightScheme:
    weights = group.within("weights", _WEIGHT_KEYS)
    bits, kind = weights.get("num_bits"), weights.get("type")
    strategy = weights.get("strategy")
    if (bits, kind) == (4, "int"):
        return _packed_scheme(weights, strategy)
    if (bits, kind) != (8, "float"):
        raise weights.error(
            "num_bits",
            f"and type are {bits} and {shown(kind)}; supported: 8, float and 4, int",
        )
    if strategy == "block":
        blocks = _blocks(weights, "block_structure")
        if blocks is None:
            raise weights.wrong("block_structure", "must be [rows, columns]")
        return blocks
    if strategy not in ("tensor", "channel"):
        raise weights.wrong("strategy", "must be tensor, channel or block")
    return CHANNELS


def _packed_scheme(weights: ConfigValues, strategy: str) -> WeightScheme:
    if strategy not in ("group", "channel"):
        raise weights.wrong("strategy", "must be group or channel for 4 bits")
    if weights.get("actorder") not in (None, "weight", "static"):
        raise weights.wrong("actorder", "must be weight, static or null")
    size = weights.get("group_size") if strategy == "group" else None
    if strategy == "group" and (size is None or size < 1):
        raise weights.wrong("group_size", "must be positive")
    return _int4(size, has_zeros=not weights.get("symmetric"))


def _int4(
    size: int | None, *, has_zeros: bool, has_columns: bool = False
) -> WeightScheme:
    return WeightScheme(
        format="int4",
        group_columns=size if size is not None and size > 0 else None,
        quantizes_inputs=False,
        has_zeros=has_zeros,
        has_columns=has_columns,
    )


def _check_4_bits(found: ConfigValues) -> None:
    if found.get("bits") != 4:
        raise found.wrong("bits", "must be 4")
    if found.get("group_size") == 0:
        raise found.wrong("group_size", "must be positive, or -1 for all inputs")


def _awq_scheme(found: ConfigValues) -> WeightScheme:
    _check_4_bits(found)
    if found.get("version").lower() != "gemm":
        raise found.wrong("version", "must be gemm")
    return _int4(found.get("group_size"), has_zeros=found.get("zero_point"))


def _gptq_scheme(found: ConfigValues) -> WeightScheme:
    _check_4_bits(found)
    if found.get("checkpoint_format") not in ("gptq", "gptq_v2"):
        raise found.wrong("checkpoint_format", "must be gptq or gptq_v2")
    if found.get("dynamic"):
        raise found.wrong("dynamic", "must be empty: all modules share one scheme")
    return _int4(
        found.get("group_size"),
        has_zeros=not found.get("sym"),
        has_columns=found.get("desc_act"),
    )


def _mxfp4_scheme(found: ConfigValues) -> WeightScheme:
    return WeightScheme(
        format="mxfp4",
        group_columns=32,
        quantizes_inputs=False,
        is_kept_on_cpu=False,
    )


_SCHEMES: dict[str, Callable[[ConfigValues], WeightScheme]] = {
    FP8: _fp8_scheme,
    W8A8_FP8: _fp8_scheme,
    COMPRESSED: _compressed_scheme,
    AWQ: _awq_scheme,
    GPTQ: _gptq_scheme,
    MXFP4: _mxfp4_scheme,
}
