"""Writes text to a descriptor that may be full, blocked or gone, without ever blocking
callers.
"""

from __future__ import annotations

import atexit
import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

MAX_PENDING_BYTES = 1 << 20
MAX_PIECE_BYTES = 128 << 10
EXIT_SECONDS = 1.0
# Seconds between attempts to write to a non-blocking descriptor that is not ready.
RETRY_SECONDS = 0.05
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"

# Writes a prefix of the bytes and returns its length.
Sink = Callable[[bytes], int]


class LineWriter:
    """A queue of text and the thread that writes it.

    `write` neither blocks nor raises. Lines that the sink rejects (a full disk, a
    closed pipe) or that do not fit in the queue (a pipe without a reader) are counted;
    once it accepts text again, a line says how many are missing.

    Args:
        sink: writes bytes; may block or raise OSError.
    """

    def __init__(self, sink: Sink, *, max_bytes: int = MAX_PENDING_BYTES) -> None:
        self._sink = sink
        self._max_bytes = max_bytes
        self._is_torn = False
        self._reset()
        if not _WRITERS:
            atexit.register(flush_all)
        _WRITERS.append(self)
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Start empty, as in a forked child: the parent writes what was pending."""
        # Reentrant: a finalizer may log while its thread is in here.
        self._changed = threading.Condition(threading.RLock())
        # Pieces, with the number of lines lost if one is not written.
        self._pending: deque[tuple[bytes, int]] = deque()
        self._pending_bytes = 0
        self._dropped = 0
        self._thread: threading.Thread | None = None

    @classmethod
    def to_descriptor(cls, descriptor: int) -> LineWriter:
        return cls(partial(os.write, descriptor))

    def write(self, text: str) -> None:
        """Queue whole lines; a piece beyond `MAX_PIECE_BYTES` is truncated."""
        data = text.encode(errors="backslashreplace")
        lines = max(data.count(b"\n"), 1)
        if len(data) > MAX_PIECE_BYTES:
            missing = len(data) - MAX_PIECE_BYTES
            data = data[:MAX_PIECE_BYTES] + b" ... (%d bytes more)\n" % missing
        with self._changed:
            if self._pending_bytes + len(data) > self._max_bytes:
                self._dropped += lines
                return
            self._queue_notice()
            self._queue(data, lines)

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written or dropped; returns False after
        `seconds`.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending_bytes, seconds)

    def _queue_notice(self) -> None:
        """Queue a line that says how many lines were dropped here."""
        if self._dropped:
            text = f"WARNING {self._dropped} log line(s) were dropped"
            notice = f"[{time.strftime(DATE_FORMAT)}] {text}\n".encode()
            self._queue(notice, self._dropped)
            self._dropped = 0

    def _queue(self, data: bytes, lines: int) -> None:
        self._pending.append((data, lines))
        self._pending_bytes += len(data)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be started now; the next line tries
                # again
                return
            self._thread = thread
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._pending:
                    self._changed.wait()
                data, lines = self._pending.popleft()
            is_written = self._write_out(data)
            with self._changed:
                self._pending_bytes -= len(data)
                if not is_written:
                    self._dropped += lines
                elif not self._pending:
                    self._queue_notice()
                self._changed.notify_all()

    def _write_out(self, data: bytes) -> bool:
        if self._is_torn:
            data = b"\n" + data
        size = len(data)
        while data:
            try:
                data = data[self._sink(data) :]
            except BlockingIOError:
                time.sleep(RETRY_SECONDS)
            except (OSError, ValueError):  # ValueError: the host closed its stream
                self._is_torn = self._is_torn or len(data) < size
                return False
        self._is_torn = False
        return True


class LineStream(io.TextIOBase):
    """A text stream that passes whole lines to a `LineWriter`.

    Args:
        descriptor: descriptor of the writer's file, for `fileno`.
    """

    encoding = "utf-8"

    def __init__(self, writer: LineWriter, *, descriptor: int) -> None:
        self.writer = writer
        self._descriptor = descriptor
        self._lock = threading.RLock()
        self._part = ""

    def write(self, text: str) -> int:
        with self._lock:
            whole, newline, self._part = (self._part + text).rpartition("\n")
            if newline:
                self.writer.write(whole + newline)
        return len(text)

    def flush(self) -> None:
        """Pass on an unfinished line, without waiting."""
        with self._lock:
            part, self._part = self._part, ""
            if part:
                self.writer.write(part)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True


_WRITERS: list[LineWriter] = []


def flush_all(seconds: float = EXIT_SECONDS) -> None:
    """Wait at most `seconds` for all writers of this process, before it exits."""
    deadline = time.monotonic() + seconds
    for writer in _WRITERS:
        writer.flush(max(deadline - time.monotonic(), 0.0))
