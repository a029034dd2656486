"""stdout and stderr of an engine process, which goes on whatever becomes of them."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from sglang.srt.utils.line_writer import LineStream, LineWriter

STDOUT, STDERR = 1, 2


def guard_standard_streams() -> None:
    """Write the stdout and stderr of this process from threads of their own.

    For processes that are the engine's: a print, a warning or a traceback into a full
    disk or a pipe that nobody reads then neither blocks nor fails.
    """
    open_missing_descriptors()
    out = LineWriter.to_descriptor(STDOUT)
    # One writer for one file: the order of the lines stays.
    is_same = os.path.sameopenfile(STDOUT, STDERR)
    err = out if is_same else LineWriter.to_descriptor(STDERR)
    sys.stdout = LineStream(out, descriptor=STDOUT)
    sys.stderr = LineStream(err, descriptor=STDERR)


def guarded_stderr() -> LineStream:
    """A stream to the stderr of this process, which may be a host's own object."""
    stream = sys.stderr
    if isinstance(stream, LineStream):
        return stream
    if stream is None or stream is sys.__stderr__:
        writer = LineWriter.to_descriptor(STDERR)
    else:
        writer = LineWriter(lambda data: _write_text(stream, data))
    return LineStream(writer, descriptor=STDERR)


def open_missing_descriptors() -> None:
    """Open /dev/null in place of closed standard descriptors.

    The next socket or file would get their numbers, and every line of the log.
    """
    for descriptor in range(STDERR + 1):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, descriptor)
            if opened != descriptor:
                os.close(opened)


def _write_text(stream: TextIO, data: bytes) -> int:
    stream.write(data.decode())
    stream.flush()
    return len(data)
