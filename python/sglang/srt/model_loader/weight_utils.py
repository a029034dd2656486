"""Iteration over the tensors of a checkpoint folder; safetensors only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, sharded or not.

    Raises:
        ValueError: no such file, or the index names a missing file.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text("utf-8"))["weight_map"].values())
            )
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ValueError(f"{index}: not a weight index: {error!r}") from error
        files = [folder / name for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"{index} names {', '.join(missing)}, which is not there")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder} has no *.safetensors file (other formats are not read); use "
            "--load-format dummy for random weights"
        )
    return files


def tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of all tensors of the checkpoint; reads no data.

    Raises:
        ValueError: as `weight_files` and `iterate_weights`.
    """
    names: set[str] = set()
    for file in weight_files(folder):
        with _open(file) as tensors:
            names.update(tensors.keys())
    return frozenset(names)


def iterate_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for every tensor of the checkpoint.

    Raises:
        ValueError: a file is not a valid safetensors file.
    """
    for file in weight_files(folder):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name)


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file}: not a valid safetensors file: {error}") from error
