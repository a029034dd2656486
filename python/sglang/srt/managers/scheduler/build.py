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
from sglang.srt.managers.scheduler.warm_up import compile_ahead, is_warmed_up, warm_up
from sglang.srt.managers.worker.tp_worker import TpModelWorker
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.logging import configure_logging
from sglang.srt.utils.paths import resolve_model_path

if TYPE_CHECKING:
    from sglang.srt.managers.messages.scheduler_addresses import SchedulerAddresses
    from sglang.srt.managers.worker.interface import Worker
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

FOLLOWER_LOG_LEVEL = "error"
FAILURE_EXIT_CODE = 1
# Longer than the parent needs to read a refusal and to end the ranks.
REFUSAL_SECONDS = 5.0
# Longer than rank 0 needs to tell its clients why the engine stops.
FAILURE_SECONDS = 3.0
# Longer than a rank needs to write down what its canary found.
REPORT_TIMEOUT = timedelta(seconds=10)


def build_scheduler(server_args: ServerArgs, io: SchedulerIO) -> Scheduler:
    """A scheduler that is ready to run, in this process.

    Raises:
        ValueError: model, tokenizer, memory or environment do not fit the arguments.
    """
    assert server_args.model_path is not None
    # First: an endpoint that is in use is known before weights are read.
    event_publisher = open_event_publisher(server_args, rank=get_tp_group().rank)
    model_config = ModelConfig.from_path(
        resolve_model_path(server_args.model_path),
        context_length=server_args.context_length,
    )
    tokenizer = None
    if not server_args.skip_tokenizer_init:
        assert server_args.tokenizer_path is not None
        tokenizer = load_tokenizer(server_args.tokenizer_path)
    create = (
        TpModelWorker.create
        if server_args.speculative_algorithm is None
        else EAGLEWorkerV2
    )
    with opened_rooms(server_args):
        worker: Worker = create(server_args=server_args, model_config=model_config)
        is_warm = is_warmed_up(server_args)
        if is_warm:
            compile_ahead(server_args, worker)
        worker.capture_graphs()
        if is_warm:
            warm_up(server_args, worker, tokenizer)
        worker.model_runner.watch_kernels()
        return Scheduler(
            server_args=server_args,
            worker=worker,
            tokenizer=tokenizer,
            io=io,
            event_publisher=event_publisher,
        )


def settle(server_args: ServerArgs) -> None:
    """Make this process, which has loaded its engine, one that does nothing but serve.

    Loaded objects stay: a collection that looked at them again would delay a step.
    Beside a GPU the host copies some megabytes at most, and waits for the slowest of
    its OpenMP threads longer than one of them needs for all.
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
) -> int:
    """Serve until a `ShutdownReq`; reports once on `ready` whether it can.

    Returns the exit code of the process: 0, or `FAILURE_EXIT_CODE` where the engine
    failed while it served; the log says why.

    Args:
        rank: of this process among `server_args.tp_size`. Rank 0 talks to the front;
            the others follow it and log errors only.
        store: file through which the ranks meet.
    """
    configure_logging(server_args.log_level if rank == 0 else FOLLOWER_LOG_LEVEL)
    try:
        io = ZmqIO(addresses) if rank == 0 else NullIO()
        init_tensor_parallel(
            rank=rank,
            size=server_args.tp_size,
            device=server_args.device,
            store=store,
        )
        scheduler = build_scheduler(server_args, io)
    except (ValueError, MemoryError) as error:
        _refuse(ready, error, has_peers=server_args.tp_size > 1)
        return 0
    settle(server_args)
    ready.send_bytes(msgspec.msgpack.encode(scheduler.ready_message()))
    try:
        scheduler.run_event_loop()
    except Exception as error:
        _log_failure(error, rank)
        io.send(_last_message(error, scheduler.own_incidents()))
        if rank > 0:
            # Rank 0 has most likely failed alike, and must say so before it finds this
            # process gone in the middle of a collective.
            time.sleep(FAILURE_SECONDS)
        return FAILURE_EXIT_CODE
    finally:
        io.close()
    return 0


def _log_failure(error: Exception, rank: int) -> None:
    """A violation is in the log already, but for the failure that it led to."""
    if not isinstance(error, CanaryViolation):
        logger.error("The scheduler of rank %d failed", rank, exc_info=error)
        return
    logger.error(
        "The scheduler of rank %d failed: the KV canary stopped it",
        rank,
        exc_info=error.__cause__,
    )


# A rank's part of the last message: what any client may see, and its incidents.
_Findings = tuple[str, list[dict[str, Any]]]


def _last_message(error: Exception, incidents: list[dict[str, Any]]) -> EngineFailed:
    """The news of a failure: for every client in flight, nothing of another client's
    request; for those who may ask for them, the incidents of all ranks."""
    if not isinstance(error, CanaryViolation):
        text = f"the scheduler failed with {type(error).__name__}"
        return EngineFailed(message=text, incidents=incidents)
    found: list[_Findings] = [(error.public, incidents)]
    if not error.is_alone:
        # Otherwise no collective: the other ranks may wait in one of the forward's.
        found = _findings_of_all_ranks(found[0])
    # All ranks find what concerns the requests and not the data.
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
    """The findings of every rank: all of them stop in the same step, and the first one
    that ends takes the others along."""
    group = get_tp_group()
    try:
        group.meet(REPORT_TIMEOUT)
        every = group.all_gather_bytes(msgspec.msgpack.encode(own))
    except RuntimeError as gone:
        logger.warning("another rank's report of its KV cache may be cut: %s", gone)
        return [own]
    return [msgspec.msgpack.decode(of_rank, type=_Findings) for of_rank in every]


def _refuse(ready: Connection, error: Exception, *, has_peers: bool) -> None:
    """Say why this process cannot serve; the parent then ends all ranks."""
    # The report of a second rank is not read any more.
    with contextlib.suppress(BrokenPipeError):
        ready.send_bytes(msgspec.msgpack.encode(SchedulerReady(error=str(error))))
    if has_peers:
        # A peer that lost this process in a collective would log that, too.
        time.sleep(REFUSAL_SECONDS)
