"""The tier of files: threads that write units after they reached host memory, and read
them for requests that wait.

```
write   host memory --> file            skipped if too many wait, or after an error
start   files --> memory of their own   until `collect`, or the policy's time is over
```
Every rank has files of its own. What was read may therefore differ, and the caller
agrees on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.kv_tiers.damage import Damage
from sglang.srt.kv_tiers.files import BadUnit, FileStore
from sglang.srt.kv_tiers.source import GivenUnits
from sglang.srt.managers.messages.tier_snapshot import FilesView

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sglang.srt.kv_tiers.files import FileLimits
    from sglang.srt.kv_tiers.group import TierGroup
    from sglang.srt.kv_tiers.host_pool import HostPool
    from sglang.srt.kv_tiers.landing import LandingMemory
    from sglang.srt.kv_tiers.unit import UnitKey
    from sglang.srt.mem_cache.page_ledger import IntArray

logger = logging.getLogger(__name__)

TIER = "storage"
# Units that may wait to be written; more are skipped.
MOST_WAITING = 256
# Nothing is written for this long after an error.
RETRY_SECONDS = 30.0
READERS = 4


class NamedUnit(NamedTuple):
    """A unit, where it begins, and the elements of its tokens, int64."""

    key: UnitKey
    position: int
    elements: IntArray


@dataclass(slots=True, kw_only=True)
class StorageStats:
    """Units of primary slots since the start: written, not written, and read. Failures
    count in every group."""

    written: int = 0
    skipped: int = 0
    read: int = 0


@dataclass(kw_only=True)
class Reading:
    """Units that are read for one request.

    Attributes:
        units: what was read so far, by group and key. damages: files that held
            something else.
        left: units that were not looked at. is_done: whether nothing more comes.
        is_over: set when nobody wants more.
    """

    started: float
    tokens: int
    units: dict[tuple[int, UnitKey], Tensor] = field(default_factory=dict)
    damages: list[Damage] = field(default_factory=list)
    left: int = 0
    is_over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_done(self) -> bool:
        return self.left == 0

    def note_read(self) -> None:
        """Count a unit that was looked at; any thread may do it."""
        with self._lock:
            self.left -= 1


class Storage:
    """Files of all groups of one rank.

    Args:
        folder: the rank's folder.
        size: tokens of a unit.
        landing: memory to which files are read as long as there is room.
    """

    def __init__(
        self,
        folder: Path,
        groups: Sequence[TierGroup],
        *,
        identity: bytes,
        size: int,
        limits: FileLimits,
        landing: LandingMemory | None = None,
    ) -> None:
        self._folder = folder
        self._groups = list(groups)
        self._size = size
        self.stores = [
            FileStore(
                folder / group.name,
                identity=identity,
                size=group.layout.bytes_per_unit,
                limits=limits,
                landing=landing,
            )
            for group in groups
        ]
        self.stats = StorageStats()
        # Keys of units that this process wrote or read.
        self._touched: set[UnitKey] = set()
        # One writer, so that a slow disk cannot take all threads from readers.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-writer")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kv-reader")
        self._waiting = threading.Semaphore(MOST_WAITING)
        self._submitted = self._finished = 0
        self._broken_until = 0.0

    # -- writing -------------------------------------------------------------------

    def write(
        self,
        group: int,
        unit: NamedUnit,
        parent: UnitKey,
        pool: HostPool,
        event: torch.cuda.Event | None,
    ) -> None:
        """Write a unit of host memory to a file, soon.

        Args:
            event: marks the end of the copy to host memory, or None if it is there.
        """
        if unit.key in self.stores[group]:
            return
        if time.monotonic() < self._broken_until or not self._waiting.acquire(
            blocking=False
        ):
            self.stats.skipped += 1
            return
        # Only this thread counts up, and only the writer down.
        self._submitted += 1
        stamp = pool.stamp(unit.key)
        memory = pool.memory[pool.place(unit.key)]

        def run() -> None:
            try:
                if event is not None:
                    event.synchronize()
                copy = memoryview(bytearray(memory.numpy().data))
                # Otherwise these may be another unit's bytes.
                if pool.stamp(unit.key) == stamp:
                    self._write(group, unit, parent, copy)
            finally:
                self._finished += 1
                self._waiting.release()

        self._writer.submit(run)

    def _write(
        self, group: int, unit: NamedUnit, parent: UnitKey, copy: memoryview
    ) -> None:
        if time.monotonic() < self._broken_until:
            # It waited behind the write that failed.
            self.stats.skipped += 1
            return
        try:
            self.stores[group].write(
                unit.key,
                parent,
                position=unit.position,
                elements=unit.elements,
                unit=copy,
            )
            self.stats.written += group == 0
            self._touched.add(unit.key)
        except (FileExistsError, IsADirectoryError) as error:
            # Something else has the name; others can be written.
            self.stats.skipped += 1
            logger.warning("KV is not written: %s", error)
        except OSError as error:
            self.stats.skipped += 1
            self._broken_until = time.monotonic() + RETRY_SECONDS
            logger.error(
                "KV is not written to %s for %d s: %s",
                self._folder,
                RETRY_SECONDS,
                error.strerror or error,
            )

    def wait_for_writes(self) -> None:
        """Wait until everything is written that was to be."""
        self._writer.submit(lambda: None).result()

    def views(self) -> list[FilesView]:
        """Return what the inspector shows."""
        now = time.time()
        return [
            FilesView(
                group=group.name,
                units=len(store),
                bytes=store.total_bytes,
                max_bytes=store.max_bytes,
                oldest_seconds=max(now - store.oldest_use(), 0.0),
                waiting=self._submitted - self._finished,
            )
            for group, store in zip(self._groups, self.stores, strict=True)
        ]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(store.total_bytes for store in self.stores)

    # -- reading -------------------------------------------------------------------

    def has(self, key: UnitKey) -> bool:
        """Return whether there is a file with the primary slots of a unit."""
        return key in self.stores[0]

    def start(
        self, units: Sequence[NamedUnit], is_known: Callable[[int, UnitKey], bool]
    ) -> Reading:
        """Read units that continue each other, as many as there are, and what a request
        needs of the other groups that goes on after them.

        Args:
            is_known: whether a unit of a group need not be read.
        """
        reading = Reading(started=time.monotonic(), tokens=len(units) * self._size)
        wanted = []
        for unit in units:
            if not self.has(unit.key) and not is_known(0, unit.key):
                break
            wanted.append(unit)
        due = [(0, unit) for unit in wanted]
        due += self._needed(wanted, is_known)
        due = [(group, unit) for group, unit in due if not is_known(group, unit.key)]
        reading.left = len(due)
        for group, unit in due:
            self._readers.submit(self._read, reading, group, unit)
        return reading

    def _needed(
        self,
        units: Sequence[NamedUnit],
        is_known: Callable[[int, UnitKey], bool],
    ) -> list[tuple[int, NamedUnit]]:
        """Return what the secondary groups need for the longest prefix that they can
        complete."""
        for count in range(len(units), 0, -1):
            end = units[count - 1].position + self._size
            needed = [
                (group, unit)
                for group in range(1, len(self.stores))
                for unit in units[:count]
                if unit.position + self._size
                > self._groups[group].places.first_read(end)
            ]
            if all(
                unit.key in self.stores[group] or is_known(group, unit.key)
                for group, unit in needed
            ):
                return needed
        return []

    def _read(self, reading: Reading, group: int, unit: NamedUnit) -> None:
        try:
            if not reading.is_over:
                self._read_one(reading, group, unit)
        except Exception:
            logger.exception("reading KV from %s failed", self._folder)
        finally:
            reading.note_read()

    def _read_one(self, reading: Reading, group: int, unit: NamedUnit) -> None:
        try:
            data = self.stores[group].read(
                unit.key, position=unit.position, elements=unit.elements
            )
        except BadUnit as bad:
            reading.damages.append(
                Damage(
                    kind=bad.kind,
                    tier=TIER,
                    sender=str(bad),
                    group=self._groups[group].name,
                    key=unit.key,
                    position=unit.position,
                    slot=-1,
                )
            )
            return
        if data is not None:
            reading.units[group, unit.key] = data
            self._touched.add(unit.key)
            self.stats.read += group == 0

    def collect(self, reading: Reading) -> GivenUnits:
        """Stop reading; return what there is."""
        reading.is_over = True
        return GivenUnits(
            dict(reading.units), tier=TIER, sender=f"a file in {self._folder}"
        )

    # -- removing ------------------------------------------------------------------

    def discard(self, keys: set[UnitKey]) -> None:
        """Remove units, and all that continue them."""
        every = self.stores[0].below(keys) | keys
        for store in self.stores:
            self._writer.submit(store.drop, every)

    def drop_touched(self) -> None:
        """Remove all units that this process wrote or read, and all that continue
        them: the engine stops because of damage, and the next one must not find it."""
        self.wait_for_writes()
        self.discard(set(self._touched))
        self.wait_for_writes()

    def clear(self) -> None:
        """Remove all files of this identity."""
        for store in self.stores:
            self._writer.submit(store.clear)
        self.wait_for_writes()

    def close(self) -> None:
        """Finish what is being written, and end."""
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
