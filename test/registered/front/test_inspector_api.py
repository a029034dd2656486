"""The inspector's endpoints: who may see what, its page, its stream, its slots."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

import httpx
import msgspec
import pytest
from inspector_world import incident
from manager_world import Wire, run
from web_world import Peer, Web, app_of, serving

from sglang.srt.entrypoints.inspector_api import (
    MAX_WAITING,
    Hello,
    SlotShown,
)
from sglang.srt.managers.front import snapshot_feed
from sglang.srt.managers.front.incident_board import Incidents
from sglang.srt.managers.front.snapshot_feed import End, Snapshot, Trouble
from sglang.srt.managers.messages.io_struct import (
    GetIncidentsReq,
    GetIncidentsRsp,
    GetSlotReq,
    GetSlotRsp,
    GetSnapshotReq,
    GetSnapshotRsp,
    GetTiersReq,
    GetTiersRsp,
    SchedulerStats,
)
from sglang.srt.managers.messages.pool_snapshot import PageFrame, PoolSize, PoolSnapshot
from sglang.srt.managers.messages.tier_snapshot import HostView, TierSnapshot
from sglang.srt.utils.paths import page_folders
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="cpu")

EVENTS = b"GET /canary/events HTTP/1.1\r\nHost: x\r\n"
DATA_PATHS = (
    "/canary/events",
    "/canary/slot/5",
    "/canary/tiers",
    "/canary/incidents/0-1",
)
KEY = "the-key"
RECORD = {
    "pool": "target",
    "group": "full",
    "slot": 5,
    "state": "live",
    "token": None,
    "position": 3,
    "lineage": "0x1",
    "fingerprint": "0x2",
    "writer": {"kind": "decode", "forward": 9, "rid": "r0"},
}


TIERS = TierSnapshot(
    unit_tokens=64,
    host=[
        HostView(
            group="full",
            unit_bytes=100,
            free=1,
            holding=0,
            loading=1,
            writing=0,
            cells=b"\0\2",
        )
    ],
)


async def play(wire: Wire) -> None:
    """Answer the inspector's questions as a scheduler."""
    seen = 0
    while True:
        for message in wire.sent[seen:]:
            seen += 1
            answer: Any = None
            if isinstance(message, GetSnapshotReq):
                snapshot = PoolSnapshot(
                    seq=seen,
                    pool=PoolSize(num_pages=2, page_size=1),
                    frames=[PageFrame(seq=seen, cells=bytes(8))],
                )
                stats = SchedulerStats()
                answer = GetSnapshotRsp(call_id=0, snapshot=snapshot, stats=stats)
            elif isinstance(message, GetSlotReq):
                answer = GetSlotRsp(call_id=0, records=[RECORD])
            elif isinstance(message, GetTiersReq):
                answer = GetTiersRsp(call_id=0, tiers=TIERS)
            elif isinstance(message, GetIncidentsReq):
                answer = GetIncidentsRsp(call_id=0, incidents=[incident(1)])
            if answer is not None:
                answer.call_id = message.call_id
                wire.manager.receive(answer)
        await asyncio.sleep(0.002)


@asynccontextmanager
async def client(wire: Wire, key: str | None = None) -> AsyncIterator[Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(app=app_of(wire))
    playing = asyncio.create_task(play(wire))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://x", headers=headers
    ) as made:
        yield made
    playing.cancel()


@asynccontextmanager
async def web(wire: Wire) -> AsyncIterator[Web]:
    playing = asyncio.create_task(play(wire))
    async with serving(app_of(wire)) as made:
        yield made
    playing.cancel()


async def open_stream(web: Web, key: str | None = None) -> Peer:
    """A page that has read the head of its answer."""
    peer = await web.open()
    line = b"" if key is None else b"X-Api-Key: %b\r\n" % key.encode()
    peer.send(EVENTS + line + b"\r\n")
    return peer


async def next_event(peer: Peer) -> dict[str, Any]:
    data = await peer.until(b"\n\n")
    content: dict[str, Any] = msgspec.json.decode(data.rpartition(b"data: ")[2])
    return content


def test_the_page_and_its_parts_need_no_key_and_hold_nothing() -> None:
    async def work() -> None:
        wire = Wire(api_key=KEY, served_model_name="private-name")
        async with client(wire) as http:
            page = await http.get("/canary")
            assert page.status_code == 200
            assert page.headers["content-type"].startswith("text/html")
            texts = [page.text]
            folders = page_folders("inspector")
            linked = set(re.findall(r'(?:src|href)="([^"]+)"', page.text))
            assert len(linked) >= 3
            for path in linked:
                part = await http.get("/" + path)
                assert part.status_code == 200, path
            for file in chain.from_iterable(f.iterdir() for f in folders):
                part = await http.get(f"/canary/assets/{file.name}")
                assert part.status_code == 200, file
                assert part.content == file.read_bytes()
                texts.append(part.text)
                policy = part.headers["content-security-policy"]
                assert policy.startswith("default-src 'self';")
                assert part.headers["x-content-type-options"] == "nosniff"
            # They come from this server alone, and know nothing of it.
            whole = "\n".join(texts)
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", whole)
            assert "private-name" not in whole and KEY not in whole
            assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=|\sstyle=", page.text)
        assert not wire.sent

    run(work())


@pytest.mark.parametrize(
    ("name", "status"),
    [("main.js", 200), ("none.js", 404), ("..%2F..%2Fpy.typed", 404), ("", 404)],
)
def test_parts_are_those_of_the_page_alone(name: str, status: int) -> None:
    async def work() -> None:
        async with client(Wire()) as http:
            answer = await http.get(f"/canary/assets/{name}")
            assert answer.status_code == status
            if status == 200:
                assert answer.headers["content-type"].startswith("text/javascript")

    run(work())


@pytest.mark.parametrize("path", DATA_PATHS)
@pytest.mark.parametrize(
    ("flags", "key", "status"),
    [
        ({"api_key": KEY}, None, 401),
        ({"api_key": KEY}, KEY + "x", 401),
        ({"api_key": KEY, "admin_api_key": "boss"}, KEY, 403),
        ({"admin_api_key": "boss"}, None, 403),
        ({"disable_canary_page": True}, None, 404),
    ],
)
def test_nothing_is_told_without_the_key(
    path: str, flags: dict[str, Any], key: str | None, status: int
) -> None:
    async def work() -> None:
        wire = Wire(kv_canary="log", **flags)
        async with client(wire, key) as http:
            answer = await http.get(path)
            assert answer.status_code == status
            assert set(answer.json()) == {"error"}
        assert not wire.sent

    run(work())


def test_the_switch_turns_the_page_off_and_leaves_the_incidents() -> None:
    async def work() -> None:
        wire = Wire(kv_canary="log", disable_canary_page=True)
        async with client(wire) as http:
            for path in ("/canary", "/canary/assets/main.js"):
                answer = await http.get(path)
                assert answer.status_code == 404
                assert "--disable-canary-page" in answer.json()["error"]["message"]
            assert (await http.get("/canary/incidents")).status_code == 200

    run(work())


@pytest.mark.parametrize(
    "slot", ["0", "1001", "-1", "x", "1.0", "", "99999999999999999999", "%D9%A3", "5_0"]
)
def test_slots_that_are_none_are_refused(slot: str) -> None:
    async def work() -> None:
        wire = Wire(kv_canary="log")
        async with client(wire) as http:
            answer = await http.get(f"/canary/slot/{slot}")
            assert answer.status_code == (400 if slot else 404)
            if slot:
                assert "1 to 1000" in answer.json()["error"]["message"]
        assert not wire.sent

    run(work())


def test_a_slot_has_its_records_where_they_are_kept() -> None:
    async def work() -> None:
        for canary, records in (("log", [RECORD]), ("none", [])):
            wire = Wire(kv_canary=canary)
            async with client(wire) as http:
                answer = await http.get("/canary/slot/5")
            msgspec.json.decode(answer.content, type=SlotShown)
            assert answer.json() == {"slot": 5, "page": 5, "records": records}
            assert bool(wire.sent) == (canary == "log")

    run(work())


def test_tiers_are_told_without_their_maps() -> None:
    async def work() -> None:
        async with client(Wire()) as http:
            answer = await http.get("/canary/tiers")
            assert answer.status_code == 200
            (host,) = answer.json()["host"]
            assert host["loading"] == 1
            assert "cells" not in host

    run(work())


def test_a_flood_of_slots_costs_itself() -> None:
    async def work() -> None:
        wire = Wire(kv_canary="log")
        async with client(wire) as http:
            answers = await asyncio.gather(
                *(http.get("/canary/slot/5") for _ in range(3 * MAX_WAITING))
            )
        statuses = [answer.status_code for answer in answers]
        # One that asks, and those that may wait for it.
        assert statuses.count(200) == 1 + MAX_WAITING
        refused = [answer for answer in answers if answer.status_code == 503]
        assert len(refused) == 2 * MAX_WAITING - 1
        assert all(answer.headers["retry-after"] for answer in refused)
        assert len(wire.sent) == 1 + MAX_WAITING

    run(work())


def test_one_incident_by_its_name() -> None:
    async def work() -> None:
        async with client(Wire(kv_canary="log")) as http:
            assert (await http.get("/canary/incidents/0-1")).json() == incident(1)
            for name in ("0-2", "x", "%2e%2e", "0-1%00"):
                answer = await http.get(f"/canary/incidents/{name}")
                assert answer.status_code == 404, name

    run(work())


def test_the_stream_greets_and_then_shows_snapshots() -> None:
    async def work() -> None:
        wire = Wire(api_key=KEY, kv_canary="heal")
        async with web(wire) as server:
            peer = await open_stream(server, KEY)
            head = await peer.until(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"text/event-stream" in head
            kinds = [Hello, Incidents, Snapshot, Snapshot]
            for kind in kinds:
                data = await peer.until(b"\n\n")
                name, _, text = data.strip().rpartition(b"\ndata: ")
                shown = msgspec.json.decode(text, type=kind)
                tag = shown.__struct_config__.tag
                assert name.endswith(f"event: {tag}".encode())
            peer.close()
            asked = [m for m in wire.sent if isinstance(m, GetSnapshotReq)]
            assert len(asked) >= 2

    run(work())


def test_pages_beyond_the_bound_get_a_503_until_one_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # `test_snapshot_feed.py` has as many as there may be.
    monkeypatch.setattr(snapshot_feed, "MAX_VIEWERS", 5)

    async def work() -> None:
        wire = Wire()
        async with web(wire) as server:
            pages = [await open_stream(server) for _ in range(5)]
            for page in pages:
                assert (await page.until(b"\r\n")).startswith(b"HTTP/1.1 200")
            refused = await server.ask(EVENTS + b"Connection: close\r\n\r\n")
            assert refused.startswith(b"HTTP/1.1 503")
            assert b"retry-after: " in refused.lower()
            # A server with so many pages serves others.
            assert await server.is_healthy()
            pages.pop().close()
            while True:
                page = await open_stream(server)
                if (await page.until(b"\r\n")).startswith(b"HTTP/1.1 200"):
                    pages.append(page)
                    break
                page.close()
            for page in pages:
                page.close()
            await settled(wire)

    run(work())


async def settled(wire: Wire) -> None:
    """Wait until the scheduler is not asked any more."""
    quiet, seen = 0, len(wire.sent)
    while quiet < 4:
        await asyncio.sleep(0.15)
        quiet = quiet + 1 if len(wire.sent) == seen else 0
        seen = len(wire.sent)


def test_a_stream_ends_when_the_server_drains() -> None:
    async def work() -> None:
        wire = Wire()
        async with web(wire) as server:
            peer = await open_stream(server)
            await peer.until(b"event: snapshot\n")
            wire.manager.set_draining()
            rest = await asyncio.wait_for(peer.reader.readuntil(b"0\r\n\r\n"), 15)
            last = rest.rpartition(b"data: ")[2].partition(b"\n")[0]
            assert msgspec.json.decode(last, type=End).message
            peer.close()

    run(work())


def test_a_head_request_does_not_become_a_page() -> None:
    async def work() -> None:
        wire = Wire()
        async with client(wire) as http:
            answer = await http.head("/canary/events")
            assert answer.status_code == 200 and not answer.content
        assert not wire.sent

    run(work())


def test_events_are_told_apart_by_their_type() -> None:
    kinds = (Hello, Snapshot, Incidents, Trouble, End)
    tags = {kind.__struct_config__.tag for kind in kinds}
    assert tags == {"hello", "snapshot", "incidents", "trouble", "end"}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
