"""Starts the scheduler's processes, one per tensor parallel rank, waits until they can
serve, notices when one exits, and stops them.

Uses plain child processes instead of `multiprocessing`: the caller's script is not
imported again, so `Engine()` needs no `if __name__ == "__main__"` guard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sglang.srt.environ import child_environment, envs
from sglang.srt.managers.messages.io_struct import SchedulerReady
from sglang.srt.managers.messages.scheduler_addresses import SchedulerAddresses

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

MAIN_MODULE = "sglang.srt.managers.scheduler.scheduler_main"
# A unix socket path holds 107 bytes; the names in the folder need about 20.
MAX_FOLDER_CHARS = 80
# If a peer rejects the configuration, a rank may die of it before the rejection is
# read.
GRACE_SECONDS = 2.0
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

start_child: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
"""Starts a rank. Tests start hundreds and fork them from a process with all imports
done.
"""


class SchedulerDied(RuntimeError):
    """The scheduler's process exited without being asked to."""

    def __init__(self, exit_code: int) -> None:
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        super().__init__(f"the scheduler process died ({how})")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """One process; `ready` is the read end of the pipe on which it reports."""

    process: subprocess.Popen[bytes]
    ready: Connection


class SchedulerProcess:
    """One running scheduler: one process per rank, all of which live and die together.

    Attributes:
        addresses: where rank 0 listens and answers; the sockets are in a private
            folder.
        pids: process ids by rank.
    """

    def __init__(
        self, ranks: Sequence[_Rank], *, addresses: SchedulerAddresses
    ) -> None:
        self.addresses = addresses
        self.pids = [rank.process.pid for rank in ranks]
        self._ranks = ranks
        self._lock = threading.Lock()
        self._first_exit: int | None = None
        self._num_left = len(ranks)
        self._one_exited = threading.Event()
        self._all_exited = threading.Event()
        self._is_killed = False
        self._on_exit: Callable[[int], None] | None = None
        for rank in range(len(ranks)):
            threading.Thread(
                target=self._watch, args=(rank,), name=f"rank-{rank}-exit", daemon=True
            ).start()

    @property
    def pid(self) -> int:
        """Process id of rank 0."""
        return self.pids[0]

    @classmethod
    def start(
        cls,
        server_args: ServerArgs,
        *,
        num_threads: int,
        command: Sequence[str] = (sys.executable, "-m", MAIN_MODULE),
    ) -> SchedulerProcess:
        """Start the processes without waiting for them.

        Args:
            num_threads: total OpenMP threads of all children, unless OMP_NUM_THREADS is
                set.
            command: program and arguments; the report descriptor is appended.
        """
        folder = _make_private_folder()
        addresses = SchedulerAddresses(
            request_endpoint=f"ipc://{folder}/requests",
            response_endpoint=f"ipc://{folder}/responses",
        )
        environment = _environment(
            num_threads // server_args.tp_size,
            computes_here=server_args.device == "cpu",
        )
        ranks: list[_Rank] = []
        for rank in range(server_args.tp_size):
            config = {
                "server_args": dataclasses.asdict(server_args),
                "addresses": dataclasses.asdict(addresses),
                "rank": rank,
                "began": time.monotonic(),
            }
            ranks.append(_start_rank(command, config, environment))
        return cls(ranks, addresses=addresses)

    def wait_ready(self) -> SchedulerReady:
        """Block until all ranks can serve; returns rank 0's message.

        Raises:
            ValueError: a rank rejected the configuration, with the rank's message.
            SchedulerDied: a rank exited before it was ready.
        """
        pipes = [rank.ready for rank in self._ranks]
        try:
            return self._wait_ready(pipes)
        finally:
            for pipe in pipes:
                pipe.close()

    def _wait_ready(self, pipes: list[Connection]) -> SchedulerReady:
        messages: dict[int, SchedulerReady] = {}
        waiting = dict(enumerate(pipes))
        deadline: float | None = None
        while waiting:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            came = wait(waiting.values(), left)
            if not came:
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in came]:
                try:
                    data = waiting.pop(rank).recv_bytes()
                except EOFError:
                    deadline = deadline or time.monotonic() + GRACE_SECONDS
                    continue
                message = msgspec.msgpack.decode(data, type=SchedulerReady)
                if message.error is not None:
                    raise ValueError(message.error)
                messages[rank] = message
        if deadline is not None:
            self._one_exited.wait()
            assert self._first_exit is not None
            raise SchedulerDied(self._first_exit)
        return messages[0]

    def notify_exit(self, callback: Callable[[int], None]) -> None:
        """Call `callback(exit code)` once, from any thread, when a process exits."""
        with self._lock:
            self._on_exit = callback
            first_exit = self._first_exit
        if first_exit is not None:
            callback(first_exit)

    def kill(self) -> None:
        """End all processes at once."""
        self._is_killed = True
        for rank in self._ranks:
            # Does nothing if the process was already waited for.
            rank.process.kill()

    def stop(self, timeout: float) -> bool:
        """Wait for the exit, kill after `timeout` seconds, and remove the sockets.

        Returns True if all processes exited by themselves.
        """
        left = self._all_exited.wait(timeout)
        if not left:
            self.kill()
            self._all_exited.wait()
        for rank in self._ranks:
            if rank.process.stdin is not None:
                rank.process.stdin.close()
        shutil.rmtree(self.addresses.folder, ignore_errors=True)
        return left

    def forget(self) -> None:
        """Leave the processes to this forked process's parent.

        Closes the copies of their stdin, which would keep them running after the parent
        dies.
        """
        for rank in self._ranks:
            if rank.process.stdin is not None:
                rank.process.stdin.close()

    def _watch(self, rank: int) -> None:
        exit_code = self._ranks[rank].process.wait()
        with self._lock:
            callback = None
            if self._first_exit is None:
                self._first_exit = exit_code
                callback = self._on_exit
                self._one_exited.set()
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last:
            self._all_exited.set()
        elif exit_code != 0 and not self._is_killed:
            # The other ranks would wait for it in their next collective.
            logger.error("Rank %d: %s", rank, SchedulerDied(exit_code))
            self.kill()
        if callback is not None:
            callback(exit_code)


def _start_rank(
    command: Sequence[str], config: dict[str, object], environment: dict[str, str]
) -> _Rank:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = start_child(
        [*command, str(sender.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=(sender.fileno(),),
        env=environment,
        # Ctrl-C in a terminal reaches only the front, which then drains.
        start_new_session=True,
    )
    sender.close()
    assert process.stdin is not None
    # stdin stays open: when it closes, the child knows that this process is gone.
    # `wait_ready` reports a child that has already exited.
    with contextlib.suppress(BrokenPipeError):
        os.write(process.stdin.fileno(), msgspec.json.encode(config) + b"\n")
    return _Rank(process=process, ready=receiver)


def available_cores() -> int:
    """Number of cores this process may run on."""
    return len(os.sched_getaffinity(0))


def _make_private_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="sglang-")  # mode 0700
    if len(folder) > MAX_FOLDER_CHARS:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="sglang-", dir="/tmp")
    return Path(folder)


def _environment(num_threads: int, *, computes_here: bool) -> dict[str, str]:
    """Environment of a child: this package, its threads, and the loopback interface for
    the ranks on this host.

    Args:
        computes_here: whether the model runs on the CPU.
    """
    package_root = str(Path(__file__).resolve().parents[3])
    inherited = child_environment()
    paths = [path for path in (inherited.get("PYTHONPATH"), package_root) if path]
    extra = {"PYTHONPATH": os.pathsep.join(paths)}
    if GLOO_INTERFACE not in inherited:
        extra[GLOO_INTERFACE] = "lo"
    if envs.OMP_NUM_THREADS.get() <= 0:
        extra["OMP_NUM_THREADS"] = str(max(num_threads, 1))
    if computes_here and not envs.GOMP_SPINCOUNT.is_set():
        extra["OMP_WAIT_POLICY"] = envs.OMP_WAIT_POLICY.get()
    return child_environment(**extra)
