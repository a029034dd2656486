"""Builds a scheduler from the server's arguments, and runs a scheduler process."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from kv_canary.reporter import CanaryViolation
from sglang.srt.arg_groups.rooms import opened_rooms
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import get_tp_group, init_tensor_parallel
from sglang.srt.managers.messages.io_struct import EngineFailed, SchedulerReady
from sglang.srt.managers.scheduler.kv_event_feed import open_event_publisher
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_io import NullIO, SchedulerIO, ZmqIO
from sglang.srt.managers.scheduler.warm_up import (
    compile_ahead,
    is_warmed_up,
    measured_costs,
    warm_up,
)
from sglang.srt.managers.worker.tp_worker import TpModelWorker
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.logging import configure_logging
from sglang.srt.utils.paths import resolve_model_path
from sglang.srt.utils.start_times import StartTimes

if TYPE_CHECKING:
    from sglang.srt.managers.messages.scheduler_addresses import SchedulerAddresses
    from sglang.srt.managers.worker.interface import Worker
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

FOLLOWER_LOG_LEVEL = "error"
FAILURE_EXIT_CODE = 1
# Longer than the parent needs to read a rejection and end the ranks.
REFUSAL_SECONDS = 5.0
# Longer than rank 0 needs to tell its clients why the engine stops.
FAILURE_SECONDS = 3.0
# Longer than a rank needs to report what its canary found.
REPORT_TIMEOUT = timedelta(seconds=10)


def build_scheduler(
    server_args: ServerArgs, io: SchedulerIO, times: StartTimes | None = None
) -> Scheduler:
    """Build a scheduler that is ready to run in this process.

    Args:
        times: is told when each part has ended.

    Raises:
        ValueError: the model, tokenizer, memory or environment does not fit the
            arguments.
    """
    assert server_args.model_path is not None
    times = times or StartTimes()
    # First, so that an endpoint in use is detected before weights are read.
    event_publisher = open_event_publisher(server_args, rank=get_tp_group().rank)
    model_config = ModelConfig.from_path(
        resolve_model_path(server_args.model_path),
        context_length=server_args.context_length,
        quantization=server_args.quantization,
    )
    tokenizer = None
    if not server_args.skip_tokenizer_init:
        assert server_args.tokenizer_path is not None
        tokenizer = load_tokenizer(server_args.tokenizer_path)
    times.end("tokenizer")
    create = (
        TpModelWorker.create
        if server_args.speculative_algorithm is None
        else EAGLEWorkerV2
    )
    with opened_rooms(server_args):
        worker: Worker = create(server_args=server_args, model_config=model_config)
        times.end("weights and pools")
        is_warm = is_warmed_up(server_args)
        if is_warm:
            compile_ahead(server_args, worker)
            times.end("kernels")
        worker.capture_graphs()
        times.end("graphs")
        if is_warm:
            warm_up(server_args, worker, tokenizer)
            times.end("warm-up")
        costs = measured_costs(server_args, worker, tokenizer)
        times.end("costs of shapes")
        worker.model_runner.watch_kernels()
        scheduler = Scheduler(
            server_args=server_args,
            worker=worker,
            tokenizer=tokenizer,
            io=io,
            event_publisher=event_publisher,
        )
        scheduler.shapes.learn(costs, device=server_args.device)
        return scheduler


def settle(server_args: ServerArgs) -> None:
    """Tune this process for serving after its engine is loaded.

    Loaded objects stay alive, and a garbage collection that visited them would delay a
    step. With a GPU the host copies a few megabytes at most: waiting for the slowest of
    several OpenMP threads takes longer than one thread needs for all the work.
    """
    gc.collect()
    gc.freeze()
    if server_args.device != "cpu":
        torch.set_num_threads(1)


def run_scheduler_process(
    server_args: ServerArgs,
    addresses: SchedulerAddresses,
    ready: Connection,
    *,
    rank: int,
    store: Path,
    times: StartTimes,
) -> int:
    """Serve until a `ShutdownReq`, after reporting once on `ready` whether it can.

    Returns the exit code of the process: 0, or `FAILURE_EXIT_CODE` if the engine failed
    while serving; the log says why.

    Args:
        rank: rank of this process among `server_args.tp_size`. Rank 0 talks to the
            front; the others follow it and log errors only.
        store: file through which the ranks meet.
        times: of the start, until all modules were imported.
    """
    configure_logging(server_args.log_level if rank == 0 else FOLLOWER_LOG_LEVEL)
    try:
        io = ZmqIO(addresses) if rank == 0 else NullIO()
        init_tensor_parallel(
            rank=rank,
            size=server_args.tp_size,
            device=server_args.device,
            store=store,
            shares_memory=not server_args.disable_custom_all_reduce,
        )
        times.end("device")
        scheduler = build_scheduler(server_args, io, times)
    except (ValueError, MemoryError) as error:
        _refuse(ready, error, has_peers=server_args.tp_size > 1)
        return 0
    settle(server_args)
    times.end("rest")
    logger.info("The scheduler started in %s", times)
    ready.send_bytes(msgspec.msgpack.encode(scheduler.ready_message()))
    try:
        scheduler.run_event_loop()
    except Exception as error:
        _log_failure(error, rank)
        io.send(_last_message(error, scheduler.own_incidents()))
        if rank > 0:
            # Rank 0 has most likely failed in the same way, and must report it before
            # it finds this process gone in the middle of a collective.
            time.sleep(FAILURE_SECONDS)
        return FAILURE_EXIT_CODE
    finally:
        io.close()
    return 0


def _log_failure(error: Exception, rank: int) -> None:
    """Log a failure. A violation is already in the log, so only the failure it led to
    is logged.
    """
    if not isinstance(error, CanaryViolation):
        logger.error("The scheduler of rank %d failed", rank, exc_info=error)
        return
    logger.error(
        "The scheduler of rank %d failed: the KV canary stopped it",
        rank,
        exc_info=error.__cause__,
    )


# A rank's part of the last message: a text for all clients, and its incidents.
_Findings = tuple[str, list[dict[str, Any]]]


def _last_message(error: Exception, incidents: list[dict[str, Any]]) -> EngineFailed:
    """Build the failure message: a text for every client in flight that reveals nothing
    about other clients' requests, and the incidents of all ranks for callers with the
    right to see them.
    """
    if not isinstance(error, CanaryViolation):
        text = f"the scheduler failed with {type(error).__name__}"
        return EngineFailed(message=text, incidents=incidents)
    found: list[_Findings] = [(error.public, incidents)]
    if not error.is_alone:
        # Otherwise no collective, because the other ranks may be waiting in one of the
        # forward's.
        found = _findings_of_all_ranks(found[0])
    # Findings about requests rather than data are the same on all ranks.
    texts = list(dict.fromkeys(text for text, _ in found if text)) or [str(error)]
    elsewhere = f" ({len(texts) - 1} other rank(s) found more)" if texts[1:] else ""
    return EngineFailed(
        message=texts[0] + elsewhere,
        incidents=sorted(
            (incident for _, of_rank in found for incident in of_rank),
            key=itemgetter("time"),
        ),
    )


def _findings_of_all_ranks(own: _Findings) -> list[_Findings]:
    """Gather the findings of every rank: all stop in the same step, and the first one
    to exit takes the others down.
    """
    group = get_tp_group()
    try:
        group.meet(REPORT_TIMEOUT)
        every = group.all_gather_bytes(msgspec.msgpack.encode(own))
    except RuntimeError as gone:
        logger.warning("another rank's report of its KV cache may be cut: %s", gone)
        return [own]
    return [msgspec.msgpack.decode(of_rank, type=_Findings) for of_rank in every]


def _refuse(ready: Connection, error: Exception, *, has_peers: bool) -> None:
    """Report why this process cannot serve; the parent then ends all ranks."""
    # A second rank's report is not read.
    with contextlib.suppress(BrokenPipeError):
        ready.send_bytes(msgspec.msgpack.encode(SchedulerReady(error=str(error))))
    if has_peers:
        # A peer that lost this process in a collective would also log that.
        time.sleep(REFUSAL_SECONDS)
