"""The scheduler of a benchmark, as a server's process has it."""

from __future__ import annotations

import gc

import torch

from sglang.srt.managers.scheduler.build import build_scheduler, settle
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import SchedulerIO
from sglang.srt.server_args import ServerArgs


def build_served(server_args: ServerArgs, io: SchedulerIO) -> Scheduler:
    """Build it, and make this process one that serves."""
    scheduler = build_scheduler(server_args, io)
    settle(server_args)
    return scheduler


def free_memory() -> None:
    """Free what a scheduler that nobody holds any more had; its objects form cycles."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
