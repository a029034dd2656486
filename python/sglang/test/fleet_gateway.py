"""SGLang's model gateway, as installed, in front of servers of this engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang.srt.environ import child_environment
from sglang.test.server_process import ServerProcess

# Flags for one gateway only. smg 1.x skips replicas that wait for memory or whose next
# token is seconds away: on a loaded test machine that may be all of them.
OWN_FLAGS = {
    "smg": ("--disable-worker-overload-protection", "--worker-wedge-secs", "120")
}
REPO = Path(__file__).resolve().parents[3]
FLEET_PYTHON = REPO / ".fleet-venv" / "bin" / "python"
READY_SECONDS = 60.0
POLL_SECONDS = 0.05
# The gateway's defaults ask once a minute and give up after three failures. A request
# that fails goes back to where its prefix is: five attempts end after 0.7 s, before the
# next check, eight after 2.5 s.
HEALTH_FLAGS = (
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "1"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
    *("--retry-max-retries", "8"),
)


def python_with(*modules: str) -> str:
    """Return an interpreter that has one of `modules`: this one, or the one from `make
    fleet-venv`. Skips the calling test if there is none.
    """
    for python in (sys.executable, str(FLEET_PYTHON)):
        if os.path.exists(python) and any(_has(python, module) for module in modules):
            return python
    pytest.skip(f"{' or '.join(modules)} is not installed: make fleet-venv")


def _has(python: str, module: str) -> bool:
    code = (
        f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"
    )
    return subprocess.run([python, "-c", code], cwd="/").returncode == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def wait_until(is_true: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait until `is_true`, for at most `seconds`; returns the seconds it took."""
    began = time.monotonic()
    while not is_true():
        assert time.monotonic() - began < seconds, what
        time.sleep(POLL_SECONDS)
    return time.monotonic() - began


class Replica:
    """A server that can be restarted on the same port with the same `flags`."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._flags = list(flags)
        self.server = ServerProcess(self._flags)

    def wait_ready(self) -> Replica:
        self.server.wait_ready()
        return self

    @property
    def url(self) -> str:
        return self.server.url

    def restart(self, environment: Mapping[str, str] | None = None) -> None:
        """Start the exited server again on the same port, once with variables."""
        assert self.server.process.poll() is not None
        flags = [*self._flags, "--port", self.url.rpartition(":")[2]]
        self.server = ServerProcess(flags, environment=environment).wait_ready()

    def num_requests(self) -> int:
        """Number of requests accepted since it was started."""
        count: int = self.internal_state()["num_requests_total"]
        return count

    def internal_state(self) -> dict[str, Any]:
        """Return the scheduler's gauges and counters."""
        answer = httpx.get(self.url + "/server_info", trust_env=False, timeout=30)
        state: dict[str, Any] = answer.json()["internal_states"][0]
        return state

    def flush_cache(self) -> None:
        answer = httpx.post(self.url + "/flush_cache", trust_env=False, timeout=30)
        assert answer.status_code == 200, answer.text


class Gateway:
    """`python -m <module> launch` in front of `urls`.

    Args:
        workers: flags that name the workers, if not all of them serve whole requests.

    Attributes:
        lines: log lines so far.
    """

    def __init__(
        self,
        python: str,
        module: str,
        urls: Sequence[str],
        *,
        policy: str,
        flags: Sequence[str] = (),
        workers: Sequence[str] = (),
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [python, "-m", module, "launch", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--policy", policy]
        command += ["--prometheus-host", "127.0.0.1"]
        command += ["--prometheus-port", str(free_port())]
        command += ["--worker-startup-check-interval", "1", *HEALTH_FLAGS, *flags]
        command += OWN_FLAGS.get(module, ())
        self._process = subprocess.Popen(
            [*command, *(workers or ("--worker-urls", *urls))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=child_environment(NO_COLOR="1"),
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self._http = httpx.Client(base_url=self.url, timeout=30, trust_env=False)
        try:
            wait_until(
                lambda: self.num_in_rotation() == len(urls),
                READY_SECONDS,
                "the gateway did not find its workers",
            )
        except BaseException:
            print("\n".join(self.lines))
            self.close()
            raise

    def num_in_rotation(self) -> int:
        """Number of workers that the gateway reports as healthy."""
        return len(self.in_rotation())

    def in_rotation(self) -> set[str]:
        """Addresses of workers that the gateway reports as healthy."""
        try:
            workers = self._http.get("/workers").json()["workers"]
        except httpx.TransportError:
            assert self._process.poll() is None, "\n".join(self.lines)
            return set()
        return {worker["url"] for worker in workers if worker["is_healthy"]}

    def warnings(self) -> list[str]:
        return [line for line in self.lines if " WARN" in line or " ERROR" in line]

    def close(self) -> None:
        self._http.close()
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
