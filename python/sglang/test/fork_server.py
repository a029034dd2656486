"""A process that has imported the product and forks servers and schedulers for tests.

`forked_process` starts and uses it. A server and its scheduler take over two seconds of
CPU time to import, and a test uses a tenth of that. A child of this process has
everything imported; it runs the same main modules, with the descriptors, variables and
arguments that a new process would have.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any
from unittest import mock

from sglang.srt.environ import EnvVar
from sglang.srt.managers.front import scheduler_process
from sglang.test.fork_protocol import (
    READ_BY_IMPORTS,
    ChildrenOf,
    Request,
    receive,
    send,
)
from sglang.test.forked_process import ForkServerClient
from sglang.test.lazy_memory import take_memory_when_written

MODULES = ("sglang.launch_server", "sglang.srt.managers.scheduler.scheduler_main")
"""Main modules with preloaded imports; others import what they need in addition."""

# Far from the numbers that children are promised.
HIGH_FD = 500


class ForkServer:
    """Forks a child per connection and reports its id and later its exit code."""

    def __init__(self, listener: socket.socket, lifeline: int) -> None:
        self._listener = listener
        self._lifeline = lifeline
        self._children: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, wakeup = socket.socketpair()
        self._own = [listener, self._wakeup, wakeup]
        for end in self._own:
            end.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(lifeline, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Ctrl-C in a terminal reaches all processes; the owner ends this one.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def next_child(self) -> Request | None:
        """Serve until the owner is gone (None), or return in a child what it runs."""
        while True:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(4096)
                self._reap()
            if self._listener in ready:
                connection, _ = self._listener.accept()
                connection.setblocking(True)
                request = self._fork(connection)
                if request is not None:
                    return request
            if self._lifeline in ready:
                return None

    def _fork(self, connection: socket.socket) -> Request | None:
        """Fork; returns the request in the child only."""
        try:
            request, fds = receive(connection, Request | ChildrenOf)
        except EOFError:
            connection.close()
            return None
        if isinstance(request, ChildrenOf):
            with connection:
                send(connection, self._children_of(request.pid))
            return None
        pid = os.fork()
        if pid == 0:
            connection.close()
            self._leave()
            _become(request, fds)
            return request  # type: ignore[no-any-return]
        for fd in fds:
            os.close(fd)
        self._children[pid] = connection
        send(connection, pid)
        return None

    def _children_of(self, parent: int) -> list[int]:
        return [
            pid
            for pid, connection in self._children.items()
            if _process_behind(connection) == parent
        ]

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._children.pop(pid)
            with contextlib.suppress(OSError), connection:
                send(connection, os.waitstatus_to_exitcode(status))

    def _leave(self) -> None:
        """In a child: keep nothing of the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        os.close(self._lifeline)
        for end in [*self._own, *self._children.values()]:
            end.close()


def _process_behind(connection: socket.socket) -> int:
    size = struct.calcsize("=iii")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, _, _ = struct.unpack("=iii", credentials)
    return int(pid)


def _become(request: Request, fds: Sequence[int]) -> None:
    """Become the requested process, except for its modules."""
    if request.is_session_leader:
        os.setsid()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, target in zip(high, request.targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)


def _import_the_product() -> None:
    """Raises:
    AssertionError: an import read a variable that is not known to be read.
    """
    read: set[str] = set()
    get = EnvVar.get

    def noting_get(self: EnvVar[Any]) -> Any:
        read.add(self.name)
        return get(self)

    with mock.patch.object(EnvVar, "get", noting_get):
        for module in MODULES:
            importlib.import_module(module)
    assert read <= READ_BY_IMPORTS, read


def main(listener: socket.socket, lifeline: int) -> None:
    _import_the_product()
    take_memory_when_written()
    # Run as `__main__` they are executed again, and import modules that are already
    # here.
    for module in MODULES:
        del sys.modules[module]
    gc.collect()
    gc.freeze()
    address, environment = listener.getsockname(), dict(os.environ)
    request = ForkServer(listener, lifeline).next_child()
    if request is None:
        return
    # The scheduler of a server is also forked.
    scheduler_process.start_child = ForkServerClient(address, environment).start
    code = _exit_code(request.command)
    threads: Any = threading
    threads._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # To take down modules would copy the memory that is shared with the server.
    os._exit(code)


def _exit_code(command: Sequence[str]) -> int:
    """Run `command` as Python's main program."""
    try:
        if command[0] == "-m":
            # The module's name becomes its path.
            sys.argv = list(command[1:])
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        elif command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = list(command)
            sys.path.insert(0, os.path.dirname(command[0]))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
