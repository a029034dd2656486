"""uvicorn with connection limits and without its own signal handlers."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence

import uvicorn
from starlette.types import ASGIApp

from sglang.srt.entrypoints.acceptor import Acceptor
from sglang.srt.entrypoints.http_connection import ConnectionLimits, HttpConnection
from sglang.srt.entrypoints.spare_place import SparePlace
from sglang.srt.server_args import ServerArgs

CLOSE_SECONDS = 3


class WebServer(uvicorn.Server):
    """Serves an ASGI application until `should_exit` is set; its owner handles signals.

    Args:
        max_connections: maximum number of open connections.
    """

    def __init__(
        self, app: ASGIApp, server_args: ServerArgs, *, max_connections: int
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=server_args.keep_alive_timeout,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )
        # Its warnings are about bad requests, with which clients could fill the log.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._limits = ConnectionLimits.of(server_args)
        self._max_connections = max_connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Accept on the listening `sockets`."""
        await self.lifespan.startup()
        acceptors = [
            Acceptor(
                listener,
                create=self._connection,
                max_connections=self._max_connections,
                limits=self._limits,
            )
            for listener in sockets or ()
        ]
        for acceptor in acceptors:
            acceptor.start()
        self.servers = acceptors  # type: ignore[assignment]
        self.started = True

    def _connection(
        self, on_lost: Callable[[HttpConnection], None], place: SparePlace | None
    ) -> HttpConnection:
        return HttpConnection(
            self.config,
            self.server_state,
            app_state=self.lifespan.state,
            limits=self._limits,
            on_lost=on_lost,
            place=place,
        )
