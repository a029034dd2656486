"""What full blocks held when they were computed, kept beside an engine's own store.

A unit is a full block of slots. Its key is the lineage of its last token, so that it is
found by content, whoever asks. Its value are sums over all bytes, by slot and by layer.
The same tokens may have been computed twice, in other batches and with other rounding;
which of them the engine's store holds is its secret, so several revisions are kept.
"""

from __future__ import annotations

import logging
import os
import struct
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Words = npt.NDArray[np.int64]
MAX_UNITS = 1 << 18
"""Units in memory, and in a file; the oldest go first."""
REVISIONS = 4
_HEADER = struct.Struct("<8sII32s")
_MAGIC = b"KVUNITS1"
_SUFFIX = ".units"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShape:
    """Fields: slots, layers: of a unit. digest: 32 bytes, of the model, its weights and
    the form of its KV. rank: of the worker."""

    slots: int
    layers: int
    digest: bytes
    rank: int

    @property
    def words(self) -> int:
        return self.slots + self.layers


class UnitStore:
    """Units by key, in memory and, with a folder, in files.

    Args:
        folder: receives one file per process. Files of other processes with the same
            shape are read when a key is not known.
    """

    def __init__(self, shape: UnitShape, folder: Path | None = None) -> None:
        self.shape = shape
        self._units: OrderedDict[int, list[Words]] = OrderedDict()
        self._files = None if folder is None else _UnitFiles(shape, folder)

    def put(self, units: Sequence[tuple[int, Words]]) -> None:
        """Keep units; one that is known already becomes the newest revision."""
        new = [(key, words) for key, words in units if self._keep(key, words)]
        if self._files is not None and new:
            self._files.append(new)

    def get(self, key: int) -> Sequence[Words]:
        """Return the revisions of a unit; none if it is not known."""
        if key not in self._units and self._files is not None:
            for other, words in self._files.read():
                self._keep(other, words)
        if key in self._units:
            self._units.move_to_end(key)
        return self._units.get(key, ())

    def key_of(self, words: Words) -> int | None:
        """Return the key of a unit whose slots had these bytes, or None. Slow; only for
        reports."""
        wanted = words[: self.shape.slots]
        for key, revisions in self._units.items():
            for one in revisions:
                if np.array_equal(one[: self.shape.slots], wanted):
                    return key
        return None

    def others(self) -> int:
        """Return how many files there are of other models, weights or shapes."""
        return 0 if self._files is None else self._files.others()

    def _keep(self, key: int, words: Words) -> bool:
        """Return whether it is new."""
        revisions = self._units.setdefault(key, [])
        self._units.move_to_end(key)
        if any(np.array_equal(words, one) for one in revisions):
            return False
        if len(revisions) == REVISIONS:
            # The first stays: stores keep what they got first.
            del revisions[1]
        revisions.append(words)
        if len(self._units) > MAX_UNITS:
            self._units.popitem(last=False)
        return True


class _UnitFiles:
    """The files of one shape. A header, then units of one size: key, words, and a
    checksum of both. A file that another process still writes may end in the middle of
    a unit."""

    def __init__(self, shape: UnitShape, folder: Path) -> None:
        self._shape = shape
        self._folder = folder
        self._header = _HEADER.pack(_MAGIC, shape.slots, shape.layers, shape.digest)
        self._prefix = f"{shape.digest.hex()[:16]}-{shape.rank}-"
        self._size = np.int64().itemsize * (shape.words + 2)
        self._offsets: dict[Path, int] = {}
        self._own: list[Path] = []
        self._written = MAX_UNITS
        self._is_broken = False

    def append(self, units: Iterable[tuple[int, Words]]) -> None:
        lines = [np.concatenate([[key], words]).tobytes() for key, words in units]
        data = b"".join(line + struct.pack("<q", zlib.crc32(line)) for line in lines)
        if self._is_broken:
            return
        try:
            if self._written + len(lines) > MAX_UNITS:
                self._begin()
            with self._own[-1].open("ab") as file:
                file.write(data)
            self._written += len(lines)
        except OSError as error:
            self._is_broken = True
            logger.error(
                "kv_canary: records of blocks are no longer written to "
                "KV_CANARY_UNITS_DIR: %s; they are still kept in memory",
                error,
            )

    def read(self) -> Iterator[tuple[int, Words]]:
        """Return what other processes wrote since the last call. Damaged units, and
        files that cannot be read, are left out."""
        for path in sorted(self._folder.glob(f"{self._prefix}*{_SUFFIX}")):
            if path in self._own:
                continue
            try:
                yield from self._read(path)
            except OSError:
                continue

    def others(self) -> int:
        paths = self._folder.glob(f"*{_SUFFIX}")
        return sum(not path.name.startswith(self._prefix) for path in paths)

    def _begin(self) -> None:
        """Begin a file, and remove the one before the last."""
        name = f"{self._prefix}{os.getpid()}-{time.time_ns()}{_SUFFIX}"
        path = self._folder / name
        path.write_bytes(self._header)
        self._own.append(path)
        self._written = 0
        if len(self._own) > 2:
            self._own.pop(0).unlink(missing_ok=True)

    def _read(self, path: Path) -> Iterator[tuple[int, Words]]:
        with path.open("rb") as file:
            begin = self._offsets.get(path, 0)
            if not begin and file.read(len(self._header)) != self._header:
                return
            begin = begin or len(self._header)
            file.seek(begin)
            data = file.read()
        count = len(data) // self._size
        self._offsets[path] = begin + count * self._size
        for index in range(count):
            line = data[index * self._size : (index + 1) * self._size]
            words = np.frombuffer(line, dtype="<i8")
            if zlib.crc32(line[:-8]) == int(words[-1]):
                yield int(words[0]), words[1:-1].astype(np.int64)
