"""One question for all who look: its pace, frames, bounds, and its end."""

from __future__ import annotations

import array
import asyncio
import base64
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from inspector_world import incident
from manager_world import run

from sglang.srt.managers.front.incident_board import TURNS_BETWEEN, IncidentBoard
from sglang.srt.managers.front.side_work import SideWork
from sglang.srt.managers.front.snapshot_feed import (
    INTERVAL,
    KEPT_FRAMES,
    MAX_SHARE,
    MAX_VIEWERS,
    MAX_VIEWERS_OF_CLIENT,
    RETRY_SECONDS,
    SnapshotFeed,
    Source,
    Viewer,
)
from sglang.srt.managers.messages.errors import Unavailable
from sglang.srt.managers.messages.io_struct import GetSnapshotRsp, SchedulerStats
from sglang.srt.managers.messages.pool_snapshot import PageFrame, PoolSize, PoolSnapshot
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

NUM_PAGES = 50


def packed(values: list[int]) -> bytes:
    return array.array("i", values).tobytes()


def unpacked(text: str) -> list[int]:
    return list(array.array("i", zlib.decompress(base64.b64decode(text))))


class Scheduler:
    """A pool whose page `seq` changes at question `seq`, and the turns of a feed.

    Attributes:
        pauses: seconds that the feed wanted to wait, of all turns so far.
    """

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.seconds = 0.001
        self.error: Exception | None = None
        self.closed: str | None = None
        self.cells = [0] * NUM_PAGES
        self.stats = SchedulerStats()
        self.incidents: list[dict[str, Any]] = []
        self.num_incident_asks = 0
        self.pauses: list[float] = []
        self._turn = asyncio.Event()
        board = IncidentBoard(self._incidents)
        source = Source(
            ask=self._ask,
            closed=lambda: self.closed,
            incidents=board,
            side_work=SideWork(),
        )
        self.feed = SnapshotFeed(source, pause=self._pause)

    async def _incidents(self) -> list[dict[str, Any]]:
        self.num_incident_asks += 1
        return self.incidents

    async def _ask(self, is_whole: bool) -> GetSnapshotRsp:
        self.asked.append(is_whole)
        if self.error is not None:
            raise self.error
        seq = len(self.asked)
        at = seq % NUM_PAGES
        self.cells[at] = seq
        frames = [PageFrame(seq=seq, cells=packed(self.cells))]
        if seq > 1:
            changed = PageFrame(
                seq=seq, base=seq - 1, at=packed([at]), cells=packed([seq])
            )
            frames = [changed, *(frames if is_whole else ())]
        pool = PoolSize(num_pages=NUM_PAGES, page_size=1)
        snapshot = PoolSnapshot(seq=seq, pool=pool, frames=frames)
        snapshot.seconds = self.seconds
        return GetSnapshotRsp(call_id=0, snapshot=snapshot, stats=self.stats)

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await self._turn.wait()
        self._turn.clear()

    async def turn(self) -> None:
        """Let the feed take one more snapshot."""
        before = len(self.pauses)
        self.release()
        await settle(lambda: len(self.pauses) > before)

    def release(self) -> None:
        """End the pause that the feed makes, or will make next."""
        self._turn.set()


async def settle(holds: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("nothing happens")


class Page:
    """A page that applies what it reads, as the browser does."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer
        self.seq = -1
        self.cells: list[int] = []
        self.events: list[str] = []
        self.was_whole: list[bool] = []

    async def read(self) -> dict[str, Any]:
        name, data = await asyncio.wait_for(self.viewer.next(), 20)
        content: dict[str, Any] = msgspec.json.decode(data)
        assert content["type"] == name
        self.events.append(name)
        if name == "snapshot":
            self.was_whole.append(content["frames"][0]["base"] is None)
            for frame in content["frames"]:
                self.apply(frame)
            assert self.seq == content["seq"]
        return content

    def apply(self, frame: dict[str, Any]) -> None:
        cells = unpacked(frame["cells"])
        if frame["base"] is None:
            self.cells = cells
        else:
            assert frame["base"] == self.seq
            for at, cell in zip(unpacked(frame["at"]), cells, strict=True):
                self.cells[at] = cell
        self.seq = frame["seq"]

    async def read_snapshot(self) -> dict[str, Any]:
        while True:
            content = await self.read()
            if content["type"] == "snapshot":
                return content


def test_a_hundred_pages_cost_one_question_at_most_four_times_a_second() -> None:
    async def work() -> None:
        scheduler = Scheduler()
        pages = [Page(scheduler.feed.join(str(i))) for i in range(MAX_VIEWERS)]
        for turn in range(20):
            if turn:
                await scheduler.turn()
            await asyncio.gather(*(page.read_snapshot() for page in pages))
            assert all(page.cells == scheduler.cells for page in pages)
            assert len({page.seq for page in pages}) == 1
        assert len(scheduler.asked) == 20
        # The pages came before the first question; nobody needed all pages later.
        assert scheduler.asked == [True] + [False] * 19
        assert scheduler.pauses == [INTERVAL] * 20
        assert INTERVAL >= 0.25
        for page in pages:
            page.viewer.leave()

    run(work())


def test_one_client_does_not_keep_the_others_away() -> None:
    async def work() -> None:
        feed = Scheduler().feed
        viewers = [feed.join("greedy") for _ in range(MAX_VIEWERS_OF_CLIENT)]
        with pytest.raises(Unavailable, match="10 pages of this client"):
            feed.join("greedy")
        viewers.append(feed.join("operator"))
        viewers[0].leave()
        viewers[0] = feed.join("greedy")
        for viewer in viewers:
            viewer.leave()

    run(work())


def test_one_page_too_many_is_refused_until_another_leaves() -> None:
    async def work() -> None:
        feed = Scheduler().feed
        viewers = [feed.join(str(i)) for i in range(MAX_VIEWERS)]
        with pytest.raises(Unavailable, match=f"{MAX_VIEWERS} pages") as refused:
            feed.join("a")
        assert refused.value.headers["Retry-After"]
        viewers[7].leave()
        viewers[7] = feed.join("a")
        for viewer in viewers:
            viewer.leave()
        assert feed.num_viewers == 0

    run(work())


def test_nobody_is_asked_while_nobody_looks() -> None:
    async def work() -> None:
        scheduler, tasks = Scheduler(), len(asyncio.all_tasks())
        page = Page(scheduler.feed.join("a"))
        await page.read_snapshot()
        page.viewer.leave()
        asked = len(scheduler.asked)
        scheduler.release()
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(scheduler.asked) == asked == 1
        assert len(asyncio.all_tasks()) == tasks
        # A page that comes later gets all pages, and none of the old ones.
        late = Page(scheduler.feed.join("a"))
        await late.read_snapshot()
        assert late.cells == scheduler.cells and late.was_whole == [True]
        late.viewer.leave()

    run(work())


@pytest.mark.parametrize("missed", [1, KEPT_FRAMES, KEPT_FRAMES + 1, 3 * KEPT_FRAMES])
def test_a_slow_page_jumps_to_the_newest_snapshot(missed: int) -> None:
    async def work() -> None:
        scheduler = Scheduler()
        slow, quick = (Page(scheduler.feed.join("a")) for _ in range(2))
        await slow.read_snapshot()
        await quick.read_snapshot()
        for _ in range(missed):
            await scheduler.turn()
            await quick.read_snapshot()
        reading = asyncio.create_task(slow.read_snapshot())
        if missed > KEPT_FRAMES:
            # All pages come with the next snapshot.
            await asyncio.sleep(0)
            await scheduler.turn()
            assert scheduler.asked[-1]
        await reading
        assert slow.cells == scheduler.cells and slow.seq == len(scheduler.asked)
        assert slow.was_whole == [True, missed > KEPT_FRAMES]
        # Two events of many snapshots; the quick page read each of them.
        assert slow.events.count("snapshot") == 2
        assert not any(quick.was_whole[1:])
        for page in (slow, quick):
            page.viewer.leave()

    run(work())


def test_a_slow_snapshot_is_asked_for_less_often() -> None:
    async def work() -> None:
        scheduler = Scheduler()
        scheduler.seconds = 0.5
        page = Page(scheduler.feed.join("a"))
        await page.read_snapshot()
        assert scheduler.pauses == [0.5 / MAX_SHARE]
        page.viewer.leave()

    run(work())


def test_a_scheduler_that_does_not_answer_is_told_and_asked_again() -> None:
    async def work() -> None:
        scheduler = Scheduler()
        scheduler.error = Unavailable("it is busy")
        page = Page(scheduler.feed.join("a"))
        assert (await page.read())["type"] == "incidents"
        assert await page.read() == {"type": "trouble", "message": "it is busy"}
        assert scheduler.pauses == [RETRY_SECONDS]
        scheduler.error = None
        await scheduler.turn()
        await page.read_snapshot()
        assert page.cells == scheduler.cells
        page.viewer.leave()

    run(work())


def test_a_failure_of_the_front_is_logged_and_does_not_stop_the_feed(
    log: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        scheduler = Scheduler()
        scheduler.error = KeyError("secret")
        page = Page(scheduler.feed.join("a"))
        await page.read()
        told = await page.read()
        assert told["type"] == "trouble" and "secret" not in told["message"]
        assert "KeyError" in log.text and "error id" in told["message"]
        scheduler.error = None
        await scheduler.turn()
        await page.read_snapshot()
        page.viewer.leave()

    run(work())


def test_the_last_event_says_why_and_comes_after_the_last_incidents() -> None:
    async def work() -> None:
        scheduler = Scheduler()
        page = Page(scheduler.feed.join("a"))
        await page.read_snapshot()
        scheduler.closed = "the server is dead"
        scheduler.incidents = [incident(1)]
        scheduler.release()
        told = await page.read()
        assert [one["name"] for one in told["incidents"]] == ["0-1"]
        assert await page.read() == {"type": "end", "message": "the server is dead"}
        page.viewer.leave()

    run(work())


def test_incidents_are_asked_for_when_there_are_more_and_not_at_every_turn() -> None:
    async def work() -> None:
        scheduler = Scheduler()
        page = Page(scheduler.feed.join("a"))
        assert await page.read() == {"type": "incidents", "incidents": []}
        await page.read_snapshot()
        assert scheduler.num_incident_asks == 0
        for turn in range(3 * TURNS_BETWEEN):
            # A fault that goes on.
            scheduler.stats.kv_canary_violations_total = {"verify_freed": turn + 1}
            scheduler.incidents.append(incident(turn + 1))
            await scheduler.turn()
            await page.read_snapshot()
        assert scheduler.num_incident_asks == 3
        told = page.events.count("incidents")
        assert told == 1 + 3
        for _ in range(2 * TURNS_BETWEEN):
            await scheduler.turn()
            await page.read_snapshot()
        # One more for those after the third; then there is nothing new.
        assert scheduler.num_incident_asks == 4
        page.viewer.leave()

    run(work())


def test_the_list_is_newest_first_and_one_incident_is_found_by_name() -> None:
    async def work() -> None:
        board_scheduler = Scheduler()
        board_scheduler.incidents = [incident(1), incident(2, healing={}, rank=1)]
        board = IncidentBoard(board_scheduler._incidents)
        assert await board.document("1-2") == board_scheduler.incidents[1]
        assert await board.document("0-1") == board_scheduler.incidents[0]
        assert board_scheduler.num_incident_asks == 1
        assert await board.document("0-2") is None
        shown = board.event.incidents
        assert [one.name for one in shown] == ["1-2", "0-1"]
        assert [one.is_healed for one in shown] == [True, False]
        assert [one.num_violations for one in shown] == [4, 4]

    run(work())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
