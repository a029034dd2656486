"""Rotary embedding scaling of a model in a GGUF file."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.utils.checked_values import ConfigValues
    from sglang.srt.utils.gguf_header import GgufHeader

ROPE_FACTORS = "rope_freqs.weight"
# Parameters of Llama 3.1 to 3.3; a GGUF file has only the factors computed from them.
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def gguf_rope_scaling(
    header: GgufHeader, values: ConfigValues, prefix: str, config: dict[str, Any]
) -> dict[str, Any] | None:
    """Return `rope_scaling` of config.json; `prefix` is the architecture's name.

    Raises:
        ValueError: the file's factors per channel differ from Llama 3's.
    """
    if ROPE_FACTORS in header.tensors:
        factors = _rope_factors(header)
        scaling = _LLAMA3 | {"factor": max(factors)}
        theta = config.get("rope_theta", 10000.0)
        expected = _llama3_factors(theta, len(factors), max(factors))
        if not all(map(_is_near, factors, expected)):
            raise ValueError(
                f"{header.path}: {ROPE_FACTORS} holds other factors than those of "
                "Llama 3, which alone are served"
            )
        return scaling
    kind = values.get(f"{prefix}.rope.scaling.type")
    if kind == "none":
        return None
    return {
        "rope_type": kind,
        "factor": values.get(f"{prefix}.rope.scaling.factor"),
        "original_max_position_embeddings": values.get(
            f"{prefix}.rope.scaling.original_context_length"
        ),
    }


def _llama3_factors(theta: float, count: int, factor: float) -> list[float]:
    """Return the frequency divisors for `_LLAMA3` (see `rotary_embedding`)."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = (
        _LLAMA3["original_max_position_embeddings"]
        / (2 * math.pi * theta ** (i / count))
        for i in range(count)
    )
    shares = (min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns)
    return [1 / ((1 - share) / factor + share) for share in shares]


def _is_near(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=1e-3)


def _rope_factors(header: GgufHeader) -> list[float]:
    """Return the divisors of the rotary frequencies, one per channel pair.

    Raises:
        ValueError: the tensor is not a vector of positive float32 in the file.
    """
    tensor = header.tensors[ROPE_FACTORS]
    is_vector = len(tensor.shape) == 1 and 0 < tensor.shape[0] <= 1 << 16
    if not is_vector or tensor.kind != 0:
        raise ValueError(f"{header.path}: {ROPE_FACTORS} must be a float32 vector")
    size = 4 * tensor.shape[0]
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(size)
    if len(data) < size:
        raise ValueError(f"{header.path}: cut off in {ROPE_FACTORS}; get it again")
    factors = list(struct.unpack(f"<{tensor.shape[0]}f", data))
    if not all(0 < factor < math.inf for factor in factors):
        raise ValueError(f"{header.path}: {ROPE_FACTORS} must hold positive numbers")
    return factors
