"""Pauses the scheduler, and decides what happens to requests meanwhile."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.managers.messages.io_struct import AbortReq, PauseRsp

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.messages.io_struct import PauseReq
    from sglang.srt.managers.scheduler.batch_selector import BatchSelector
    from sglang.srt.managers.scheduler.request_intake import RequestIntake

logger = logging.getLogger(__name__)

ABORTED = "generation was paused"


class GenerationPause:
    """Pauses and continues between two steps; requests that arrive meanwhile wait.

    Args:
        resolve: processes all results in flight.
        send: sends the answers.

    Attributes:
        is_on: whether launching is paused.
    """

    def __init__(
        self,
        *,
        batches: BatchSelector,
        intake: RequestIntake,
        resolve: Callable[[], None],
        send: Callable[[PauseRsp], None],
    ) -> None:
        self._batches = batches
        self._intake = intake
        self._resolve = resolve
        self._send = send
        self.is_on = False

    def handle(self, message: PauseReq) -> None:
        """Pause or continue as `message` asks."""
        if message.is_pause:
            self._stop(message.mode)
        self.is_on = message.is_pause
        logger.info(
            "Generation is paused (%s)" if self.is_on else "Generation continues",
            *([message.mode] if self.is_on else []),
        )
        self._send(PauseRsp(call_id=message.call_id))

    def _stop(self, mode: str) -> None:
        self._resolve()
        if mode == "abort":
            self._intake.abort(AbortReq(abort_all=True, message=ABORTED))
        if mode != "in_place":
            self._batches.retract_all()
