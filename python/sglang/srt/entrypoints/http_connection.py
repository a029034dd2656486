"""One HTTP connection: strict framing, and a deadline for everything a client owes.

uvicorn's protocol does the rest. Knows nothing of the application, nor of how
connections are accepted.
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
# Longer than the answer of a host nearby that a connection does not exist any more;
# distant ones are found by the next `enforce`.
RESET_SECONDS = 0.05
# While the server is full, a connection that has rested for so long may be closed, and
# one whose head, or first byte, has been due for so long. A client that sends at once
# needs no more, however far away: its first bytes follow the handshake.
REST_SECONDS = 1.0
HEAD_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one connection.

    Fields:
        header_timeout: seconds for the head of a request, and for the first byte.
        body_timeout, write_timeout: seconds over which the rate of a body, or of an
            answer that the client has to take, is measured.
        min_rate: bytes per second.
        max_header_bytes: size of the head.
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
        """Seconds of the shortest deadline that `HttpConnection.enforce` keeps."""
        return min(self.header_timeout, self.body_timeout, self.write_timeout)


class Pace:
    """Whether bytes keep coming: `rate` per second over every window of so long."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._since: float | None = None
        self._total = 0

    def rest(self) -> None:
        """Forget the window: nothing is owed now."""
        self._since = None

    def is_too_slow(self, *, now: float, total: int, rate: float) -> bool:
        """Look at `total` bytes, counted from anywhere."""
        if self._since is not None:
            if now - self._since < self._window:
                return False
            if total - self._total < rate * self._window:
                return True
        self._since, self._total = now, total
        return False


class HttpConnection(H11Protocol):
    """A connection whose client keeps its deadlines or is dropped.

    Args:
        on_lost: called once, when the connection has ended.
        place: of a connection beyond those that are admitted, until it has one.
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
        """Stay open for an answer that is due: the client may only have said that no
        further request follows."""
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
        """Drop a client that has missed a deadline; to be called every now and then."""
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
        """From when on it may be closed to make room, on the clock of the loop; inf
        while a request is under way."""
        if self._head_since is not None:
            return self._head_since + HEAD_SECONDS
        is_resting = self._parser.their_state is h11.IDLE and not self._has_part()
        return self._rests_since + REST_SECONDS if is_resting else math.inf

    def make_room(self) -> None:
        """Close; a client whose head is incomplete is told why."""
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
        """Whether a whole request waits for its answer."""
        cycle = self.cycle
        return not (cycle is None or cycle.more_body or cycle.response_complete)

    def _has_part(self) -> bool:
        """Whether bytes of an incomplete head have come."""
        return bool(self._parser.trailing_data[0])

    def _note_head(self) -> None:
        """Start the clock with the first byte of a head, stop it with the last."""
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
            # A browser that connects in advance expects no answer.
            self.transport.close()

    def _is_body_late(self, now: float) -> bool:
        if self._body_of is not self.cycle:
            self._body_of = self.cycle
            self._body_pace.rest()
        # While the server does not read, the client cannot send.
        if self._parser.their_state is not h11.SEND_BODY or self.flow.read_paused:
            self._body_pace.rest()
            return False
        # Nobody needs the rest of a body that was answered early, however fast.
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
        """Find out whether the client has only ended its side or has gone: they look
        alike until the server sends something, and a host whose client has gone answers
        with a reset. HTTP/1.0 knows no interim answer: such a client counts as there.
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
        """Whether a half-closed connection was reset; asyncio has stopped watching."""
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
        """Answer as far as no answer has begun, and close."""
        if self._parser.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is not None:
                # The application must not answer, too.
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
