"""A pytest plugin that runs tests in forked processes:
`pytest -p sglang.test.forked_workers --forks 4`.

The tests are collected once, by the process that forks: its workers inherit imported
modules and collected tests, where each of xdist's workers imports and collects all of
them for itself. A worker takes one unit of work after the other: the tests of a file,
which share its fixtures, or a slice of them (`--fork-slices`).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import struct
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import pytest
from _pytest.config import create_terminal_writer

from sglang.test.roomy_stack import on_roomy_stack

UNIT = struct.Struct("=i")

Message = tuple[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("forked workers")
    group.addoption("--forks", type=int, default=0, help="number of forked workers")
    group.addoption(
        "--fork-slices",
        action="append",
        default=[],
        metavar="FILE=COUNT",
        help="hand out the tests of FILE in COUNT pieces instead of one",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config: Any = session.config  # with pytest's own attributes
    if config.option.forks < 2 or config.option.collectonly or session.testsfailed:
        return None  # pytest's own loop, which also reports collection errors
    slices = dict(entry.rsplit("=", 1) for entry in config.option.fork_slices)
    units = [
        unit
        for path, items in groupby(session.items, key=lambda item: str(item.path))
        for unit in _cut(list(items), int(slices.get(path, 1)))
    ]
    # Created here, because the workers share it.
    config._tmp_path_factory.getbasetemp()
    # Existing modules and tests stay; no worker walks or copies them.
    gc.collect()
    gc.freeze()
    # Frozen objects count no more: else a worker's engines, whose objects form cycles,
    # would be garbage until there are a quarter as many other objects.
    gc.collect()
    with _Workers(session, units) as workers:
        workers.run(min(config.option.forks, len(units)))
    return True


def _cut(items: list[pytest.Item], pieces: int) -> Iterator[list[pytest.Item]]:
    size = -(-len(items) // pieces)
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    """Attributes:
    pending: the items that it took and has not ended; it runs the first.
    """

    process: BaseProcess
    messages: Connection
    pending: list[pytest.Item] = field(default_factory=list)


class _Workers:
    """The processes that share `units`, seen by the process that forks them."""

    def __init__(
        self, session: pytest.Session, units: Sequence[list[pytest.Item]]
    ) -> None:
        self._session = session
        self._units = units
        self._workers: list[_Worker] = []
        # Every worker reads the number of its next unit from the same pipe.
        self._numbers, numbers = os.pipe()
        os.write(numbers, b"".join(map(UNIT.pack, range(len(units)))))
        os.close(numbers)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.process.terminate()
            worker.process.join()
        os.close(self._numbers)

    def run(self, count: int) -> None:
        for _ in range(count):
            self._fork([])
        while self._workers:
            ready = wait([worker.messages for worker in self._workers])
            for worker in [w for w in self._workers if w.messages in ready]:
                kind, content = _receive(worker.messages)
                getattr(self, f"_on_{kind}")(worker, content)
                self._stop_where_asked()

    def _fork(self, first: list[pytest.Item]) -> None:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=on_roomy_stack,
            args=(_work, self._session, self._units, first, self._numbers, sender),
        )
        process.start()
        sender.close()
        worker = _Worker(process=process, messages=receiver, pending=list(first))
        self._workers.append(worker)

    def _on_unit(self, worker: _Worker, number: int) -> None:
        worker.pending += self._units[number]

    def _on_report(self, worker: _Worker, data: dict[str, Any]) -> None:
        hook = self._session.config.hook
        report = hook.pytest_report_from_serializable(
            config=self._session.config, data=data
        )
        hook.pytest_runtest_logreport(report=report)

    def _on_finish(self, worker: _Worker, _: None) -> None:
        self._tell_finish(worker.pending.pop(0))

    def _on_warning(self, worker: _Worker, content: dict[str, Any]) -> None:
        message = warnings.WarningMessage(*content.pop("warning"))
        self._session.config.hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": message, **content}
        )

    def _on_end(self, worker: _Worker, _: None) -> None:
        """Handle a worker that has no more work, or was killed by a test and is
        replaced.
        """
        worker.process.join()
        self._workers.remove(worker)
        if not worker.pending:
            assert worker.process.exitcode == 0, worker.process
            return
        item, *others = worker.pending
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"its process ended with exit code {worker.process.exitcode}",
            when="call",
        )
        self._session.config.hook.pytest_runtest_logreport(report=report)
        self._tell_finish(item)
        self._fork(others)

    def _tell_finish(self, item: pytest.Item) -> None:
        self._session.config.hook.pytest_runtest_logfinish(
            nodeid=item.nodeid, location=item.location
        )

    def _stop_where_asked(self) -> None:
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)


def _receive(messages: Connection) -> Message:
    try:
        message: Message = messages.recv()
    except EOFError:
        return "end", None
    return message


class _Quiet:
    """Replaces a worker's terminal, whose width other plugins query."""

    def __init__(self, config: pytest.Config) -> None:
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        self._tw = create_terminal_writer(config, nowhere)


class _Sender:
    """A worker's plugin, which passes on its tests' reports."""

    def __init__(self, config: pytest.Config, messages: Connection) -> None:
        self._config = config
        self._messages = messages
        # A new plugin receives all earlier warnings.
        self._is_new = True
        config.pluginmanager.register(self)
        self._is_new = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(
            config=self._config, report=report
        )
        self._messages.send(("report", data))

    def pytest_runtest_logfinish(self) -> None:
        self._messages.send(("finish", None))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: Literal["config", "collect", "runtest"],
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        if self._is_new:
            return
        warning = (
            str(warning_message.message),
            warning_message.category,
            warning_message.filename,
            warning_message.lineno,
        )
        content = {"warning": warning, "when": when, "nodeid": nodeid}
        self._messages.send(("warning", content | {"location": location}))


def _work(
    session: pytest.Session,
    units: Sequence[list[pytest.Item]],
    first: list[pytest.Item],
    numbers: int,
    messages: Connection,
) -> None:
    """Run `first` and then unit after unit until none is left."""
    config = session.config
    _become_silent(config)
    _Sender(config, messages)
    items = list(first)
    while items or (items := _next_unit(units, numbers, messages)):
        item = items.pop(0)
        # The next test decides which fixtures stay alive, so it has to be known.
        items = items or _next_unit(units, numbers, messages)
        config.hook.pytest_runtest_protocol(
            item=item, nextitem=items[0] if items else None
        )
    # multiprocessing's processes exit without it.
    atexit._run_exitfuncs()


def _next_unit(
    units: Sequence[list[pytest.Item]], numbers: int, messages: Connection
) -> list[pytest.Item]:
    taken = os.read(numbers, UNIT.size)
    if not taken:
        return []
    _release_memory()
    (number,) = UNIT.unpack(taken)
    messages.send(("unit", number))
    return list(units[number])


def _release_memory() -> None:
    """Return memory freed by the last unit: engines, whose objects form cycles, and the
    holes left by their tensors, which the allocator keeps (7 GiB after one file).
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _become_silent(config: pytest.Config) -> None:
    """Stop writing to and capturing the parent's output."""
    manager = config.pluginmanager
    manager.unregister(name="terminalreporter")
    manager.register(_Quiet(config), "terminalreporter")
    capture = manager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
