"""The HTTP server: the app with all its routes, and one server from start to exit.

Start: listen, start the scheduler, answer 503 until it is ready. Exit: SIGTERM and
SIGINT drain for --drain-timeout seconds, and a second signal ends that; if the
scheduler dies, the server exits; a configuration that cannot be served raises
`ValueError`. SIGHUP reloads the keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import signal
import socket
import sys
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.access import AccessMiddleware
from sglang.srt.entrypoints.anthropic.error_shape import ErrorShapeMiddleware
from sglang.srt.entrypoints.anthropic.messages import MessagesApi
from sglang.srt.entrypoints.api_keys import ApiKeys
from sglang.srt.entrypoints.body_budget import BodyBudget
from sglang.srt.entrypoints.chat_page import ChatPage
from sglang.srt.entrypoints.control_api import ControlApi
from sglang.srt.entrypoints.docs_routes import DocsRoutes
from sglang.srt.entrypoints.exit_codes import ExitCode
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import error_response
from sglang.srt.entrypoints.inspector_api import InspectorApi
from sglang.srt.entrypoints.listener import listen, max_connections
from sglang.srt.entrypoints.loads_api import LoadsApi
from sglang.srt.entrypoints.lora_api import LoraApi
from sglang.srt.entrypoints.middleware import BodyLimitMiddleware, ErrorMiddleware
from sglang.srt.entrypoints.native_routes import NativeRoutes
from sglang.srt.entrypoints.openai.routes import OpenAIRoutes
from sglang.srt.entrypoints.profile_api import ProfileApi
from sglang.srt.entrypoints.refused_routes import refused_routes
from sglang.srt.entrypoints.score_api import ScoreApi
from sglang.srt.entrypoints.start_message import serving, starting
from sglang.srt.entrypoints.tokenize_api import TokenizeApi
from sglang.srt.entrypoints.unknown_fields import UnknownFields
from sglang.srt.entrypoints.web_server import WebServer
from sglang.srt.managers.front.engine_core import EngineCore, start_engine
from sglang.srt.managers.front.scheduler_process import SchedulerDied, available_cores
from sglang.srt.managers.messages.errors import ApiError, BadRequest, NotFound
from sglang.srt.managers.messages.io_struct import SchedulerReady
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.logging import configure_logging
from sglang.srt.utils.malloc import return_large_blocks

logger = logging.getLogger(__name__)


def create_app(front: Front, keys: ApiKeys | None = None) -> Starlette:
    """Build the ASGI application.

    Errors have the shape of `ApiError.body`, except below `/v1/messages`, which uses
    Anthropic's shape.

    Args:
        keys: the API keys, which their owner may reload. Defaults to the keys in the
            server's arguments, read once.
    """
    args = front.server_args
    routes = all_routes(front)
    docs = DocsRoutes(routes, needs_key=bool(args.api_key or args.api_key_file))
    app = Starlette(
        routes=[*routes, *docs.routes()],
        middleware=_middleware(args, keys or ApiKeys(args)),
        exception_handlers={
            ApiError: _answer_api_error,
            HTTPException: _answer_http_exception,
        },
    )
    app.router.redirect_slashes = False
    app.state.max_body_values = args.max_body_values
    app.state.unknown_fields = UnknownFields(is_strict=args.strict_fields)
    return app


def _middleware(args: ServerArgs, keys: ApiKeys) -> list[Middleware]:
    """Return the layers around the routes, outermost first."""
    origins = args.cors_allow_origins or []
    layers = [
        Middleware(ErrorShapeMiddleware),
        Middleware(ErrorMiddleware),
        Middleware(AccessMiddleware, keys=keys, origins=origins),
        Middleware(
            BodyLimitMiddleware,
            max_bytes=args.max_body_bytes,
            budget=BodyBudget(args.max_total_body_bytes),
        ),
    ]
    if not origins:
        return layers
    # Outermost: browsers must be able to read errors, and preflights carry no key.
    cors = Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
    )
    return [cors, *layers]


def all_routes(front: Front) -> list[BaseRoute]:
    """Return every route except the ones that describe the others; all are
    `Endpoint`s."""
    return [
        *NativeRoutes(front).routes(),
        *OpenAIRoutes(front).routes(),
        *MessagesApi(front).routes(),
        *TokenizeApi(front).routes(),
        *ScoreApi(front).routes(),
        *ControlApi(front).routes(),
        *LoadsApi(front).routes(),
        *LoraApi(front).routes(),
        *ProfileApi(front).routes(),
        *ChatPage(front).routes(),
        *InspectorApi(front).routes(),
        *refused_routes(),
    ]


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFound(f"no such path: {request.url.path}"))
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = BadRequest(message, status=error.status_code)
    answer.headers.update(error.headers or {})
    return error_response(answer)


def launch_server(server_args: ServerArgs) -> ExitCode:
    """Serve until a signal or a failure; returns the exit code of the process.

    Raises:
        ValueError: the configuration cannot be served (port taken, no such model, ...).
    """
    configure_logging(server_args.log_level)
    return_large_blocks()
    # Until the loop handles it, it must not end a starting server.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    keys = ApiKeys(server_args)
    most = max_connections(server_args)
    listener = listen(server_args)
    with contextlib.closing(listener):
        _say(starting(server_args))
        _warn_if_open(listener, keys)
        started = start_engine(server_args, num_threads=available_cores() - 1)

        async def serve() -> ExitCode:
            core = EngineCore(started, server_args=server_args)
            return await _Server(
                core, server_args, listener, keys=keys, max_connections=most
            ).run()

        return asyncio.run(serve())


class _Server:
    """One server from the first connection to the exit code."""

    def __init__(
        self,
        core: EngineCore,
        server_args: ServerArgs,
        listener: socket.socket,
        *,
        keys: ApiKeys,
        max_connections: int,
    ) -> None:
        self._core = core
        self._server_args = server_args
        self._listener = listener
        self._keys = keys
        self._stop = asyncio.Event()
        self._is_orderly = False
        self._second_signal = asyncio.Event()
        front = Front(
            server_args=server_args,
            manager=core.manager,
            model_name=server_args.served_model_name or "",
        )
        self._web = WebServer(
            create_app(front, keys), server_args, max_connections=max_connections
        )

    async def run(self) -> ExitCode:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._keys.reload)
        serving = asyncio.create_task(self._web.serve(sockets=[self._listener]))
        ending = asyncio.create_task(self._serve_until_end())
        try:
            await _first(serving, ending)
            if not ending.done():
                _complain("the HTTP server ended; see the log")
                return ExitCode.FAILURE
            return ending.result()
        finally:
            ending.cancel()
            self._web.should_exit = True
            await serving
            self._core.close()
            if self._is_orderly:
                # Printed last, because the scheduler has exited and logs nothing more.
                _say("shut down")

    async def _wait_ready(self) -> SchedulerReady:
        """Wait for the engine, and meanwhile start the process that renders chats, so
        that the first chat does not wait for it.
        """
        ready, _ = await asyncio.gather(
            self._core.wait_ready(), self._core.manager.side_work.start()
        )
        return ready

    async def _serve_until_end(self) -> ExitCode:
        stopping = asyncio.create_task(self._stop.wait())
        starting = asyncio.create_task(self._wait_ready())
        await _first(starting, stopping)
        if not starting.done():
            self._core.manager.set_draining()
            self._core.process.kill()
            with contextlib.suppress(SchedulerDied, ValueError):
                await starting
            _say("stopped before the model was loaded")
            return ExitCode.DRAINED
        try:
            self._announce(starting.result())
        except SchedulerDied as error:
            _complain(f"{error} while it started")
            return ExitCode.FAILURE
        manager = self._core.manager
        beating = asyncio.create_task(
            manager.heartbeat.keep_asking(lambda: manager.num_in_flight > 0)
        )
        dying = asyncio.create_task(self._core.died.wait())
        await _first(dying, stopping)
        code = ExitCode.FAILURE if dying.done() else await self._drain(dying)
        beating.cancel()
        if self._core.died.is_set():
            _complain("the scheduler process died; see the log")
            return ExitCode.FAILURE
        self._is_orderly = True
        return code

    async def _drain(self, dying: asyncio.Task[bool]) -> ExitCode:
        """Let running requests finish for a while, then reject the rest."""
        manager = self._core.manager
        timeout = self._server_args.drain_timeout
        manager.set_draining()
        logger.info(
            "shutting down: %d request(s) in flight get %g s",
            manager.num_in_flight,
            timeout,
        )
        idle = asyncio.create_task(manager.wait_idle(timeout))
        second_signal = asyncio.create_task(self._second_signal.wait())
        await _first(idle, second_signal, dying)
        is_cut = second_signal.done()
        idle.cancel()
        second_signal.cancel()
        if not manager.num_in_flight:
            return ExitCode.DRAINED
        logger.warning(
            "%s: %d request(s) in flight get 503",
            "a second signal" if is_cut else f"--drain-timeout {timeout:g} has passed",
            manager.num_in_flight,
        )
        manager.refuse_all("the server is shutting down")
        return ExitCode.DRAIN_CUT_SHORT if is_cut else ExitCode.DRAIN_TIMED_OUT

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._second_signal.set()
        self._stop.set()

    def _announce(self, ready: SchedulerReady) -> None:
        # Imported modules and loaded state are permanent, so garbage collections may
        # skip them.
        gc.collect()
        gc.freeze()
        host, port = self._listener.getsockname()[:2]
        # A browser cannot open the wildcard address.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        shown = f"[{host}]" if ":" in host else host
        if ready.max_req_input_len < ready.context_len - 1:
            logger.warning(
                "prompts of more than %d tokens are refused, although the context has "
                "%d: the KV pool is smaller; raise --max-total-tokens or "
                "--mem-fraction-static, or lower --context-length",
                ready.max_req_input_len,
                ready.context_len,
            )
        _say(
            serving(
                self._server_args,
                ready,
                url=f"http://{shown}:{port}",
                sampling_defaults=self._core.manager.sampling_defaults,
            )
        )


async def _first(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _say(text: str) -> None:
    print(text, flush=True)


def _complain(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)


def _warn_if_open(listener: socket.socket, keys: ApiKeys) -> None:
    host = listener.getsockname()[0]
    if not keys.has_client_keys and not ipaddress.ip_address(host).is_loopback:
        logger.warning(
            "anyone who can reach %s may use this server: set --api-key-file or "
            "--api-key, or listen on a loopback address (--host)",
            host,
        )
