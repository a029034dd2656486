"""A server in a separate process: start, readiness, log, signals, exit."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang.srt.environ import child_environment, envs
from sglang.test import forked_process
from sglang.test.scale import POOL_TOKENS

# A server on a GPU may compile all of its kernels, at the same time as other tests.
READY_SECONDS = 180.0


class ServerProcess:
    """`python -m sglang.launch_server` with `flags`, on a free port, with a small pool
    unless they set one.

    Args:
        environment: variables in addition to this process's.
        is_forked: whether it may skip imports by being forked (`forked_process`).

    Attributes:
        lines: output lines so far.
        url: address, set once it is ready.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        is_forked: bool = True,
    ) -> None:
        command = [sys.executable, "-m", "sglang.launch_server", "--port", "0", *flags]
        if envs.SGLANG_TEST_KV_CANARY.get() and "--kv-canary" not in flags:
            command += ["--kv-canary", "raise", "--kv-canary-real-data", "all"]
        if "--max-total-tokens" not in flags:
            command += ["--max-total-tokens", str(POOL_TOKENS)]
        start = forked_process.start_process if is_forked else subprocess.Popen
        self.process = start(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=child_environment(**(environment or {})),
        )
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> ServerProcess:
        assert self._ready.wait(READY_SECONDS) and self.url, self.log()
        return self

    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_for_lines(self, text: str, count: int = 1) -> list[str]:
        """Wait until `count` log lines contain `text`, and return them. They arrive
        through a pipe, later than the answers they are about.
        """
        deadline = time.monotonic() + 10
        while len(found := [line for line in self.lines if text in line]) < count:
            assert time.monotonic() < deadline, f"{text!r} in the log:\n{self.log()}"
            time.sleep(0.02)
        return found

    def children(self) -> list[int]:
        """Return the processes that the front has started and that still run."""
        found = find_children(self.process.pid)
        if isinstance(self.process, forked_process.ForkedProcess):
            found += self.process.children()
        return found

    def scheduler_pid(self) -> int:
        children = self.children()
        schedulers = [child for child in children if not _is_for_side_work(child)]
        assert len(schedulers) == 1, children
        return schedulers[0]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait_exit(self, seconds: float = 30.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("ready on "):
                self.url = line.split()[-1]
                self._ready.set()
        self._ready.set()


def find_children(pid: int) -> list[int]:
    """Return the children of a process; empty if it has exited."""
    try:
        tasks = [*Path(f"/proc/{pid}/task").iterdir()]
        listed = [(task / "children").read_text() for task in tasks]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for text in listed for child in text.split()]


def _is_for_side_work(pid: int) -> bool:
    """Whether a server's child is a side-work process or has exited: their number
    changes.
    """
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return True
    return not command or b"side_jobs" in command
