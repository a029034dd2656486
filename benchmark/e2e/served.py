"""Builds a benchmark's scheduler like a server's process does."""

from __future__ import annotations

import gc

import torch

from sglang.srt.managers.scheduler.build import build_scheduler, settle
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import SchedulerIO
from sglang.srt.server_args import ServerArgs


def build_served(server_args: ServerArgs, io: SchedulerIO) -> Scheduler:
    """Build a scheduler and tune this process for serving."""
    scheduler = build_scheduler(server_args, io)
    settle(server_args)
    return scheduler


def free_memory() -> None:
    """Free the memory of an unreferenced scheduler, whose objects form cycles."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
