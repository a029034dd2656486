"""Attaches the recorder that a scheduler's flags ask for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.replay.recording.recorder import MAX_GENERATIONS, Recorder

if TYPE_CHECKING:
    from sglang.srt.replay.recording.source import RecordedScheduler

logger = logging.getLogger(__name__)


def create_recorder(scheduler: RecordedScheduler) -> Recorder | None:
    """Create the recorder that writes records next to this scheduler's incidents, or
    return None if not enabled.
    """
    args, managers = scheduler.server_args, scheduler.worker.canary_managers()
    num_forwards = args.kv_canary_record
    if not managers or not num_forwards:
        return None
    recorder = Recorder(
        scheduler,
        num_forwards=num_forwards,
        has_tokens=args.kv_canary_report_tokens,
        rank=managers[0].reporter.rank,
    )
    managers[0].reporter.record = recorder.record_for
    for group in [runs.slots for runs in scheduler.cache.groups]:
        if group.unsaved:
            logger.warning(
                "--kv-canary-record %d: %s, so that a record is replayed from the "
                "engine's start; incidents after forward %d cannot be",
                num_forwards,
                group.unsaved,
                num_forwards * MAX_GENERATIONS,
            )
    return recorder
