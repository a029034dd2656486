"""Starts servers and schedulers of tests by forking, if that only saves CPU time; see
`fork_server`.

`open_fork_server` makes a process, and everything it forks later, start them this way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.managers.front import scheduler_process
from sglang.test.fork_protocol import (
    READ_BY_IMPORTS,
    ChildrenOf,
    Request,
    receive,
    send,
)

# Variables without meaning to the product, or read on use like its own. A library may
# have read any other variable at import, so a child with a different value is a new
# process.
FREE_VARIABLES = {
    "CUDA_VISIBLE_DEVICES",  # where GPUs are, nothing is forked
    "GLOO_SOCKET_IFNAME",
    "PYTEST_CURRENT_TEST",
    "PYTHONPATH",
    "TORCHINDUCTOR_CACHE_DIR",  # set by an import of torch._inductor
}
OWN_PREFIX = "SGLANG_"
STDIN, STDOUT, STDERR = range(3)

start_process: Callable[..., Any] = subprocess.Popen
"""Starts a test's server; `forking` replaces this and the schedulers' one."""


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Servers and schedulers of this process, and of those that it forks, are forked
    from one that has imported what they import."""
    global start_process
    folder = Path(tempfile.mkdtemp(prefix="sglang-"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "forks"))
    listener.listen(64)
    ours, lifeline = os.pipe()
    environment = _with_threads(os.environ)
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "sglang.test.fork_server"),
            *(str(listener.fileno()), str(ours)),
        ],
        env=environment,
        pass_fds=(listener.fileno(), ours),
        stdin=subprocess.DEVNULL,
    )
    os.close(ours)
    client = ForkServerClient(listener.getsockname(), environment)
    before = scheduler_process.start_child
    scheduler_process.start_child = start_process = client.start
    try:
        yield
    finally:
        scheduler_process.start_child = before
        start_process = subprocess.Popen
        os.close(lifeline)
        listener.close()
        server.wait()
        shutil.rmtree(folder)


def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run` for a Python program, with its output as text."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start_process(
            command,
            env=os.environ if env is None else env,
            stdout=out.fileno(),
            stderr=err.fileno(),
        )
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        written = []
        for file in (out, err):
            file.seek(0)
            written.append(file.read().decode())
    return subprocess.CompletedProcess(command, code, *written)


class ForkedProcess:
    """The part of a `subprocess.Popen` that tests and the product use."""

    def __init__(
        self, pid: int, connection: socket.socket, *, stdin: Any, stdout: Any
    ) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._connection = connection
        self._lock = threading.Lock()

    def children(self) -> list[int]:
        """Processes forked for this one, which is not their parent."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._connection.getpeername())
            send(connection, ChildrenOf(pid=self.pid))
            pids, _ = receive(connection, list[int])
        return list(pids)

    def poll(self) -> int | None:
        return self._await_end(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._await_end(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _await_end(self, timeout: float | None) -> int | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        # Other waiting calls are served when this one is.
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            return self.returncode
        try:
            if self.returncode is None:
                left = None if deadline is None else max(deadline - time.monotonic(), 0)
                if wait([self._connection], left):
                    self.returncode, _ = receive(self._connection, int)
                    self._connection.close()
            return self.returncode
        finally:
            self._lock.release()


class ForkServerClient:
    """A client of the server at `address`, which was started with `environment`."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        self._address = address
        self._environment = _decisive(environment)

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        text: bool = False,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
    ) -> Any:
        """Like `subprocess.Popen`, which is called if a fork could make a difference:
        for a program that is not Python, or for variables that differ from the
        server's.
        """
        if (
            command[0] != sys.executable
            or not (command[1] in ("-m", "-c") or command[1].endswith(".py"))
            or _decisive(env) != self._environment
        ):
            return subprocess.Popen(
                command,
                env=env,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                text=text,
                pass_fds=pass_fds,
                start_new_session=start_new_session,
            )
        pipes = []
        ours: dict[str, Any] = {"stdin": None, "stdout": None}
        if stdin == subprocess.PIPE:
            stdin, writer = os.pipe()
            pipes.append(stdin)
            ours["stdin"] = open(writer, "wb", buffering=0)  # noqa: SIM115
        if stdout == subprocess.PIPE:
            reader, stdout = os.pipe()
            pipes.append(stdout)
            ours["stdout"] = open(reader, "r" if text else "rb")  # noqa: SIM115
        fds = [
            STDIN if stdin is None else stdin,
            STDOUT if stdout is None else stdout,
            STDERR if stderr is None else stderr,
        ]
        if stderr == subprocess.STDOUT:
            fds[STDERR] = fds[STDOUT]
        request = Request(
            command=list(command[1:]),
            environment=dict(env),
            folder=os.getcwd(),
            targets=[STDIN, STDOUT, STDERR, *pass_fds],
            is_session_leader=start_new_session,
        )
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        send(connection, request, [*fds, *pass_fds])
        pid, _ = receive(connection, int)
        for fd in pipes:
            os.close(fd)
        return ForkedProcess(pid, connection, **ours)


def _decisive(environment: Mapping[str, str]) -> dict[str, str]:
    def is_free(name: str) -> bool:
        is_own = name.startswith(OWN_PREFIX) and name not in READ_BY_IMPORTS
        return is_own or name in FREE_VARIABLES

    every = _with_threads(environment)
    return {name: value for name, value in every.items() if not is_free(name)}


def _with_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """Add defaults for a server's scheduler on two cores, because OpenMP reads them
    only once.
    """
    policy = envs.OMP_WAIT_POLICY.get()
    return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": policy, **environment}
