"""The folder of incident files: a bounded number of JSON documents."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class IncidentFolder:
    """Writes documents into `path`. A folder that cannot be written to stops nothing.

    Args:
        rank: rank of this process, for the names.
        max_files: most files of this process; 0 for no limit. max_files_option: its
            name for users.
        replay_command: command that replays an incident, given its file's name.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        max_files: int,
        max_files_option: str,
        replay_command: str = "",
    ) -> None:
        self._path = path
        self._rank = rank
        self._max_files = max_files
        self._max_files_option = max_files_option
        self._replay_command = replay_command
        self._num_asked = 0
        self._has_failed = False

    def write(
        self,
        document: dict[str, Any],
        *,
        beside: Callable[[], bytes | None] = lambda: None,
    ) -> Path | None:
        """Write one more file. Returns None if there are too many, or no room.

        Args:
            document: its `record` is set to the name of the second file.
            beside: makes the content of a second file, or returns None.
        """
        if not self._may_write():
            return None
        stem = (
            f"kv_canary-{time.time_ns()}-rank{self._rank}-forward{document['forward']}"
        )
        name = f"{stem}.json"
        record = beside()
        try:
            if record is not None:
                self._write(f"{stem}.record", record)
                document["record"] = f"{stem}.record"
                document["replay"] = f"{self._replay_command} {name}"
            self._write(name, json.dumps(document, indent=2).encode())
        except OSError as error:
            # Warn once, because a full disk stays full for long.
            if not self._has_failed:
                logger.error(
                    "kv_canary: cannot write %s: %s; goes on without incident files "
                    "until it can",
                    self._path / name,
                    error,
                )
            self._has_failed = True
            return None
        self._has_failed = False
        return self._path / name

    def _may_write(self) -> bool:
        """Whether one more file may be written. A damaged slot of the cache may be
        reported as long as the server runs."""
        limit = self._max_files
        self._num_asked += 1
        if limit and self._num_asked == limit + 1:
            logger.error(
                "kv_canary: %d incident files are written, no more follow (%s); the "
                "log goes on",
                limit,
                self._max_files_option,
            )
        return not limit or self._num_asked <= limit

    def _write(self, name: str, data: bytes) -> None:
        """Write a file that is complete once it has its name, because a reader may
        look, or the process may be killed, in the meantime."""
        begun = self._path / f".{name}.part"
        try:
            descriptor = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            begun.rename(self._path / name)
        except OSError:
            with contextlib.suppress(OSError):
                begun.unlink(missing_ok=True)
            raise
