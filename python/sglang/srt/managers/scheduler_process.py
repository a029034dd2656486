"""Starts the scheduler process, waits until it can serve, notices its death, stops it.

Uses a plain child process instead of `multiprocessing`: nothing of the caller's script
is imported again, so `Engine()` needs no `if __name__ == "__main__"` guard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from sglang.srt.environ import child_environment, envs
from sglang.srt.managers.io_struct import SchedulerReady
from sglang.srt.managers.scheduler_addresses import SchedulerAddresses
from sglang.srt.server_args import ServerArgs

MAIN_MODULE = "sglang.srt.managers.scheduler_main"
# A path of a unix socket holds 107 bytes; the names in the folder need about 20.
MAX_FOLDER_CHARS = 80


class SchedulerDied(RuntimeError):
    """The process ended without being asked to."""

    def __init__(self, exit_code: int) -> None:
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        super().__init__(f"the scheduler process died ({how})")
        self.exit_code = exit_code


class SchedulerProcess:
    """One running scheduler.

    Attributes:
        addresses: where it listens and answers; sockets lie in a private folder.
        pid: its process id.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        addresses: SchedulerAddresses,
        folder: Path,
        ready: Connection,
    ) -> None:
        self.addresses = addresses
        self.pid = process.pid
        self._process = process
        self._folder = folder
        self._ready = ready
        self._exited = threading.Event()
        self._lock = threading.Lock()
        self._on_exit: Callable[[int], None] | None = None
        threading.Thread(target=self._watch, name="scheduler-exit", daemon=True).start()

    @classmethod
    def start(
        cls,
        server_args: ServerArgs,
        *,
        num_threads: int,
        command: Sequence[str] = (sys.executable, "-m", MAIN_MODULE),
    ) -> SchedulerProcess:
        """Start the process; returns at once.

        Args:
            num_threads: OpenMP threads of the child, where OMP_NUM_THREADS is not set.
            command: program and arguments; the descriptor to report on is appended.
        """
        folder = _make_private_folder()
        addresses = SchedulerAddresses(
            request_endpoint=f"ipc://{folder}/requests",
            response_endpoint=f"ipc://{folder}/responses",
        )
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = subprocess.Popen(
            [*command, str(sender.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=(sender.fileno(),),
            env=_environment(num_threads),
            # Ctrl-C in a terminal reaches the front alone, which then drains.
            start_new_session=True,
        )
        sender.close()
        config = {
            "server_args": dataclasses.asdict(server_args),
            "addresses": dataclasses.asdict(addresses),
        }
        assert process.stdin is not None
        # stdin stays open: its end tells the child that this process is gone. A child
        # that is gone already is reported by `wait_ready`.
        with contextlib.suppress(BrokenPipeError):
            os.write(process.stdin.fileno(), msgspec.json.encode(config) + b"\n")
        return cls(process, addresses=addresses, folder=folder, ready=receiver)

    def wait_ready(self) -> SchedulerReady:
        """Block until the process can serve.

        Raises:
            ValueError: it refused the configuration; its own message.
            SchedulerDied: it ended before it was ready.
        """
        try:
            data = self._ready.recv_bytes()
        except EOFError:
            self._exited.wait()
            raise SchedulerDied(self._process.returncode) from None
        finally:
            self._ready.close()
        ready = msgspec.msgpack.decode(data, type=SchedulerReady)
        if ready.error is not None:
            raise ValueError(ready.error)
        return ready

    def notify_exit(self, callback: Callable[[int], None]) -> None:
        """Call `callback(exit code)` once, from any thread, when the process ends."""
        with self._lock:
            self._on_exit = callback
            exited = self._exited.is_set()
        if exited:
            callback(self._process.returncode)

    def kill(self) -> None:
        """End the process at once."""
        if not self._exited.is_set():
            self._process.kill()

    def stop(self, timeout: float) -> bool:
        """Wait for the exit, kill after `timeout` seconds, remove the sockets.

        Returns True where the process left by itself.
        """
        left = self._exited.wait(timeout)
        if not left:
            self.kill()
            self._exited.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return left

    def _watch(self) -> None:
        exit_code = self._process.wait()
        with self._lock:
            self._exited.set()
            callback = self._on_exit
        if callback is not None:
            callback(exit_code)


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _make_private_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="sglang-")  # mode 0700
    if len(folder) > MAX_FOLDER_CHARS:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="sglang-", dir="/tmp")
    return Path(folder)


def _environment(num_threads: int) -> dict[str, str]:
    """The child finds this very package and knows its number of threads."""
    package_root = str(Path(__file__).resolve().parents[3])
    inherited = child_environment()
    paths = [path for path in (inherited.get("PYTHONPATH"), package_root) if path]
    extra = {"PYTHONPATH": os.pathsep.join(paths)}
    if envs.OMP_NUM_THREADS.get() <= 0:
        extra["OMP_NUM_THREADS"] = str(max(num_threads, 1))
    return child_environment(**extra)
