"""Snapshots of the KV pool, fetched from the scheduler once for all viewers.

Asks only while there are viewers, and at most every `INTERVAL` seconds; slow snapshots
are requested less often. Knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from sglang.srt.managers.front.incident_board import IncidentBoard, Incidents
from sglang.srt.managers.messages.errors import ApiError, Unavailable, log_failure
from sglang.srt.managers.messages.io_struct import GetSnapshotRsp, SchedulerStats
from sglang.srt.managers.messages.pool_snapshot import PageFrame, PoolSize, RequestView
from sglang.srt.managers.messages.tier_snapshot import TierSnapshot

if TYPE_CHECKING:
    from sglang.srt.managers.front.side_work import SideWork

INTERVAL = 0.25
MAX_VIEWERS = 100
# Viewers of one client, so that no client keeps the operator away.
MAX_VIEWERS_OF_CLIENT = 10
# A snapshot takes at most this share of the scheduler's time.
MAX_SHARE = 0.05
# Pause after an unanswered question.
RETRY_SECONDS = 1.0
# A viewer that has missed more frames gets all pages.
KEPT_FRAMES = 8


class FrameShown(msgspec.Struct, kw_only=True):
    """A `PageFrame` with compressed arrays."""

    seq: int
    base: int | None
    at: bytes
    cells: bytes
    written: bytes


class Snapshot(msgspec.Struct, kw_only=True, tag_field="type", tag="snapshot"):
    """A `PoolSnapshot` for a page; arrays are little-endian int32, compressed and
    base64-encoded. `frames` lead step by step from the page's state to `seq`.
    """

    seq: int
    time: float
    pool: PoolSize
    frames: list[FrameShown]
    requests: list[RequestView]
    num_requests: int
    tree: bytes
    num_nodes: int
    tiers: TierSnapshot | None
    states: bytes
    forwards: int
    clocks: list[int]
    seconds: float
    stats: SchedulerStats


class Trouble(msgspec.Struct, kw_only=True, tag_field="type", tag="trouble"):
    """There is no snapshot now; one follows when available."""

    message: str


class End(msgspec.Struct, kw_only=True, tag_field="type", tag="end"):
    """The last event: the server shuts down."""

    message: str


Event = Snapshot | Trouble | End
NAMES: dict[type, str] = {
    Incidents: "incidents",
    Snapshot: "snapshot",
    Trouble: "trouble",
    End: "end",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of a feed's snapshots.

    Fields:
        ask: fetches a snapshot, with all pages if its argument is true.
        incidents: the incidents of the same server.
        closed: why there will be no more snapshots, or None if there will be.
    """

    ask: Callable[[bool], Awaitable[GetSnapshotRsp]]
    incidents: IncidentBoard
    closed: Callable[[], str | None]
    side_work: SideWork


class SnapshotFeed:
    """The feed of all viewers; use only on the asyncio loop's thread.

    Args:
        pause: waits for the given number of seconds between two questions.
    """

    def __init__(
        self,
        source: Source,
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._source = source
        self._pause = pause
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._latest: Event | None = None
        # Changes, each relative to the previous one, and all pages of the latest
        # snapshot.
        self._frames: deque[FrameShown] = deque(maxlen=KEPT_FRAMES)
        self._whole: FrameShown | None = None
        self._encoded: dict[int, bytes] = {}

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def join(self, client: str) -> Viewer:
        """Add a viewer, who must leave later.

        Args:
            client: the viewer's client.

        Raises:
            Unavailable: there are too many viewers.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise Unavailable(
                f"{MAX_VIEWERS} pages look at this server already; close one of them"
            )
        own = sum(viewer.client == client for viewer in self._viewers)
        if own >= MAX_VIEWERS_OF_CLIENT:
            raise Unavailable(
                f"{own} pages of this client look at this server already; close one of "
                "them"
            )
        viewer = Viewer(self, client)
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None
            self._forget()

    def _forget(self) -> None:
        """Drop everything while there are no viewers."""
        self._latest = self._whole = None
        self._frames.clear()
        self._encoded.clear()

    async def _run(self) -> None:
        while True:
            seconds = await self._turn()
            news, self._news = self._news, asyncio.Event()
            news.set()
            if isinstance(self._latest, End):
                return
            await self._pause(seconds)

    async def _turn(self) -> float:
        """Take one snapshot; returns the seconds until the next one is due."""
        closed = self._source.closed()
        if closed is not None:
            with suppress(ApiError):
                # A failed engine may have reported why.
                await self._source.incidents.refresh()
            self._latest = End(message=closed)
            return 0.0
        is_whole = any(viewer.is_waiting_for_all for viewer in self._viewers)
        try:
            answer = await self._source.ask(is_whole)
            await self._take(answer)
            await self._source.incidents.follow(answer.stats)
        except ApiError as error:
            self._latest = Trouble(message=error.message)
            return RETRY_SECONDS
        except Exception as error:
            failure = log_failure("the inspector has no snapshot", error=error)
            self._latest = Trouble(message=failure.message)
            return RETRY_SECONDS
        return max(INTERVAL, answer.snapshot.seconds / MAX_SHARE)

    async def _take(self, answer: GetSnapshotRsp) -> None:
        snapshot = answer.snapshot
        size = sum(len(f.cells) + len(f.at) + len(f.written) for f in snapshot.frames)
        frames = await self._source.side_work.run(
            size, lambda: [_shown(frame) for frame in snapshot.frames]
        )
        self._whole = None
        for frame in frames:
            if frame.base is None:
                self._whole = frame
                continue
            if self._frames and self._frames[-1].seq != frame.base:
                self._frames.clear()
            self._frames.append(frame)
        if len(frames) == 1 and self._whole is not None:
            self._frames.clear()
        self._encoded.clear()
        self._latest = Snapshot(
            seq=snapshot.seq,
            time=time.time(),
            pool=snapshot.pool,
            frames=[],
            requests=snapshot.requests,
            num_requests=snapshot.num_requests,
            tree=zlib.compress(snapshot.tree, 1),
            num_nodes=snapshot.num_nodes,
            tiers=None if snapshot.tiers is None else _shown_tiers(snapshot.tiers),
            states=zlib.compress(snapshot.states, 1),
            forwards=snapshot.forwards,
            clocks=snapshot.clocks,
            seconds=snapshot.seconds,
            stats=answer.stats,
        )

    def news(self) -> asyncio.Event:
        """Event that is set as soon as there is a newer latest event."""
        return self._news

    @property
    def latest(self) -> Event | None:
        return self._latest

    @property
    def incidents(self) -> Incidents:
        return self._source.incidents.event

    def steps_after(self, seq: int) -> list[FrameShown] | None:
        """Frames from `seq` (-1 for nothing) to the latest snapshot, or None if
        missing.
        """
        steps = [frame for frame in self._frames if frame.seq > seq]
        if steps and steps[0].base == seq:
            return steps
        return None if self._whole is None else [self._whole]

    def encoded(self, snapshot: Snapshot, steps: list[FrameShown]) -> bytes:
        """The latest snapshot with `steps`, as JSON; encoded once for all viewers."""
        key = -1 if steps[0].base is None else steps[0].base
        if key not in self._encoded:
            whole = msgspec.structs.replace(snapshot, frames=steps)
            self._encoded[key] = msgspec.json.encode(whole)
        return self._encoded[key]


class Viewer:
    """A viewer. A slow one gets only the newest snapshots."""

    def __init__(self, feed: SnapshotFeed, client: str) -> None:
        self.client = client
        self._feed = feed
        self._seq = -1
        self._seen: Event | None = None
        self._seen_incidents: Incidents | None = None
        self.is_waiting_for_all = True

    async def next(self) -> tuple[str, bytes]:
        """Wait for the next event; returns (name, JSON). "end" is the last event."""
        while True:
            news, latest = self._feed.news(), self._feed.latest
            incidents = self._feed.incidents
            if latest is not None and incidents is not self._seen_incidents:
                self._seen_incidents = incidents
                return NAMES[Incidents], msgspec.json.encode(incidents)
            if latest is not None and latest is not self._seen:
                data = self._encode_event(latest)
                if data is not None:
                    return NAMES[type(latest)], data
            await news.wait()

    def _encode_event(self, latest: Event) -> bytes | None:
        if not isinstance(latest, Snapshot):
            self._seen = latest
            return msgspec.json.encode(latest)
        steps = self._feed.steps_after(self._seq)
        if steps is None:
            self.is_waiting_for_all = True
            return None
        self._seen, self._seq = latest, latest.seq
        self.is_waiting_for_all = False
        return self._feed.encoded(latest, steps)

    def leave(self) -> None:
        self._feed.leave(self)


def _shown_tiers(tiers: TierSnapshot) -> TierSnapshot:
    for view in tiers.host:
        view.cells = zlib.compress(view.cells, 1)
    return tiers


def _shown(frame: PageFrame) -> FrameShown:
    return FrameShown(
        seq=frame.seq,
        base=frame.base,
        at=zlib.compress(frame.at, 1),
        cells=zlib.compress(frame.cells, 1),
        written=zlib.compress(frame.written, 1),
    )
