"""stdout and stderr of an engine process, which must keep running whatever happens to
them.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

from sglang.srt.utils.line_writer import LineStream, LineWriter

STDOUT, STDERR = 1, 2


def guard_standard_streams() -> None:
    """Write this process's stdout and stderr from separate threads.

    For the engine's own processes: a print, a warning or a traceback to a full disk or
    an unread pipe then neither blocks nor fails.
    """
    open_missing_descriptors()
    out = LineWriter.to_descriptor(STDOUT)
    # One writer per file, to keep the order of lines.
    is_same = os.path.sameopenfile(STDOUT, STDERR)
    err = out if is_same else LineWriter.to_descriptor(STDERR)
    sys.stdout = LineStream(out, descriptor=STDOUT)
    sys.stderr = LineStream(err, descriptor=STDERR)


def guarded_stderr() -> LineStream:
    """Return a stream to this process's stderr, which may be a host's object."""
    stream = sys.stderr
    if isinstance(stream, LineStream):
        return stream
    if stream is None or stream is sys.__stderr__:
        writer = LineWriter.to_descriptor(STDERR)
    else:
        writer = LineWriter(lambda data: _write_text(stream, data))
    return LineStream(writer, descriptor=STDERR)


def open_missing_descriptors() -> None:
    """Open /dev/null for closed standard descriptors.

    Otherwise the next socket or file would get their numbers, and every log line.
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
