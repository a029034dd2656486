"""Sends logged batches again to clients that ask for them on a ROUTER socket.

Request (of a DEALER or REQ): `[(empty,) first sequence number]`. Answer: messages
`[empty, topic, sequence number, batch]`, then `[empty, empty, -1, empty]`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from sglang.srt.kv_events.messages import END_OF_REPLAY, SEQ_BYTES, seq_frame

if TYPE_CHECKING:
    from sglang.srt.kv_events.event_log import EventLog

logger = logging.getLogger(__name__)

# Batches per client and turn: live events go out between two turns.
TURN_BATCHES = 64
# Requests per turn.
TURN_REQUESTS = 64
# Maximum clients served at once; a further one replaces the oldest.
MAX_CLIENTS = 64
# A client that reads nothing for this long is dropped.
STALL_SECONDS = 30.0
# Maximum messages queued for one client; the rest waits in the log.
CLIENT_HWM = 256


@dataclass(slots=True)
class _Replay:
    """The batches [seq, end) that a client still gets before the end marker."""

    seq: int
    end: int
    last_progress: float


class ReplayService:
    """Serves batches to clients in turns, without waiting for any client.

    All methods belong to the thread of the socket.

    Args:
        socket: a bound ROUTER; its options are set here.
        topic: topic frame of each message.
        buffer_steps: number of batches before the log's end that are offered.

    Attributes:
        num_events: number of events sent so far.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        log: EventLog,
        *,
        topic: bytes,
        buffer_steps: int,
    ) -> None:
        # Raise an error for a client that is gone or full instead of dropping silently.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket = socket
        self._log = log
        self._topic = topic
        self._buffer_steps = buffer_steps
        self._replays: dict[bytes, _Replay] = {}
        self._is_blocked = False
        self.num_events = 0

    @property
    def wait_ms(self) -> int | None:
        """How long to wait for requests before the next turn, or None to wait until one
        comes.
        """
        if not self._replays:
            return None
        return 10 if self._is_blocked else 0

    def turn(self) -> None:
        """Take new requests, then send each client some batches."""
        for _ in range(TURN_REQUESTS):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._accept(frames)
        now = time.monotonic()
        self._is_blocked = bool(self._replays)
        for client, replay in list(self._replays.items()):
            try:
                is_done = self._send_some(client, replay, now)
            except zmq.Again:
                is_done = now - replay.last_progress > STALL_SECONDS
            except zmq.ZMQError as error:
                logger.info("A client left its replay of KV events: %s", error)
                is_done = True
            if is_done:
                del self._replays[client]

    def _accept(self, frames: list[bytes]) -> None:
        client, *request = frames
        if not request or len(request[-1]) != SEQ_BYTES:
            logger.warning(
                "A replay request of KV events is not a sequence number of %d bytes: "
                "ignored",
                SEQ_BYTES,
            )
            return
        self._replays.pop(client, None)
        if len(self._replays) >= MAX_CLIENTS:
            self._replays.pop(next(iter(self._replays)))
            logger.warning("More than %d replays of KV events at once", MAX_CLIENTS)
        end = self._log.end
        first = max(int.from_bytes(request[-1], "big"), end - self._buffer_steps)
        self._replays[client] = _Replay(first, end, time.monotonic())

    def _send_some(self, client: bytes, replay: _Replay, now: float) -> bool:
        """Send at most `TURN_BATCHES`; returns whether that was the rest.

        Raises:
            zmq.Again: the client has to read first.
            zmq.ZMQError: it is gone.
        """
        for _ in range(TURN_BATCHES):
            if replay.seq >= replay.end:
                self._send(client, b"", END_OF_REPLAY, b"")
                return True
            batch = self._log.get(replay.seq)
            if batch is not None:
                self._send(client, self._topic, seq_frame(batch.seq), batch.payload)
                self.num_events += batch.num_events
            # Otherwise it was too slow, and sees that a batch is missing.
            replay.seq += 1
            replay.last_progress = now
            self._is_blocked = False
        return False

    def _send(self, client: bytes, *frames: bytes) -> None:
        self.socket.send_multipart([client, b"", *frames], zmq.NOBLOCK)
