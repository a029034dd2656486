"""Builds a benchmark's scheduler like a server's process does."""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from sglang.srt.distributed.parallel_state import init_tensor_parallel
from sglang.srt.managers.scheduler.build import build_scheduler, settle
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import ListIO, NullIO, SchedulerIO
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.kernel_loads import KernelLoads

Result = TypeVar("Result")

JOIN_S = 60

_watching: list[KernelLoads] = []


def build_served(server_args: ServerArgs, io: SchedulerIO) -> Scheduler:
    """Build a scheduler and tune this process for serving.

    Earlier schedulers of this process no longer warn about late kernels, because those
    of this one's start would count as theirs.
    """
    while _watching:
        _watching.pop().stop()
    scheduler = build_scheduler(server_args, io)
    settle(server_args)
    if server_args.device != "cpu":
        _watching.append(scheduler.worker.model_runner.late_kernels)
    return scheduler


def in_scheduler(
    measure: Callable[[Scheduler, ListIO], Result], **flags: Any
) -> Result:
    """Run `measure` with a scheduler in this process; free its memory afterwards."""
    io = ListIO()
    try:
        return measure(build_served(ServerArgs(**flags), io), io)
    finally:
        free_memory()


@contextmanager
def first_of_ranks(server_args: ServerArgs) -> Iterator[None]:
    """Scope in which this process is rank 0 of `--tp-size`, and other processes do what
    it does. The scheduler built in it must end with a `ShutdownReq`."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        others = [
            multiprocessing.get_context("spawn").Process(
                target=_follow, args=(server_args, rank, store)
            )
            for rank in range(1, server_args.tp_size)
        ]
        for process in others:
            process.start()
        _join_ranks(server_args, 0, store)
        yield
        for process in others:
            process.join(JOIN_S)
            process.kill()


def _follow(server_args: ServerArgs, rank: int, store: Path) -> None:
    _join_ranks(server_args, rank, store)
    build_served(server_args, NullIO()).run_event_loop()


def _join_ranks(server_args: ServerArgs, rank: int, store: Path) -> None:
    init_tensor_parallel(
        rank=rank,
        size=server_args.tp_size,
        device=server_args.device,
        store=store,
        shares_memory=not server_args.disable_custom_all_reduce,
    )


def free_memory() -> None:
    """Free the memory of an unreferenced scheduler, whose objects form cycles."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
