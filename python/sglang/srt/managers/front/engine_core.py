"""Connects tokenizer, scheduler process and ZeroMQ sockets to one TokenizerManager.

Shared by the HTTP server and the offline Engine: start, readiness, unexpected exit of
the scheduler, and shutdown.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.arg_groups.arg_parser import flag_name
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.sampling_defaults import read_sampling_defaults
from sglang.srt.managers.front.scheduler_client import SchedulerClient
from sglang.srt.managers.front.scheduler_process import SchedulerDied, SchedulerProcess
from sglang.srt.managers.front.tokenizer_manager import ServerPhase, TokenizerManager
from sglang.srt.managers.messages.io_struct import SchedulerStats
from sglang.srt.metrics.front_metrics import FrontMetrics
from sglang.srt.utils.hf_tokenizer import Tokenizer, load_tokenizer
from sglang.srt.utils.paths import resolve_model_path

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import SchedulerReady
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
LAST_MESSAGE_SECONDS = 0.2


class StartedEngine(NamedTuple):
    """A loading scheduler process, and what the front reads from the checkpoint.

    Fields:
        sampling_defaults: values for sampling parameters that a request leaves out.
    """

    process: SchedulerProcess
    tokenizer: Tokenizer | None
    sampling_defaults: dict[str, Any]


class EngineCore:
    """The front's side of one running engine. Create it inside the asyncio loop.

    Attributes:
        manager: accepts requests.
        died: set once the scheduler has ended unexpectedly.
    """

    def __init__(self, started: StartedEngine, *, server_args: ServerArgs) -> None:
        process = self.process = started.process
        self.died = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_stopping = False
        self._client = SchedulerClient(
            process.addresses, on_message=lambda message: self.manager.receive(message)
        )
        self.manager = TokenizerManager(
            server_args=server_args,
            tokenizer=started.tokenizer,
            send=self._client.send,
            sampling_defaults=started.sampling_defaults,
            metrics=FrontMetrics.of(server_args, first=SchedulerStats())
            if server_args.enable_metrics
            else None,
        )

    async def wait_ready(self) -> SchedulerReady:
        """Wait until requests can be served.

        Raises:
            ValueError: the scheduler refused the configuration.
            SchedulerDied: the scheduler exited first.
        """
        ready = await asyncio.to_thread(self.process.wait_ready)
        self.manager.set_ready(ready)
        self.process.notify_exit(self._on_exit_in_thread)
        return ready

    def close(self) -> None:
        """Drop running requests, end the scheduler, remove the sockets.

        Blocks the loop: nothing else is left to do, and threads cannot be started while
        the interpreter exits.
        """
        self._is_stopping = True
        is_up = self.manager.phase not in (ServerPhase.STARTING, ServerPhase.DEAD)
        if is_up:
            self.manager.shutdown_scheduler()
        self.manager.set_draining()
        self.manager.refuse_all("the engine was shut down")
        self.manager.close()
        self._client.close()
        # A process that is still loading does not read messages yet.
        has_ended = self.process.stop(STOP_SECONDS if is_up else 0.0)
        if is_up and not has_ended:
            logger.warning(
                "the scheduler did not exit within %g s; killed", STOP_SECONDS
            )

    def _on_exit_in_thread(self, exit_code: int) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_exit, exit_code)

    def _on_exit(self, exit_code: int) -> None:
        # Its last message may still arrive.
        self._loop.call_later(LAST_MESSAGE_SECONDS, self._declare_dead, exit_code)

    def _declare_dead(self, exit_code: int) -> None:
        if not self._is_stopping:
            self.manager.set_dead(str(SchedulerDied(exit_code)))
            self.died.set()


def start_engine(server_args: ServerArgs, *, num_threads: int) -> StartedEngine:
    """Check the checkpoints, start the scheduler process, and read the tokenizer while
    it loads.

    Raises:
        ValueError: there is no model or no tokenizer; no process is left.
    """
    defaults = _check_checkpoints(server_args)
    process = SchedulerProcess.start(server_args, num_threads=num_threads)
    try:
        return StartedEngine(process, _load_tokenizer(server_args), defaults)
    except BaseException:
        process.stop(0)
        raise


def _check_checkpoints(args: ServerArgs) -> dict[str, Any]:
    """Read the configurations of target and draft early: the scheduler takes seconds to
    reach them.

    Returns:
        The sampling defaults of the target.

    Raises:
        ValueError: a configuration is missing or belongs to no known model.
    """
    assert args.model_path is not None
    folder = resolve_model_path(args.model_path)
    ModelConfig.from_path(
        folder, context_length=args.context_length, quantization=args.quantization
    )
    if args.speculative_draft_model_path is not None:
        path = args.speculative_draft_model_path
        ModelConfig.from_path(
            resolve_model_path(path, flag=flag_name("speculative_draft_model_path")),
            quantization=args.speculative_draft_model_quantization,
        )
    return read_sampling_defaults(folder) if args.sampling_defaults == "model" else {}


def _load_tokenizer(server_args: ServerArgs) -> Tokenizer | None:
    if server_args.skip_tokenizer_init:
        return None
    assert server_args.tokenizer_path is not None
    return load_tokenizer(
        server_args.tokenizer_path,
        chat_template=server_args.chat_template,
        escape_special_tokens=server_args.escape_special_tokens,
    )
