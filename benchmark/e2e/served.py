"""The scheduler of a benchmark, as a server's process has it."""

from __future__ import annotations

import gc

import torch

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.build import build_scheduler
from sglang.srt.managers.scheduler_components.scheduler_io import SchedulerIO
from sglang.srt.server_args import ServerArgs


def build_served(server_args: ServerArgs, io: SchedulerIO) -> Scheduler:
    """Build it, and keep collections from what is loaded, as `run_scheduler_process`
    does: a full one that walks all of it takes 0.12 s of whatever is measured."""
    scheduler = build_scheduler(server_args, io)
    gc.collect()
    gc.freeze()
    return scheduler


def free_memory() -> None:
    """Free what a scheduler that nobody holds any more had; its objects form cycles."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
