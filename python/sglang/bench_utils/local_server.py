"""A server on this machine for the duration of a benchmark."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from types import TracebackType

from sglang.bench_utils.worker import worker_environment
from sglang.srt.environ import child_environment

READY_TIMEOUT_SECONDS = 120.0
POLL_SECONDS = 0.05
STOP_SECONDS = 20.0


class LocalServer:
    """`python -m sglang.launch_server` on a free port of 127.0.0.1.

    A context manager that waits until the server is ready and stops it at the end.

    Args:
        flags: further flags of the server.
        threads: OpenMP threads of the model; 0: the server's default.

    Attributes:
        url: its address.
        ready_seconds: from the start of the process to a healthy answer.
        pid: its process id.
    """

    def __init__(self, flags: Sequence[str] = (), *, threads: int = 0) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.ready_seconds = 0.0
        self._command = [sys.executable, "-m", "sglang.launch_server"]
        self._command += ["--port", str(port), "--log-level", "error", *flags]
        self._environment = worker_environment(child_environment(), threads=threads)

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> LocalServer:
        began = time.perf_counter()
        # The server's own output goes to stderr: stdout ends in the report.
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=sys.stderr
        )
        try:
            self._wait_ready(began + READY_TIMEOUT_SECONDS)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self.ready_seconds = time.perf_counter() - began
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_ready(self, deadline: float) -> None:
        while time.perf_counter() < deadline:
            if self._process.poll() is not None:
                raise ValueError(
                    f"the server ended with exit code {self._process.returncode} "
                    "before it was ready; its message is above"
                )
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=1.0):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(POLL_SECONDS)
        raise ValueError(
            f"the server was not ready within {READY_TIMEOUT_SECONDS:g} seconds"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
