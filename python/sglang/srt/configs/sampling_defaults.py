"""Sampling parameters that a checkpoint recommends in its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.json_file import read_json_object

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_sampling_defaults(model: Path) -> dict[str, Any]:
    """Return the default values for requests; empty for a GGUF file.

    Raises:
        ValueError: the file cannot be read, or a value is out of range; names the file.
    """
    file = model / "generation_config.json"
    if model.is_file() or not file.exists():
        return {}
    found = read_json_object(file)
    values = {name: found[name] for name in FIELDS if found.get(name) is not None}
    try:
        params = SamplingParams.from_wire(values)
    except ValueError as error:
        raise ValueError(
            f"{file}: {error}; correct it, or use --sampling-defaults openai"
        ) from error
    return {name: getattr(params, name) for name in values}


def describe(defaults: Mapping[str, Any]) -> str:
    """Return the values in the form of the start message."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())
