"""Reads the header of a GGUF file: its values and the locations of its tensors.

The file is untrusted: every count and length is compared with the rest of the file
before anything is read. Knows nothing about models or quantized blocks.

    | magic, version, counts | values | tensor infos | padding | tensor data ... |
    0                                                          data_start       size
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sglang.srt.utils.json_file import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
_STRING, _ARRAY = 8, 9
# Value type -> struct format of one number.
_NUMBERS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f"},
    **{7: "?", 10: "Q", 11: "q", 12: "d"},
}


class GgufTensor(NamedTuple):
    """A tensor's location.

    Fields:
        shape: outermost dimension first, as in torch (reversed in the file).
        kind: number of the block format.
        offset: first byte of its data in the file.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Values and tensors by name, in file order."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a model path is a GGUF file rather than a folder."""
    return path.suffix == ".gguf"


def read_gguf_header(path: Path) -> GgufHeader:
    """Read values and tensor locations, but no tensor data.

    Raises:
        ValueError: the file is missing, not a GGUF file of a known version,
            inconsistent or truncated; names the file.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < len(MAGIC):
                raise ValueError(f"{path}: not a GGUF file: it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(path, data).header()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


class _Cursor:
    """Reads one value after another."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(len(MAGIC)) != MAGIC:
            raise ValueError(f"{self._path}: not a GGUF file: it begins otherwise")
        version = self._number("I")
        if version not in VERSIONS:
            known = ", ".join(map(str, VERSIONS))
            raise ValueError(
                f"{self._path}: GGUF version {version}, of which versions {known} are "
                "read; convert the model again"
            )
        num_tensors, num_values = self._number("Q"), self._number("Q")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text()
            if key in values:
                raise ValueError(f"{self._path}: {shown(key)} is there twice")
            values[key] = self._value(key, self._number("I"))
        infos: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            name, tensor = self._tensor_info()
            if name in infos:
                raise ValueError(f"{self._path}: tensor {shown(name)} is there twice")
            infos[name] = tensor
        start = self._data_start(values)
        tensors = {
            name: tensor._replace(offset=start + tensor.offset)
            for name, tensor in infos.items()
        }
        return GgufHeader(path=self._path, values=values, tensors=tensors)

    def _data_start(self, values: dict[str, Any]) -> int:
        alignment = values.get("general.alignment", 32)
        is_integer = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not (is_integer and 0 < alignment <= MAX_ALIGNMENT):
            raise ValueError(
                f"{self._path}: general.alignment must be from 1 to {MAX_ALIGNMENT}, "
                f"got {shown(alignment)}"
            )
        return -(-self._at // int(alignment)) * int(alignment)

    def _tensor_info(self) -> tuple[str, GgufTensor]:
        name = self._text()
        num_dims = self._number("I")
        if not 0 < num_dims <= MAX_DIMS:
            raise ValueError(
                f"{self._path}: tensor {shown(name)} has {num_dims} dimensions; it "
                f"must have from 1 to {MAX_DIMS}"
            )
        dims = tuple(self._number("Q") for _ in range(num_dims))
        if 0 in dims:
            raise ValueError(f"{self._path}: tensor {shown(name)} has no elements")
        kind, offset = self._number("I"), self._number("Q")
        return name, GgufTensor(shape=dims[::-1], kind=kind, offset=offset)

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(key)
        return self._number(self._format(key, kind))

    def _array(self, key: str) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            # Each has an eight-byte length, so that no count can ask for more.
            self._check_left(8 * count)
            return [self._text() for _ in range(count)]
        one = self._format(key, kind)
        size = struct.calcsize(one) * count
        self._check_left(size)
        return list(struct.unpack(f"<{count}{one}", self._take(size)))

    def _format(self, key: str, kind: int) -> str:
        if kind not in _NUMBERS:
            raise ValueError(
                f"{self._path}: {shown(key)} has the unknown value type {kind}"
            )
        return _NUMBERS[kind]

    def _text(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", errors="replace")

    def _number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self._take(struct.calcsize("<" + kind)))[0]

    def _take(self, size: int) -> bytes:
        self._check_left(size)
        begin, self._at = self._at, self._at + size
        return self._data[begin : self._at]

    def _check_left(self, size: int) -> None:
        left = len(self._data) - self._at
        if size > left:
            raise ValueError(
                f"{self._path}: the header asks for {size} bytes at {self._at}, where "
                f"{left} are left; the file is cut off or no GGUF file: get it again"
            )
