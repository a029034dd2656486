"""One HTTP connection: strict framing, and a deadline for everything the client must
send or read.

uvicorn's protocol does the rest. Knows nothing about the application or how connections
are accepted.
"""

from __future__ import annotations

import math
import select
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from sglang.srt.entrypoints.http_parser import StrictParser
from sglang.srt.entrypoints.spare_place import SparePlace
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.utils.quoting import MAX_QUOTED_CHARS, clipped

if TYPE_CHECKING:
    import asyncio

    from sglang.srt.server_args import ServerArgs

REQUEST_TIMEOUT = 408
# Longer than a nearby host takes to answer that a connection no longer exists; for
# distant hosts the next `enforce` finds out.
RESET_SECONDS = 0.05
# While the server is full, a connection may be closed that has been idle for this long,
# or whose head or first byte has been due for this long. A client that sends
# immediately needs no more time, however far away, because its first bytes follow the
# handshake.
REST_SECONDS = 1.0
HEAD_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one connection.

    Fields:
        header_timeout: seconds for the head of a request, and for the first byte.
        body_timeout, write_timeout: seconds over which the rate of sending a body, or
        of reading an answer, is measured.
        min_rate: minimum rate in bytes per second.
        max_header_bytes: maximum size of the head.
    """

    header_timeout: float
    body_timeout: float
    write_timeout: float
    min_rate: float
    max_header_bytes: int

    @classmethod
    def of(cls, args: ServerArgs) -> ConnectionLimits:
        return cls(
            header_timeout=args.header_timeout,
            body_timeout=args.body_timeout,
            write_timeout=args.write_timeout,
            min_rate=args.min_transfer_rate,
            max_header_bytes=args.max_header_bytes,
        )

    @property
    def shortest(self) -> float:
        """The shortest deadline that `HttpConnection.enforce` checks, in seconds."""
        return min(self.header_timeout, self.body_timeout, self.write_timeout)


class Pace:
    """Checks that bytes arrive at `rate` per second over every window."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._since: float | None = None
        self._total = 0

    def rest(self) -> None:
        """Reset the window, because nothing is due now."""
        self._since = None

    def is_too_slow(self, *, now: float, total: int, rate: float) -> bool:
        """Check the rate, given the total bytes so far (from any starting point)."""
        if self._since is not None:
            if now - self._since < self._window:
                return False
            if total - self._total < rate * self._window:
                return True
        self._since, self._total = now, total
        return False


class HttpConnection(H11Protocol):
    """A connection that is dropped if its client misses a deadline.

    Args:
        on_lost: called once, when the connection has ended.
        place: place of a connection that is not admitted yet, or None.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        *,
        app_state: dict[str, Any],
        limits: ConnectionLimits,
        on_lost: Callable[[HttpConnection], None],
        place: SparePlace | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state)
        if place is not None:
            self.app = place.guard(self.app)
        self._limits = limits
        self._on_lost = on_lost
        self._parser = StrictParser(limits.max_header_bytes)
        self.conn = self._parser
        self._rests_since = math.inf
        self._head_since: float | None = None
        self._body_pace = Pace(limits.body_timeout)
        self._body_of: object = None
        self._write_pace = Pace(limits.write_timeout)
        self._is_half_closed = False

    # -- what the transport calls --------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._rests_since = self._head_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_head()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Stay open for a due answer: the client may only have said that no further
        request follows.
        """
        if not self._is_answer_due():
            return None
        self._is_half_closed = True
        self._probe()
        return True

    # -- what uvicorn calls --------------------------------------------------------

    def on_response_complete(self) -> None:
        self._rests_since = self.loop.time()
        super().on_response_complete()
        self._note_head()
        if self._is_half_closed and not self._is_answer_due():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        refusal = self._parser.refusal
        status = 400 if refusal is None else refusal.error_status_hint
        reason = clipped(str(refusal or msg), MAX_QUOTED_CHARS)
        self._refuse(status, f"the request is not valid HTTP: {reason}")

    # -- what the acceptor calls ---------------------------------------------------

    def enforce(self, now: float) -> None:
        """Drop a client that has missed a deadline; call this periodically."""
        if self._takes_nothing(now) or self._has_gone():
            self.transport.abort()
        elif self.transport.is_closing():
            return
        elif self._is_head_late(now):
            self._end_late_head()
        elif self._is_body_late(now):
            self._refuse(
                REQUEST_TIMEOUT,
                f"the body came slower than {self._limits.min_rate:g} bytes per second "
                f"over {self._limits.body_timeout:g} seconds",
            )

    def yields_at(self) -> float:
        """Return the loop time from which it may be closed to make room, or inf while a
        request is in progress.
        """
        if self._head_since is not None:
            return self._head_since + HEAD_SECONDS
        is_resting = self._parser.their_state is h11.IDLE and not self._has_part()
        return self._rests_since + REST_SECONDS if is_resting else math.inf

    def make_room(self) -> None:
        """Close the connection; a client with an incomplete head is told why."""
        if self._has_part():
            self._refuse(
                REQUEST_TIMEOUT,
                "the head of the request was not complete, and all connections that "
                "--max-connections admits are open",
            )
        else:
            self.transport.close()

    # -- deadlines -----------------------------------------------------------------

    def _is_answer_due(self) -> bool:
        """Whether a complete request is waiting for its answer."""
        cycle = self.cycle
        return not (cycle is None or cycle.more_body or cycle.response_complete)

    def _has_part(self) -> bool:
        """Whether part of an incomplete head has arrived."""
        return bool(self._parser.trailing_data[0])

    def _note_head(self) -> None:
        """Start the clock at the first byte of a head and stop it at the last."""
        if self._parser.their_state is not h11.IDLE or not self._has_part():
            self._head_since = None
        elif self._head_since is None:
            self._head_since = self.loop.time()

    def _is_head_late(self, now: float) -> bool:
        since = self._head_since
        return since is not None and now - since > self._limits.header_timeout

    def _end_late_head(self) -> None:
        if self._has_part():
            seconds = self._limits.header_timeout
            self._refuse(
                REQUEST_TIMEOUT,
                f"the head of the request was not complete after {seconds:g} seconds",
            )
        else:
            # A browser that connects in advance does not expect an answer.
            self.transport.close()

    def _is_body_late(self, now: float) -> bool:
        if self._body_of is not self.cycle:
            self._body_of = self.cycle
            self._body_pace.rest()
        # While the server does not read, the client cannot send.
        if self._parser.their_state is not h11.SEND_BODY or self.flow.read_paused:
            self._body_pace.rest()
            return False
        # The rest of a body that was answered early is not needed, however fast it
        # comes.
        rate = math.inf if self.cycle.response_complete else self._limits.min_rate
        return self._body_pace.is_too_slow(
            now=now, total=self._parser.num_received, rate=rate
        )

    def _takes_nothing(self, now: float) -> bool:
        waiting = self.transport.get_write_buffer_size()
        if not waiting:
            self._write_pace.rest()
            return False
        taken = self._parser.num_sent - waiting
        return self._write_pace.is_too_slow(
            now=now, total=taken, rate=self._limits.min_rate
        )

    # -- half-closed connections ---------------------------------------------------

    def _probe(self) -> None:
        """Find out whether the client has only closed its sending side or is gone. Both
        look alike until the server sends something; a host whose client is gone then
        answers with a reset. HTTP/1.0 has no interim answers, so its clients are
        assumed to be present.
        """
        has_interim = self.scope["http_version"] == "1.1"
        if has_interim and not self.cycle.response_started:
            going_on = h11.InformationalResponse(
                status_code=100, headers=[], reason="Continue"
            )
            self.transport.write(self._parser.send(going_on) or b"")
            self.loop.call_later(RESET_SECONDS, self._end_if_gone)

    def _end_if_gone(self) -> None:
        if self._has_gone():
            self.transport.abort()

    def _has_gone(self) -> bool:
        """Whether a half-closed connection was reset, which asyncio no longer
        watches.
        """
        if not self._is_half_closed:
            return False
        descriptor = self.transport.get_extra_info("socket").fileno()
        if descriptor < 0:
            return False
        poll = select.poll()
        poll.register(descriptor, 0)
        return any(
            events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)
        )

    # -- refusals ------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error unless an answer has begun, and close."""
        if self._parser.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is not None:
                # The application must not also answer.
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            body = msgspec.json.encode(BadRequest(message, status=status).body())
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            reason = STATUS_PHRASES[status]
            for event in (
                h11.Response(status_code=status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self._parser.send(event) or b"")
        self.transport.close()
