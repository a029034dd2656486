"""Profiles of a scheduler process by torch's profiler, on request."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang.srt.managers.io_struct import ProfileRsp

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import ProfileReq

logger = logging.getLogger(__name__)

_ACTIVITIES = {
    "CPU": torch.profiler.ProfilerActivity.CPU,
    "GPU": torch.profiler.ProfilerActivity.CUDA,
}


class Profiler:
    """At most one profile at a time; costs nothing while none runs.

    Writing a trace stops the scheduler for as long as it takes.

    Args:
        rank: of tensor parallelism; every rank writes a trace of its own.
        device: where the model runs.
    """

    def __init__(self, *, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._profile: torch.profiler.profile | None = None
        self._path = Path()
        self._steps_left = 0

    @property
    def is_running(self) -> bool:
        return self._profile is not None

    def answer(self, message: ProfileReq) -> ProfileRsp:
        """Begin or end a profile as `message` asks."""
        try:
            if message.is_start:
                self._start(message)
            else:
                self._stop()
        except (OSError, RuntimeError, ValueError) as error:
            return ProfileRsp(call_id=message.call_id, error=str(error))
        return ProfileRsp(call_id=message.call_id, path=str(self._path))

    def count_forward(self) -> None:
        """Count a forward whose result is there; ends the profile after the last."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self.close()

    def close(self) -> None:
        """End the profile, if one runs; an error is logged."""
        if self.is_running:
            try:
                self._stop()
            except (OSError, RuntimeError) as error:
                logger.error("The profile was lost: %s", error)

    def _start(self, message: ProfileReq) -> None:
        if self.is_running:
            raise ValueError(
                f"a profile runs already, for {self._steps_left} more forward(s); end "
                "it with /stop_profile"
            )
        if self._device.type != "cuda" and "CPU" not in message.activities:
            raise ValueError(
                f"activities is {message.activities}, but the model runs on "
                f"{self._device.type}: add CPU"
            )
        self._path = Path(
            message.folder, f"{message.name}-TP-{self._rank}.trace.json.gz"
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Whether it can be written is known before the work; nothing is overwritten.
        self._path.touch(exist_ok=False)
        activities = [
            _ACTIVITIES[name]
            for name in message.activities
            if name != "GPU" or self._device.type == "cuda"
        ]
        profile = torch.profiler.profile(
            activities=activities,
            with_stack=message.with_stack,
            record_shapes=message.record_shapes,
        )
        profile.start()
        self._profile = profile
        self._steps_left = message.num_steps
        logger.info("Profiling %d forward(s) to %s", message.num_steps, self._path)

    def _stop(self) -> None:
        if self._profile is None:
            raise ValueError("no profile runs; begin one with /start_profile")
        profile, self._profile = self._profile, None
        profile.stop()
        profile.export_chrome_trace(str(self._path))
        logger.info("Wrote the profile %s", self._path)
