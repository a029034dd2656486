"""Publishes batches of KV events from a thread, so the scheduler never waits for
subscribers.

```
scheduler --append--> EventLog --thread--> PUB socket     (live)
                              '--thread--> ROUTER socket  (replay)
```
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from sglang.srt.arg_groups.kv_events_hook import FLAG
from sglang.srt.kv_events.connection_guard import ConnectionGuard
from sglang.srt.kv_events.endpoints import attach
from sglang.srt.kv_events.event_log import EventLog
from sglang.srt.kv_events.messages import KVEventBatch, seq_frame
from sglang.srt.kv_events.replay_service import CLIENT_HWM, ReplayService

if TYPE_CHECKING:
    from sglang.srt.arg_groups.kv_events_hook import KVEventsConfig
    from sglang.srt.kv_events.block_recorder import KVEvent

logger = logging.getLogger(__name__)

# How soon a peer that vanished without closing its connection is noticed.
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000
# Maximum size of a subscription or a replay request.
MAX_REQUEST_BYTES = 65536
# How long closing waits for unsent messages.
LINGER_MS = 500
JOIN_SECONDS = 3.0
# A wake-up call, and the final one.
WAKE, STOP = b"", b"stop"


class ZmqEventPublisher:
    """A PUB socket, a ROUTER socket for replays, and the thread that owns them.

    `publish` never waits. Batches that the thread cannot send in time are skipped:
    their sequence numbers are missing, and they can be replayed. A slow subscriber also
    misses batches, which are not counted.

    Args:
        config: an enabled configuration.

    Raises:
        ValueError: an endpoint is in use or cannot be bound; nothing is left open.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._max_queue_size = config.max_queue_size
        has_replay = config.replay_endpoint is not None
        self._log = EventLog(
            max(config.max_queue_size, config.buffer_steps if has_replay else 0)
        )
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        try:
            self._open(config)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._next = 0
        # Number of events in batches before the next one, and how many of them were
        # sent.
        self._num_done = 0
        self._num_published = 0
        self._num_dropped = 0
        self._is_awake = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, config: KVEventsConfig) -> None:
        self._guard = ConnectionGuard(self._context, config.allow)
        self._pub = self._socket(zmq.PUB, hwm=config.hwm)
        self._guard.watch(self._pub)
        attach(self._pub, config.endpoint, key="endpoint", may_connect=True)
        self._replays: ReplayService | None = None
        if config.replay_endpoint is not None:
            router = self._socket(zmq.ROUTER, hwm=CLIENT_HWM)
            self._guard.watch(router)
            attach(router, config.replay_endpoint, key="replay_endpoint")
            self._replays = ReplayService(
                router,
                self._log,
                topic=self._topic,
                buffer_steps=config.buffer_steps,
            )
        self._woken = self._socket(zmq.PAIR, hwm=0)
        self._woken.bind("inproc://wake")
        self._waker = self._socket(zmq.PAIR, hwm=0)
        self._waker.connect("inproc://wake")

    def _socket(self, kind: int, *, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, 1)
        socket.set_hwm(hwm)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        return socket

    # -- of the scheduler's thread -------------------------------------------------

    def publish(self, events: list[KVEvent]) -> None:
        """Publish the events of a step, at least one."""
        batch = KVEventBatch(ts=time.time(), events=events)
        self._log.append(self._encoder.encode(batch), num_events=len(events))
        self._wake()

    @property
    def num_published(self) -> int:
        """Number of events handed to the PUB socket."""
        return self._num_published

    @property
    def num_dropped(self) -> int:
        """Number of events not sent because the thread was late or has failed."""
        if self._has_failed:
            return self._log.num_events - self._num_published
        return self._num_dropped

    @property
    def num_replayed(self) -> int:
        """Number of events sent again."""
        return 0 if self._replays is None else self._replays.num_events

    @property
    def num_connections(self) -> int:
        """Number of open connections to both sockets."""
        return self._guard.num_connections

    def close(self) -> None:
        """Send what is left, end the thread and close the sockets. Further calls do
        nothing.
        """
        if self._waker.closed:
            return
        # The thread ends the context only after it has read this, and waits for this
        # socket only then.
        with contextlib.suppress(zmq.Again):
            self._waker.send(STOP, zmq.NOBLOCK)
        self._waker.close(linger=LINGER_MS)
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s: ZeroMQ did not shut down in time; giving up", FLAG)

    def _wake(self) -> None:
        """Make the thread look at the log, unless it is about to."""
        # Fullness of the pipe could not tell: ZeroMQ notices late that it was emptied.
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(zmq.Again):
                self._waker.send(WAKE, zmq.NOBLOCK)

    # -- of the publisher's thread -------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            self._has_failed = True
            logger.exception(
                "%s: the publisher failed; no KV events are published any more", FLAG
            )
        finally:
            self._pub.close(linger=LINGER_MS)
            self._woken.close(linger=0)
            if self._replays is not None:
                self._replays.socket.close(linger=0)
            self._guard.close()
        if not self._has_failed:
            self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for socket in (self._woken, *self._guard.sockets):
            poller.register(socket, zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays.socket, zmq.POLLIN)
        while True:
            poller.poll(None if self._replays is None else self._replays.wait_ms)
            self._guard.turn()
            is_last = self._take_calls()
            # Anything appended after this wakes the thread again.
            self._is_awake = False
            self._send_new()
            if is_last:
                return
            if self._replays is not None:
                self._replays.turn()

    def _take_calls(self) -> bool:
        """Take all wake-up calls; returns whether it is time to stop."""
        is_last = False
        with contextlib.suppress(zmq.Again):
            while True:
                is_last |= self._woken.recv(zmq.NOBLOCK) == STOP
        return is_last

    def _send_new(self) -> None:
        while self._next < (end := self._log.end):
            self._next = max(self._next, end - self._max_queue_size)
            batch = self._log.get(self._next)
            if batch is None:
                # Overwritten meanwhile, because the end has moved on.
                continue
            self._num_dropped += batch.events_before - self._num_done
            self._pub.send_multipart([self._topic, seq_frame(batch.seq), batch.payload])
            self._num_published += batch.num_events
            self._num_done = batch.events_before + batch.num_events
            self._next += 1
