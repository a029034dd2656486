"""Main module of a scheduler process; `scheduler_process` starts one per rank.

Reads its configuration from stdin, reports through the inherited descriptor named on
the command line, and exits as soon as stdin closes: the parent holds the other end, so
the scheduler also exits if its parent is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection

import msgspec

from sglang.srt.managers.messages.scheduler_addresses import SchedulerAddresses
from sglang.srt.managers.scheduler.build import run_scheduler_process
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.line_writer import flush_all
from sglang.srt.utils.standard_streams import guard_standard_streams
from sglang.srt.utils.start_times import StartTimes

STDIN = 0
STORE_NAME = "ranks"


def main() -> None:
    guard_standard_streams()
    # The front decides when to stop and sends a message.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    config = msgspec.json.decode(_read_line(STDIN))
    addresses = SchedulerAddresses(**config["addresses"])
    threading.Thread(
        target=_exit_with_parent, args=(addresses,), name="lifeline", daemon=True
    ).start()
    server_args = ServerArgs(**config["server_args"])
    times = StartTimes(config["began"])
    times.end("imports")
    code = run_scheduler_process(
        server_args,
        addresses,
        Connection(int(sys.argv[1]), readable=False),
        rank=config["rank"],
        store=addresses.folder / STORE_NAME,
        times=times,
    )
    if server_args.tp_size > 1 or code:
        # NCCL communicators cannot be destroyed while CUDA graphs refer to them, and
        # threads of a failed engine may end the process with a signal. Nothing is left
        # to save, so the interpreter's finalization is skipped.
        flush_all()
        os._exit(code)


def _read_line(descriptor: int) -> bytes:
    """Read a line unbuffered, leaving later bytes to `_exit_with_parent`."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(descriptor, 65536)
        if not piece:
            raise SystemExit("the parent closed stdin before it sent a configuration")
        line += piece
    return bytes(line)


def _exit_with_parent(addresses: SchedulerAddresses) -> None:
    while os.read(STDIN, 4096):
        pass
    shutil.rmtree(addresses.folder, ignore_errors=True)
    flush_all()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
