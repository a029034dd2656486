"""One side of a comparison as a separate process that executes commands line by line.

A side's libraries, thread pools and memory are separate from the others', and an idle
side sleeps in a read. Standard library only: a side may run under another Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

STDOUT = 1
STDERR = 2
EXIT_SECONDS = 10.0

Handler = Callable[..., Any]


class WorkerError(RuntimeError):
    """The worker failed; carries its own message."""


class BenchWorker:
    """A child process that runs `serve`; a context manager that ends it.

    Args:
        name: for messages.
        command: program and arguments.
        environment: the complete environment of the child.

    Attributes:
        pid: the child's process id.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(environment),
        )
        self.pid = self._process.pid

    def call(self, command: str, **arguments: Any) -> Any:
        """Run a command in the child and return its result.

        Raises:
            WorkerError: it raised, or the process ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        line = json.dumps({"command": command, "arguments": arguments})
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer is reported below
        answer = self._process.stdout.readline()
        if not answer:
            raise WorkerError(
                f"{self.name} ended with exit code {self._process.wait()} during "
                f"{command}"
            )
        content = json.loads(answer)
        if "error" in content:
            raise WorkerError(f"{self.name}: {content['error']}")
        return content["result"]

    def close(self) -> None:
        """Close the child's input, which ends it, and wait for its exit."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> BenchWorker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def worker_environment(
    base: Mapping[str, str], *, threads: int, **extra: str
) -> dict[str, str]:
    """Return `base` with OpenMP's thread number set and this package importable."""
    package_root = str(Path(__file__).resolve().parents[2])
    paths = [path for path in (package_root, base.get("PYTHONPATH")) if path]
    return {
        **base,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(paths),
        **extra,
    }


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer commands from stdin until it closes: the child's main function.

    Output of libraries to stdout goes to stderr, so that it cannot be mistaken for an
    answer.
    """
    answers = os.fdopen(os.dup(STDOUT), "w", encoding="utf-8")
    os.dup2(STDERR, STDOUT)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = handlers[request["command"]](**request["arguments"])
            answer = {"result": result}
        except Exception as error:  # any failure of a side is the caller's to report
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
