"""A log that cannot be written: nothing waits for it, what is missing is counted."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang.srt.managers.scheduler.watchdog import Watchdog
from sglang.srt.utils import line_writer
from sglang.srt.utils import logging as engine_logging
from sglang.srt.utils.line_writer import LineStream, LineWriter
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="cpu")

LINE = "x" * 99 + "\n"
DROPPED = re.compile(r"\[.*\] WARNING (\d+) log line\(s\) were dropped")


class Sink:
    """Bytes that were written; refuses them while `error` is set."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.room: int | None = None
        self.data = b""

    def __call__(self, data: bytes) -> int:
        if self.error is not None and self.room is None:
            raise self.error
        taken, self.room = data[: self.room], None
        self.data += taken
        return len(taken)

    @property
    def lines(self) -> list[str]:
        return self.data.decode().splitlines()


def count_of(lines: list[str]) -> int:
    """Lines that were written, and those that are said to be missing."""
    found = [DROPPED.fullmatch(line) for line in lines]
    return sum(1 if match is None else int(match[1]) for match in found)


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, int]]:
    """A pipe that takes no byte more, and that nobody reads."""
    reader, sender = os.pipe()
    os.set_blocking(sender, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(sender, b"\n" * 4096)
    os.set_blocking(sender, True)
    yield reader, sender
    for descriptor in (reader, sender):
        os.close(descriptor)


def test_lines_come_out_in_order() -> None:
    sink = Sink()
    writer = LineWriter(sink)
    for i in range(1000):
        writer.write(f"{i}\n")
    assert writer.flush(10)
    assert sink.lines == [str(i) for i in range(1000)]


def test_a_pipe_that_nobody_reads(full_pipe: tuple[int, int]) -> None:
    reader, sender = full_pipe
    writer = LineWriter(lambda data: os.write(sender, data), max_bytes=10_000)
    for _ in range(1000):
        writer.write(LINE)
    assert not writer.flush(0.05)
    lines: list[str] = []
    with os.fdopen(os.dup(reader)) as text:
        while count_of(lines) < 1000:
            lines += [line for line in (text.readline().rstrip("\n"),) if line]
    assert count_of(lines) == 1000
    assert len([line for line in lines if line + "\n" == LINE]) == 100
    assert DROPPED.fullmatch(lines[-1])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.EBADF, errno.EIO])
def test_a_disk_that_is_full_for_a_while(number: int) -> None:
    sink = Sink()
    writer = LineWriter(sink)
    sink.error = OSError(number, "refused")
    for _ in range(50):
        writer.write(LINE)
    assert writer.flush(10)
    assert sink.data == b""
    sink.error = None
    writer.write("again\n")
    assert writer.flush(10)
    missing, last = sink.lines
    assert DROPPED.fullmatch(missing) and count_of([missing]) == 50
    assert last == "again"


def test_a_line_that_was_torn_does_not_join_the_next() -> None:
    sink = Sink()
    writer = LineWriter(sink)
    sink.error, sink.room = OSError(errno.ENOSPC, "full"), 3
    writer.write("torn line\n")
    assert writer.flush(10)
    sink.error = None
    writer.write("next\n")
    assert writer.flush(10)
    begun, missing, last = sink.lines
    assert (begun, last) == ("tor", "next") and count_of([missing]) == 1


def test_a_descriptor_that_does_not_block_is_tried_again() -> None:
    sink = Sink()
    writer = LineWriter(sink)
    sink.error = BlockingIOError()
    writer.write(LINE)
    assert not writer.flush(0.05)
    sink.error = None
    assert writer.flush(10)
    assert sink.lines == [LINE[:-1]]


def test_a_huge_line_is_cut() -> None:
    sink = Sink()
    writer = LineWriter(sink)
    writer.write("y" * (line_writer.MAX_PIECE_BYTES + 7) + "\n")
    assert writer.flush(10)
    (line,) = sink.lines
    assert line.endswith("y ... (8 bytes more)")


def test_a_stream_passes_on_whole_lines() -> None:
    sink = Sink()
    writer = LineWriter(sink)
    stream = LineStream(writer, descriptor=2)
    print("one", "two", file=stream)
    print("a part", end="", file=stream)
    assert writer.flush(10)
    assert sink.lines == ["one two"]
    print(" \ud800", file=stream, flush=True)
    assert writer.flush(10)
    assert sink.lines[1] == "a part \\ud800"
    assert stream.fileno() == 2


def test_repeated_errors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Sink()
    writer = LineWriter(sink)
    handler = engine_logging.LimitedHandler(LineStream(writer, descriptor=2))
    logger = logging.Logger("test")
    logger.addHandler(handler)

    def storm(count: int) -> None:
        for i in range(count):
            logger.error("fault %d", i)

    storm(250)
    for i in range(300):
        logger.info("request %d", i)
    assert writer.flush(10)
    assert len([line for line in sink.lines if "fault" in line]) == 100
    assert len([line for line in sink.lines if "request" in line]) == 300
    monkeypatch.setattr(engine_logging, "REPEAT_SECONDS", 0.0)
    sink.data = b""
    storm(1)
    assert writer.flush(10)
    said, line = sink.lines
    assert said.startswith("150 more lines like the next one in the ")
    assert line == "fault 0"


def run(program: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", textwrap.dedent(program)],
        text=True,
        timeout=60,
        **options,
    )


HOST = """
    import logging, sys
    from sglang.srt.utils.logging import configure_embedded_logging
    configure_embedded_logging("info")
    engine = logging.getLogger("sglang.srt.x")
    engine.info("before")
    logging.basicConfig(format="host: %(message)s", level="WARNING", stream=sys.stdout)
    configure_embedded_logging("info")
    engine.info("after")
    logging.getLogger("uvicorn").error("the host's own")
"""


def test_an_engine_leaves_its_host_s_logging_alone() -> None:
    done = run(HOST, capture_output=True)
    assert re.fullmatch(r"\[.*\] INFO before\n", done.stderr)
    assert done.stdout.splitlines() == ["host: after", "host: the host's own"]


LAST_WORDS = """
    import logging, sys, warnings
    from sglang.srt.utils.logging import configure_logging
    from sglang.srt.utils.standard_streams import guard_standard_streams
    guard_standard_streams()
    configure_logging("info")
    for i in range(2000):
        logging.getLogger("sglang").info("line %d", i)
    print("printed")
    warnings.warn("warned")
    raise KeyError("the end")
"""


def test_the_last_lines_come_out() -> None:
    done = run(LAST_WORDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert len([line for line in lines if "INFO line" in line]) == 2000
    assert lines[2000] == "printed" and "warned" in lines[2001]
    assert lines[-1] == "KeyError: 'the end'"


@pytest.mark.parametrize("where", ["full disk", "unread pipe", "closed"])
def test_a_process_ends_without_its_log(
    where: str, full_pipe: tuple[int, int], tmp_path: Path
) -> None:
    """The exception still ends it, and its exit code is that of the exception."""
    if where == "closed":
        closing = "import os; os.close(1); os.close(2)\n"
        program = closing + textwrap.dedent(LAST_WORDS)
        assert run(program, stderr=subprocess.DEVNULL).returncode == 1
        return
    with open("/dev/full", "wb") as full:
        stream = full.fileno() if where == "full disk" else full_pipe[1]
        assert run(LAST_WORDS, stdout=stream, stderr=stream).returncode == 1


WATCHDOG = """
    import time
    from sglang.srt.managers.scheduler.watchdog import Watchdog
    from sglang.srt.utils.logging import configure_logging
    from sglang.srt.utils.standard_streams import guard_standard_streams
    guard_standard_streams()
    configure_logging("info")
    with Watchdog(0.05).guard():
        time.sleep(60)
"""


def test_the_watchdog_ends_a_process_whose_log_is_blocked(
    full_pipe: tuple[int, int],
) -> None:
    assert run(WATCHDOG, stderr=full_pipe[1]).returncode == 70
    heard = run(WATCHDOG, stderr=subprocess.PIPE)
    assert heard.returncode == 70
    assert "--watchdog-timeout 0.05 s" in heard.stderr
    assert "Current thread" in heard.stderr and "in <module>" in heard.stderr


def test_the_watchdog_s_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    closed, dropped = Watchdog(60), Watchdog(60)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    closed.close()
    closed.close()
    del dropped
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
