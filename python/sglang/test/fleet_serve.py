"""Runs Ray Serve in a separate process: deploys replicas and finds their processes."""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from sglang.srt.environ import child_environment
from sglang.test.fleet_gateway import free_port, python_with

START_SECONDS = 300.0
SHOWN_LINES = 40
# As in `sglang.test.fleet_serve_driver`, which imports Ray.
PLANT = "SGLANG_TEST_FLEET_PLANT"
REPLICA_TITLE = "ray::ServeReplica:sglang:"
ENGINE, PREFILL = "SGLang", "Prefill"


class RayServe:
    """Ray and Ray Serve on this host.

    Attributes:
        url: address of the HTTP proxy.
        lines: log lines so far.
    """

    def __init__(self, *, num_cpus: int) -> None:
        python, port = python_with("ray"), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._plant = Path(tempfile.mkdtemp()) / "plant"
        variables = {PLANT: str(self._plant), "RAY_DEDUP_LOGS": "0"}
        self._process = subprocess.Popen(
            [python, "-m", "sglang.test.fleet_serve_driver", str(port), str(num_cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=child_environment(RAY_USAGE_STATS_ENABLED="0", **variables),
        )
        self.lines: list[str] = []
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._lock = threading.Lock()
        for read in (self._read_answers, self._read_log):
            threading.Thread(target=read, daemon=True).start()
        self._next_answer()

    def deploy(self, **args: Any) -> dict[str, Any]:
        """Replace the application by `build_app(args)`; returns the states of the
        replicas that answer, or an `error`.
        """
        return self._ask({"deploy": args})

    def num_running(self, deployment: str = ENGINE) -> int:
        """Number of replicas that Ray Serve reports as running."""
        count: int = self._ask({"status": deployment}).get("RUNNING", 0)
        return count

    def plant(self, variables: dict[str, str]) -> None:
        """Give the scheduler of the next replica `variables`."""
        unseen = self._plant.with_suffix(".new")
        unseen.write_text(json.dumps(variables))
        unseen.rename(self._plant)

    def replica_pids(self, deployment: str = ENGINE) -> set[int]:
        """Process ids of the living replicas of a deployment."""
        found, pending = set(), [self._process.pid]
        children = _children()
        while pending:
            pid = pending.pop()
            pending += children.get(pid, [])
            if _title(pid).startswith(REPLICA_TITLE + deployment):
                found.add(pid)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            return self._next_answer()

    def _next_answer(self) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=START_SECONDS)
        except queue.Empty:
            answer = None
        if answer is None:
            raise AssertionError("\n".join(self.lines[-SHOWN_LINES:]))
        return answer

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip("\n"))


def _children() -> dict[int, list[int]]:
    """Return a map from parent to children of all living processes."""
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            found.setdefault(int(fields[1]), []).append(int(folder.name))
    return found


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
