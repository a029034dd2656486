"""Profiles a scheduler process with torch's profiler, on request."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang.srt.managers.messages.io_struct import ProfileRsp
from sglang.srt.utils.forks import BackgroundFork

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import ProfileReq

logger = logging.getLogger(__name__)

MAX_SECONDS = 30.0
"""Maximum duration of a profile, however few forwards it has seen."""
CLOSE_SECONDS = 5.0
"""How long a shutdown waits for a trace that is being written."""
_COMPRESSION = 6


@dataclass(slots=True, kw_only=True)
class _Recording:
    """A running profile."""

    profile: torch.autograd.profiler.profile
    deadline: float
    steps_left: int


@dataclass(slots=True, kw_only=True)
class _Writing:
    """A trace being written by a fork; call `call_id` waits for its end."""

    fork: BackgroundFork
    call_id: int | None = None


class Profiler:
    """Runs at most one profile at a time; costs nothing while none runs.

    Starts torch's profiler without `torch.profiler`, which would import torch's
    compiler and keep the scheduler silent for seconds.

    Args:
        rank: tensor parallel rank; every rank writes its own trace.
        device: where the model runs.
        send: sends the answers.
        clock: returns seconds.
    """

    def __init__(
        self,
        *,
        rank: int,
        device: torch.device,
        send: Callable[[ProfileRsp], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._device = device
        self._send = send
        self._clock = clock
        self._path = Path()
        self._recording: _Recording | None = None
        self._writing: _Writing | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a profile runs or is being written."""
        return self._recording is not None or self._writing is not None

    def handle(self, message: ProfileReq) -> None:
        """Start or stop a profile as `message` asks. A start is answered immediately, a
        stop when the trace is written.
        """
        try:
            if message.is_start:
                self._start(message)
                self._answer(message.call_id)
            else:
                self._stop(message.call_id)
        except (OSError, RuntimeError, ValueError) as error:
            self._answer(message.call_id, error=str(error))

    def count_forward(self) -> None:
        """Count a forward whose result has arrived; the last one ends the profile."""
        if self._recording is not None:
            self._recording.steps_left -= 1
            if self._recording.steps_left <= 0:
                self._end()

    def poll(self) -> None:
        """End a profile whose time is over, and answer callers waiting for a trace."""
        recording = self._recording
        if recording is not None and self._clock() > recording.deadline:
            self._end()
        if self._writing is not None and self._writing.fork.poll() is not None:
            self._finish_writing()

    def close(self) -> None:
        """End a running profile and wait a while for its trace."""
        if self._recording is not None:
            self._end()
        if self._writing is not None:
            self._writing.fork.wait(CLOSE_SECONDS)
            self._finish_writing()

    def _start(self, message: ProfileReq) -> None:
        if self._recording is not None:
            raise ValueError(
                f"a profile runs already, for {self._recording.steps_left} more "
                "forward(s); end it with /stop_profile"
            )
        if self._writing is not None:
            raise ValueError(f"{self._path} is being written; try again later")
        has_cpu, has_gpu = "CPU" in message.activities, self._device.type == "cuda"
        if not has_gpu and not has_cpu:
            raise ValueError(
                f"activities is {message.activities}, but the model runs on "
                f"{self._device.type}: add CPU"
            )
        self._path = Path(
            message.folder, f"{message.name}-TP-{self._rank}.trace.json.gz"
        )
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Create the file first, to find out whether it can be written; nothing is
        # overwritten.
        os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, 0o600))
        profile = torch.autograd.profiler.profile(
            use_cpu=has_cpu,
            use_device="cuda" if has_gpu and "GPU" in message.activities else None,
            with_stack=message.with_stack,
            record_shapes=message.record_shapes,
            use_kineto=True,
        )
        profile.__enter__()
        self._recording = _Recording(
            profile=profile,
            deadline=self._clock() + MAX_SECONDS,
            steps_left=message.num_steps,
        )
        logger.info(
            "Profiling %d forward(s), for %g s at most, to %s",
            message.num_steps,
            MAX_SECONDS,
            self._path,
        )

    def _stop(self, call_id: int) -> None:
        if self._recording is not None:
            self._begin_writing()
        elif self._writing is None:
            raise ValueError("no profile runs; begin one with /start_profile")
        assert self._writing is not None
        if self._writing.call_id is not None:
            raise ValueError(f"{self._path} is being written; its end is awaited")
        self._writing.call_id = call_id

    def _end(self) -> None:
        try:
            self._begin_writing()
        except (OSError, RuntimeError) as error:
            logger.error("The profile was lost: %s", error)

    def _begin_writing(self) -> None:
        """End the profile and let a fork write it: the scheduler goes on."""
        assert self._recording is not None
        profile, self._recording = self._recording.profile, None
        profile.__exit__(None, None, None)
        path = self._path
        self._writing = _Writing(fork=BackgroundFork(lambda: _write(profile, path)))

    def _finish_writing(self) -> None:
        assert self._writing is not None
        writing, self._writing = self._writing, None
        if writing.fork.poll():
            error = None
            logger.info("Wrote the profile %s", self._path)
        else:
            error = f"{self._path} could not be written; the log says why"
            logger.error("The profile was lost: %s", error)
        if writing.call_id is not None:
            self._answer(writing.call_id, error=error)

    def _answer(self, call_id: int, *, error: str | None = None) -> None:
        path = str(self._path) if error is None else ""
        self._send(ProfileRsp(call_id=call_id, path=path, error=error))


def _write(profile: torch.autograd.profiler.profile, path: Path) -> None:
    """Write a trace to the existing file `path`, readable by its owner only."""
    os.umask(0o077)
    plain = path.with_suffix("")
    try:
        profile.export_chrome_trace(str(plain))
        with (
            plain.open("rb") as source,
            gzip.open(path, "wb", compresslevel=_COMPRESSION) as packed,
        ):
            shutil.copyfileobj(source, packed)
    finally:
        plain.unlink(missing_ok=True)
