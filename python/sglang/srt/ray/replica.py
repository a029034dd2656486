"""One replica: an engine, its HTTP application and its health. Knows nothing about
Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

from starlette.types import ASGIApp, Message

from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_server import create_app
from sglang.srt.environ import envs
from sglang.srt.managers.front.engine_core import EngineCore, start_engine
from sglang.srt.managers.front.scheduler_process import SchedulerDied
from sglang.srt.managers.front.tokenizer_manager import ServerPhase
from sglang.srt.managers.messages.errors import ApiError
from sglang.srt.ray.http_call import MEETING, HttpCall, answer_messages
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.logging import configure_embedded_logging

logger = logging.getLogger(__name__)

# A replica whose scheduler has died exits once its last answers are on their way.
LAST_ANSWERS_SECONDS = 0.2
EXIT_CODE = 1


class ReplicaFailed(RuntimeError):
    """The replica cannot serve because it did not start or its engine has died."""


class EngineReplica:
    """An engine that answers HTTP requests; create it inside an event loop.

    Args:
        values: the engine's arguments.

    Raises:
        ReplicaFailed: it cannot start; the message is one line.
    """

    # Ray Serve awaits it.
    async def __init__(  # type: ignore[misc]
        self, values: Mapping[str, Any]
    ) -> None:
        try:
            self._core, self._port = await _start_core(values)
        except (TypeError, ValueError, SchedulerDied) as error:
            raise ReplicaFailed(f"the replica did not start: {error}") from None
        manager = self._core.manager
        front = Front(
            server_args=manager.server_args,
            manager=manager,
            model_name=manager.server_args.served_model_name or "",
        )
        self._app: ASGIApp = create_app(front)
        self._tasks = [
            asyncio.create_task(self._leave_when_dead()),
            asyncio.create_task(
                manager.heartbeat.keep_asking(lambda: manager.num_in_flight > 0)
            ),
        ]

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application; called by Ray Serve."""
        return self._app

    async def answer(self, call: HttpCall) -> AsyncIterator[Message]:
        """Answer a request that another process has read.

        Raises:
            ReplicaFailed: the engine is dead and nothing of the answer was sent, so
                another replica may answer.
        """
        async for message in answer_messages(self._app, call):
            is_error = message.get("status", 200) >= 500
            if is_error and self._core.manager.phase is ServerPhase.DEAD:
                raise ReplicaFailed("the engine has died")
            yield message

    async def prefill(self, call: HttpCall) -> AsyncIterator[Message]:
        """Compute the prompts of a request for another replica, which asks for them at
        the address in the first message. The second one is the answer's status.

        Raises:
            ReplicaFailed: as in `answer`.
        """
        host = self._core.manager.server_args.host
        yield {"type": MEETING, "host": host, "port": self._port}
        async for message in self.answer(call):
            if message["type"] == "http.response.start":
                yield message

    async def check_health(self) -> None:
        """Return if the scheduler is alive; otherwise Ray replaces the replica.

        Raises:
            ReplicaFailed: the scheduler has exited, the KV canary has stopped it, or it
                has not answered for --health-timeout.
        """
        manager = self._core.manager
        if manager.phase is ServerPhase.DEAD:
            raise ReplicaFailed("the scheduler is dead")
        try:
            manager.heartbeat.check()
        except ApiError as error:
            raise ReplicaFailed(error.message) from None

    async def close(self) -> None:
        """Stop the engine; unfinished requests are rejected."""
        for task in self._tasks:
            task.cancel()
        self._core.close()

    async def _leave_when_dead(self) -> None:
        """End this process soon after the scheduler: routers immediately drop a replica
        that is gone, but drop one that answers with errors only after three checks.
        """
        await self._core.died.wait()
        logger.error("the scheduler process died; this replica leaves")
        await asyncio.sleep(LAST_ANSWERS_SECONDS)
        self._core.close()
        self._leave()

    def _leave(self) -> NoReturn:
        os._exit(EXIT_CODE)


async def _start_core(values: Mapping[str, Any]) -> tuple[EngineCore, int]:
    """Return a running engine, and the port where others ask it for KV, or 0."""
    args = ServerArgs(**values)
    configure_embedded_logging(args.log_level)
    # Ray sets OMP_NUM_THREADS to the replica's CPUs, which its ranks share.
    threads = envs.OMP_NUM_THREADS.get() or args.tp_size
    with envs.OMP_NUM_THREADS.override(max(threads // args.tp_size, 1)):
        started = start_engine(args, num_threads=threads)
    core = EngineCore(started, server_args=args)
    try:
        ready = await core.wait_ready()
    except BaseException:
        core.close()
        raise
    logger.info(
        "the replica serves %s on %s: %d KV slots, context %d",
        args.served_model_name,
        args.device,
        ready.max_total_num_tokens,
        ready.context_len,
    )
    return core, ready.bootstrap_port
