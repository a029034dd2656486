"""Units in files: one file per unit and group.

```
folder/IDENTITY/GROUP/HH/KEY-PARENT     HH: the first byte of KEY
header | elements of the unit's tokens, int64 | bytes of the unit
```
IDENTITY is a digest of the model and the layout, so engines that cannot read each
other's units never see them. A file gets its name when it is whole. Everything in it is
compared before it is believed: nothing but numbers of fixed width is parsed. Engines of
one identity may share a folder.

Files are written and read by threads, never by the scheduler. A folder that is full,
slow or read-only costs hits and nothing else.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang.srt.kv_tiers.damage import DamageKind
from sglang.srt.kv_tiers.unit import KEY_BYTES, with_descendants

if TYPE_CHECKING:
    from sglang.srt.kv_tiers.landing import LandingMemory
    from sglang.srt.kv_tiers.unit import UnitKey
    from sglang.srt.mem_cache.page_ledger import IntArray

logger = logging.getLogger(__name__)

_MAGIC = b"KVUNIT\0\1"
# Magic, identity, key, parent, first position, elements, bytes of the unit.
_HEADER = struct.Struct("<8s16s16s16sQQQ")
_DIGEST_BYTES = 16
_NO_PARENT = bytes(KEY_BYTES)
_TEMPORARY = ".tmp"
# Younger ones may be another engine's that writes them now.
_LEFTOVER_SECONDS = 3600.0


class UnitFile(NamedTuple):
    """What a file's name and size say, and when it was used, in seconds since 1970."""

    parent: UnitKey
    size: int
    used: float


class BadUnit(Exception):
    """A file does not hold the unit that its name says."""

    def __init__(self, kind: DamageKind, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """Bounds of a folder.

    Fields:
        max_bytes: bytes of all files of this identity. max_age: seconds since a file
            was last read or written, or None for no limit.
    """

    max_bytes: int
    max_age: float | None = None


def encode_unit(
    identity: bytes,
    key: UnitKey,
    parent: UnitKey,
    *,
    position: int,
    elements: IntArray,
    unit: memoryview,
) -> list[bytes | memoryview]:
    """Return the parts of a file.

    Args:
        parent: key of the unit before it, or empty.
        position: first position. elements: int64 [n], of the unit's tokens.
        unit: its bytes.
    """
    head = _HEADER.pack(
        _MAGIC,
        identity,
        key,
        parent or _NO_PARENT,
        position,
        len(elements),
        len(unit),
    )
    tokens = elements.astype("<i8", copy=False).tobytes()
    digest = blake2b(head + tokens, digest_size=_DIGEST_BYTES).digest()
    return [head, digest, tokens, unit]


def decode_unit(
    data: bytearray | memoryview,
    identity: bytes,
    key: UnitKey,
    *,
    position: int,
    elements: IntArray,
    size: int,
) -> torch.Tensor:
    """Return the bytes of a unit in a file's `data`, uint8 [size], which share its
    memory.

    Args:
        position, elements: where the unit must lie, and the tokens it must be of.
        size: bytes that it must have.

    Raises:
        BadUnit: the data are anything else.
    """
    tokens = elements.astype("<i8", copy=False).tobytes()
    begin = _HEADER.size + _DIGEST_BYTES + len(tokens)
    if len(data) != begin + size:
        raise BadUnit(DamageKind.INCOMPLETE, f"{len(data)} bytes, not {begin + size}")
    head = bytes(data[: _HEADER.size])
    magic, of, named, _, first, count, length = _HEADER.unpack(head)
    if magic != _MAGIC or of != identity or length != size:
        raise BadUnit(DamageKind.INCOMPLETE, "another layout or version")
    if named != key or first != position or count != len(elements):
        raise BadUnit(DamageKind.IDENTITY, "another unit")
    kept = bytes(data[_HEADER.size + _DIGEST_BYTES : begin])
    digest = blake2b(head + kept, digest_size=_DIGEST_BYTES).digest()
    if digest != bytes(data[_HEADER.size : _HEADER.size + _DIGEST_BYTES]):
        raise BadUnit(DamageKind.BYTES, "its head changed")
    if kept != tokens:
        raise BadUnit(DamageKind.IDENTITY, "other tokens")
    return torch.frombuffer(data, dtype=torch.uint8)[begin:]


class FileStore:
    """The files of one group.

    Args:
        folder: folder of the group; made if there is none.
        size: bytes of a unit.
        landing: memory to which files are read as long as there is room.

    Raises:
        OSError: the folder cannot be made or listed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        identity: bytes,
        size: int,
        limits: FileLimits,
        landing: LandingMemory | None = None,
    ) -> None:
        self._landing = landing
        self._folder = folder
        self._temporary = f".{secrets.token_hex(8)}{_TEMPORARY}"
        self._identity = identity
        self._size = size
        self._limits = limits
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._files: OrderedDict[UnitKey, UnitFile] = OrderedDict()
        self._total = 0
        self._scan()

    # -- what there is -------------------------------------------------------------

    def _scan(self) -> None:
        """List the files, least recently used first; remove leftovers and old ones."""
        found = []
        for name in sorted(os.listdir(self._folder)):
            inner = self._folder / name
            if not inner.is_dir():
                continue
            for entry in os.scandir(inner):
                # Another engine may just have removed it.
                with suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    keys = _parse_name(entry.name)
                    if keys is not None and stat.S_ISREG(about.st_mode):
                        found.append((about.st_mtime, keys, about.st_size))
                    elif entry.name.endswith(_TEMPORARY):
                        _remove_leftover(Path(entry.path), about)
        found.sort()
        for mtime, (key, parent), size in found:
            self._note(key, UnitFile(parent, size, mtime))
        oldest = time.time() - (self._limits.max_age or float("inf"))
        self.drop(keys[0] for mtime, keys, _ in found if mtime < oldest)
        self._make_room(0)

    def _note(self, key: UnitKey, file: UnitFile) -> None:
        with self._lock:
            before = self._files.pop(key, None)
            self._files[key] = file
            self._total += file.size - (0 if before is None else before.size)

    def __contains__(self, key: UnitKey) -> bool:
        return key in self._files

    def __len__(self) -> int:
        return len(self._files)

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return self._total

    @property
    def max_bytes(self) -> int:
        """Bytes that they may have."""
        return self._limits.max_bytes

    def oldest_use(self) -> float:
        """Return when the file that goes next was used, in seconds since 1970; now, if
        there is none."""
        with self._lock:
            first = next(iter(self._files.values()), None)
        return time.time() if first is None else first.used

    def path(self, key: UnitKey) -> Path:
        """Return the file of a unit that there is."""
        return self._path(key, self._files[key].parent)

    def _path(self, key: UnitKey, parent: UnitKey) -> Path:
        name = f"{key.hex()}-{(parent or _NO_PARENT).hex()}"
        return self._folder / name[:2] / name

    # -- reading and writing: by threads -------------------------------------------

    def read(
        self, key: UnitKey, *, position: int, elements: IntArray
    ) -> torch.Tensor | None:
        """Return a unit, uint8 [size], or None if there is none.

        Raises:
            BadUnit: the file holds something else. It is gone afterwards.
        """
        file = self._files.get(key)
        if file is None:
            return None
        if self._landing is None:
            return self._read(key, file, None, position=position, elements=elements)
        place = self._landing.take(file.size)
        if place is None:
            return self._read(key, file, None, position=position, elements=elements)
        unit = None
        room = self._landing.view(place).numpy().data[: file.size]
        try:
            unit = self._read(key, file, room, position=position, elements=elements)
        finally:
            if unit is None:
                self._landing.give(place)
            else:
                self._landing.lend_until(unit, place)
        return unit

    def _read(
        self,
        key: UnitKey,
        file: UnitFile,
        room: memoryview | None,
        *,
        position: int,
        elements: IntArray,
    ) -> torch.Tensor | None:
        """As `read`, into `room` [file.size] if there is some."""
        path = self._path(key, file.parent)
        try:
            data = _read_file(path, most=file.size, room=room)
        except FileNotFoundError:
            self._forget(key)
            return None
        except OSError as error:
            logger.warning("cannot read %s: %s", path, error)
            return None
        try:
            unit = decode_unit(
                data,
                self._identity,
                key,
                position=position,
                elements=elements,
                size=self._size,
            )
        except BadUnit:
            self.drop([key])
            raise
        with self._lock:
            kept = self._files.get(key)
            if kept is not None:
                self._files[key] = kept._replace(used=time.time())
                self._files.move_to_end(key)
        with suppress(OSError):
            os.utime(path)
        return unit

    def write(
        self,
        key: UnitKey,
        parent: UnitKey,
        *,
        position: int,
        elements: IntArray,
        unit: memoryview,
    ) -> None:
        """Write a unit, and remove the least recently used ones if the folder is full.

        Raises:
            OSError: it cannot be written.
        """
        path = self._path(key, parent)
        parts = encode_unit(
            self._identity,
            key,
            parent,
            position=position,
            elements=elements,
            unit=unit,
        )
        size = sum(len(part) for part in parts)
        self._make_room(size)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_name(path.name + self._temporary)
        try:
            with open(temporary, "wb") as file:
                for part in parts:
                    file.write(part)
            os.replace(temporary, path)
        except OSError:
            _remove(temporary)
            raise
        self._note(key, UnitFile(parent or _NO_PARENT, size, time.time()))

    def _make_room(self, size: int) -> None:
        while self._total + size > self._limits.max_bytes and self._files:
            self.drop([next(iter(self._files))])

    # -- removing ------------------------------------------------------------------

    def _forget(self, key: UnitKey) -> UnitFile | None:
        with self._lock:
            file = self._files.pop(key, None)
            if file is not None:
                self._total -= file.size
        return file

    def drop(self, keys: Iterable[UnitKey]) -> None:
        """Remove the files of units."""
        for key in list(keys):
            file = self._forget(key)
            if file is not None:
                _remove(self._path(key, file.parent))

    def below(self, keys: Iterable[UnitKey]) -> set[UnitKey]:
        """Return `keys` and the keys of all units that continue one of them."""
        with self._lock:
            parents = {key: file.parent for key, file in self._files.items()}
        return with_descendants(keys, parents)

    def clear(self) -> None:
        """Remove all files."""
        self.drop(list(self._files))


def open_folder(root: Path) -> None:
    """Make the folder of all stores if it is missing.

    Raises:
        ValueError: others may write to it, or it cannot be made; names the fix.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = root.stat()
    except OSError as error:
        raise ValueError(
            f"--hicache-storage-backend file: {root}: {error.strerror}; name another "
            'folder, such as --hicache-storage-backend-extra-config \'{"dir": "..."}\''
        ) from None
    if not stat.S_ISDIR(about.st_mode):
        raise ValueError(f"--hicache-storage-backend file: {root} is not a folder")
    others = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if about.st_uid not in (os.getuid(), 0) or others:
        raise ValueError(
            f"--hicache-storage-backend file: others may write to {root}, so what it "
            "holds cannot be believed; make it yours alone (chmod 700)"
        )


def _parse_name(name: str) -> tuple[UnitKey, UnitKey] | None:
    """Return key and parent in a file's name, or None if it is no unit's."""
    if len(name) != 4 * KEY_BYTES + 1 or name[2 * KEY_BYTES] != "-":
        return None
    try:
        return bytes.fromhex(name[: 2 * KEY_BYTES]), bytes.fromhex(
            name[2 * KEY_BYTES + 1 :]
        )
    except ValueError:
        return None


def _read_file(
    path: Path, *, most: int, room: memoryview | None
) -> bytearray | memoryview:
    """Return a file's bytes, at most one more than `most`, without following a link or
    waiting for a pipe: in `room` [most] if they are as many."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    with os.fdopen(descriptor, "rb") as file:
        size = min(about.st_size, most + 1)
        data = bytearray(size) if room is None or size != most else room
        filled = file.readinto(data)
        return data[: filled or 0]


def _remove_leftover(path: Path, about: os.stat_result) -> None:
    if about.st_mtime < time.time() - _LEFTOVER_SECONDS:
        _remove(path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
