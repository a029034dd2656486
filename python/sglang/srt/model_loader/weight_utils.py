"""Iterates over the tensors of a checkpoint: a safetensors folder, or a GGUF file.

A checkpoint may come from anyone. An index may only name files in its own folder, and a
file whose header lies is refused.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang.srt.model_loader.gguf_weights import gguf_tensor_names, iterate_gguf
from sglang.srt.utils.gguf_header import is_gguf
from sglang.srt.utils.json_file import read_json_object, shown

INDEX = "model.safetensors.index.json"
# In the hub's cache, `<repository>/snapshots/<revision>/` links to `blobs/`.
HUB_SNAPSHOTS, HUB_BLOBS = "snapshots", "blobs"


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, sharded or not.

    Raises:
        ValueError: there is no such file; the index names a file that is missing or
            lies outside the folder; or a link leads out of the hub's cache.
    """
    index = folder / INDEX
    if index.is_file():
        files = [folder / name for name in _indexed_names(index)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder} has no *.safetensors file; name a GGUF file itself, or use "
            "--load-format dummy for random weights"
        )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        # A dangling link, or a file that the index names.
        raise ValueError(f"{folder}: there is no file {', '.join(missing[:8])}")
    for file in files:
        _check_place(file, folder)
    return files


class TensorHeader(NamedTuple):
    """What a safetensors file says of a tensor; `dtype` as it says it: F8_E4M3."""

    dtype: str
    shape: tuple[int, ...]


def tensor_names(path: Path) -> frozenset[str]:
    """Return the names of all tensors of the checkpoint. Reads no data.

    Raises:
        ValueError: as in `weight_files` and `iterate_weights`.
    """
    return gguf_tensor_names(path) if is_gguf(path) else frozenset(tensor_headers(path))


def tensor_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of all tensors of a folder. Reads no data.

    Raises:
        ValueError: as in `weight_files` and `iterate_weights`.
    """
    headers = {}
    for file in weight_files(folder):
        with open_tensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                found = tensors.get_slice(name)
                headers[name] = TensorHeader(
                    found.get_dtype(), tuple(found.get_shape())
                )
    return headers


def iterate_weights(
    path: Path, names: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for every tensor of the checkpoint, or for those in `names`.
    Others are not read.

    Raises:
        ValueError: a file is not valid safetensors, or two files hold the same tensor;
            for a GGUF file as in `iterate_gguf`.
    """
    if is_gguf(path):
        return (found for found in iterate_gguf(path) if _is_in(found[0], names))
    return _iterate_folder(path, names)


def _iterate_folder(
    folder: Path, names: Container[str] | None
) -> Iterator[tuple[str, Tensor]]:
    found: dict[str, Path] = {}
    for file in weight_files(folder):
        with open_tensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if name in found:
                    raise ValueError(
                        f"{folder}: tensor {name} is in {found[name].name} and in "
                        f"{file.name}; remove one of the files"
                    )
                found[name] = file
                if _is_in(name, names):
                    yield name, read_tensor(tensors, name, file)


def _is_in(name: str, names: Container[str] | None) -> bool:
    return names is None or name in names


def _indexed_names(index: Path) -> list[str]:
    """Return the file names in an index, in order."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map must be an object of file names")
    for tensor, name in weight_map.items():
        is_plain = isinstance(name, str) and name.isprintable()
        parts = PurePath(name).parts if is_plain else ()
        if not parts or ".." in parts or PurePath(name).is_absolute():
            raise ValueError(
                f"{index}: weight_map names {shown(name)} for {shown(tensor)}; it must "
                "be a file in the folder"
            )
    return sorted(set(weight_map.values()))


def _check_place(file: Path, folder: Path) -> None:
    """Check a file in the hub's cache, whose links must lead to its own blobs.

    In other folders links may lead anywhere, because whoever made the folder made them.

    Raises:
        ValueError: `file` links to another place.
    """
    real, home = file.resolve(), folder.resolve()
    if home.parent.name != HUB_SNAPSHOTS:
        return
    blobs = home.parents[1] / HUB_BLOBS
    if not real.is_relative_to(home) and not real.is_relative_to(blobs):
        raise ValueError(
            f"{file} is a link to {real}, outside the hub's cache of this model; "
            "download the model again, or link it from a folder of your own and "
            "pass that as --model-path"
        )


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """Scope of an open safetensors file.

    Raises:
        ValueError: it is none; names the file.
    """
    try:
        opened = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a valid safetensors file: {error}") from error
    with opened as tensors:
        yield tensors


def read_tensor(tensors: Any, name: str, file: Path) -> Tensor:
    """Read a tensor of an open file; its header may name a type unknown to torch."""
    try:
        tensor: Tensor = tensors.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{file}: tensor {shown(name)}: {error}") from error
    return tensor
