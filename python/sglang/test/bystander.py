"""An honest client beside an attack, and what the attack leaves in the server.

Nothing here depends on a clock: a bystander waits too long if it gets no answers
however long the attack lasts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang.test.server_process import ServerProcess, find_children

# Ends a test that hangs. A slow machine needs far less.
PATIENCE_SECONDS = 120.0

Question = Callable[[], Any]


class Bystander:
    """Asks the same questions again and again; each answer must stay what it was.

    Use it as a context manager around the attack. The first answers are taken on entry,
    while the server is quiet; leaving checks all answers that came since.

    Args:
        questions: questions by name. Each returns a value that must not change, and
            raises if rejected.
        pause: seconds between two rounds.

    Attributes:
        rounds: how often all questions have been answered.
        inside: how often within one attack.
        wrong: answers that differ and errors, each with the name of its question.
    """

    def __init__(
        self, questions: Mapping[str, Question], *, pause: float = 0.02
    ) -> None:
        self._questions = dict(questions)
        self._pause = pause
        self._expected: dict[str, Any] = {}
        self._stop = threading.Event()
        self._turn = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        # Odd while an attack runs.
        self._phase = 0
        self.rounds = 0
        self.inside = 0
        self.wrong: list[str] = []

    def __enter__(self) -> Bystander:
        self._expected = {name: ask() for name, ask in self._questions.items()}
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)
        if error is None:
            assert not self._thread.is_alive(), "the bystander got no answer"
            assert not self.wrong, self.wrong[:3]

    def endure(
        self, attack: Callable[[], None], *, rounds: int = 3, is_long: bool = False
    ) -> int:
        """Repeat `attack` until `rounds` rounds were asked and answered meanwhile.

        Args:
            is_long: count only rounds that begin and end within one attack. For attacks
                behind which a bystander without its turn waits until they are over.

        Returns:
            How many attacks that took.
        """

        def missing() -> int:
            return target - (self.inside if is_long else self.rounds)

        # Of all rounds the one in flight began before the attack.
        target = rounds + (self.inside if is_long else self.rounds + 1)
        attacks, deadline = 0, time.monotonic() + PATIENCE_SECONDS
        while missing() > 0 and not self.wrong:
            assert time.monotonic() < deadline, (
                f"after {attacks} attacks the bystander lacks {missing()} rounds"
            )
            self._phase += 1
            attack()
            self._phase += 1
            attacks += 1
        return attacks

    def wait(self, rounds: int = 1) -> None:
        """Wait until `rounds` rounds were asked and answered after this call."""
        target = self.rounds + rounds + 1
        with self._turn:
            is_there = self._turn.wait_for(
                lambda: self.rounds >= target or self.wrong, PATIENCE_SECONDS
            )
        assert is_there, "the bystander got no answer"

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            phase = self._phase
            for name, ask in self._questions.items():
                try:
                    answer = ask()
                except Exception as error:
                    self.wrong.append(f"{name}: {error!r}")
                    continue
                if answer != self._expected[name]:
                    self.wrong.append(f"{name}: {answer!r}")
            with self._turn:
                self.rounds += 1
                self.inside += phase % 2 and phase == self._phase
                self._turn.notify_all()


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What the processes of a server hold: the front, its children and the scheduler's.

    Attributes:
        own: memory in MiB of the front, of the scheduler, and of the processes for side
            work together, without pages of files: the kernel drops and reads these as
            it likes.
        resident: memory of front and scheduler with these pages.
        peak: the most of `resident` since the measurement before this one.
    """

    processes: int
    threads: int
    descriptors: int
    own: Mapping[str, float]
    resident: Mapping[str, float]
    peak: Mapping[str, float]

    @classmethod
    def measure(cls, server: ServerProcess) -> Resources:
        """Measure a server, and begin a new peak."""
        scheduler = server.scheduler_pid()
        leading = {"front": server.process.pid, "scheduler": scheduler}
        children = server.children()
        family = [server.process.pid, *children, *find_children(scheduler)]
        side = sum(memory_mib(pid, "RssAnon") for pid in set(children) - {scheduler})
        found = cls(
            processes=len(family),
            threads=sum(_entries(pid, "task") for pid in family),
            descriptors=sum(_entries(pid, "fd") for pid in family),
            own={name: memory_mib(pid, "RssAnon") for name, pid in leading.items()}
            | {"side work": side},
            resident={name: memory_mib(pid, "VmRSS") for name, pid in leading.items()},
            peak={name: memory_mib(pid, "VmHWM") for name, pid in leading.items()},
        )
        for pid in leading.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        return found

    def excess(self, before: Resources, *, mib: float) -> list[str]:
        """Name what is more than `before`; memory may grow by `mib`."""
        found = [
            f"{name}: {getattr(before, name)} -> {getattr(self, name)}"
            for name in ("processes", "threads", "descriptors")
            if getattr(self, name) > getattr(before, name)
        ]
        return found + _growth(before.own, self.own, mib)

    def rise(self, before: Resources, *, mib: float) -> list[str]:
        """Name the processes that meanwhile held more than `mib` MiB above `before`."""
        return _growth(before.resident, self.peak, mib)


def check_nothing_left(server: ServerProcess, before: Resources, *, mib: float) -> None:
    """Wait until `server` holds no more than `before`, except `mib` MiB per process."""
    deadline = time.monotonic() + PATIENCE_SECONDS / 4
    while excess := Resources.measure(server).excess(before, mib=mib):
        assert time.monotonic() < deadline, excess
        time.sleep(0.05)


def memory_mib(pid: int, field: str) -> float:
    """Return a field of /proc/PID/status in MiB; 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) / 1024
    return 0.0


def _growth(
    before: Mapping[str, float], now: Mapping[str, float], mib: float
) -> list[str]:
    return [
        f"MiB of {name}: {before[name]:.0f} -> {held:.0f}"
        for name, held in now.items()
        if held - before[name] > mib
    ]


def _entries(pid: int, folder: str) -> int:
    """Count the entries of a folder in /proc; 0 if the process has ended."""
    try:
        return len(os.listdir(Path("/proc", str(pid), folder)))
    except (FileNotFoundError, ProcessLookupError):
        return 0
