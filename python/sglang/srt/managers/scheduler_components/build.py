"""Builds a scheduler from the server's arguments, and is the scheduler's process."""

from __future__ import annotations

import logging
from multiprocessing.connection import Connection

import msgspec

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.io_struct import SchedulerReady
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_addresses import SchedulerAddresses
from sglang.srt.managers.scheduler_components.scheduler_io import (
    SchedulerIO,
    ZmqIO,
)
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.logging import configure_logging
from sglang.srt.utils.paths import resolve_model_folder

logger = logging.getLogger(__name__)


def build_scheduler(server_args: ServerArgs, io: SchedulerIO) -> Scheduler:
    """A scheduler that is ready to run, in this process.

    Raises:
        ValueError: model, tokenizer or memory do not fit the arguments.
    """
    assert server_args.model_path is not None
    model_config = ModelConfig.from_folder(
        resolve_model_folder(server_args.model_path),
        context_length=server_args.context_length,
    )
    tokenizer = None
    if not server_args.skip_tokenizer_init:
        assert server_args.tokenizer_path is not None
        tokenizer = load_tokenizer(server_args.tokenizer_path)
    worker = TpModelWorker(server_args=server_args, model_config=model_config)
    return Scheduler(server_args=server_args, worker=worker, tokenizer=tokenizer, io=io)


def run_scheduler_process(
    server_args: ServerArgs, addresses: SchedulerAddresses, ready: Connection
) -> None:
    """Serve until told to stop; reports once on `ready` whether it can.

    Raises:
        Exception: whatever the engine raised while it served; the log has it, and the
            parent sees the process end.
    """
    configure_logging(server_args.log_level)
    try:
        io = ZmqIO(addresses)
        scheduler = build_scheduler(server_args, io)
    except (ValueError, MemoryError) as error:
        ready.send_bytes(msgspec.msgpack.encode(SchedulerReady(error=str(error))))
        return
    ready.send_bytes(msgspec.msgpack.encode(scheduler.ready_message()))
    try:
        scheduler.run_event_loop()
    except Exception:
        logger.exception("The scheduler failed")
        raise
    finally:
        io.close()
