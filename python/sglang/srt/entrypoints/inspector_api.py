"""The inspector: a page at `/canary`, its modules, and a stream of the data it shows.

The page and its modules contain no data and need no key, unlike the data they show.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.access import require_admin
from sglang.srt.entrypoints.endpoint import EVENTS, HTML, TEXT, Endpoint
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import json_response
from sglang.srt.entrypoints.page_files import PageFiles
from sglang.srt.entrypoints.viewer_stream import Turns, ViewerStream
from sglang.srt.managers.front.caller import client_tag
from sglang.srt.managers.front.incident_board import IncidentBoard, Incidents
from sglang.srt.managers.front.snapshot_feed import (
    INTERVAL,
    End,
    Snapshot,
    SnapshotFeed,
    Source,
    Trouble,
)
from sglang.srt.managers.front.tokenizer_manager import ServerPhase
from sglang.srt.managers.messages.errors import BadRequest, NotFound, Unavailable
from sglang.srt.managers.messages.tier_snapshot import TierSnapshot
from sglang.srt.utils.quoting import quoted
from sglang.version import __version__

# Reading a record waits for the device, so it happens at most this often for all
# clients together.
RECORD_SECONDS = 0.05
MAX_WAITING = 16


class Hello(msgspec.Struct, kw_only=True, tag_field="type", tag="hello"):
    """The first event: facts that do not change. `interval` is the minimum seconds
    between two snapshots; `has_records` tells whether incidents are recorded for a
    replay.
    """

    version: str
    model: str
    kv_canary: str
    kv_canary_real_data: str
    kv_canary_sweep_interval: int
    speculative_algorithm: str | None
    has_records: bool
    page_size: int
    interval: float


class WriterShown(msgspec.Struct, kw_only=True):
    """Who last wrote or freed a slot; `forward` 0 means it was never used."""

    kind: str
    forward: int
    rid: str | None


class RecordShown(msgspec.Struct, kw_only=True):
    """A slot's record in one pool; `token` with --kv-canary-report-tokens."""

    pool: Literal["target", "draft"]
    group: Literal["full", "swa"]
    slot: int
    state: Literal["live", "freed", "torn", "never written"]
    token: int | None
    position: int | None
    lineage: str
    fingerprint: str
    writer: WriterShown


class SlotShown(msgspec.Struct, kw_only=True):
    """A slot and its records, which are empty without --kv-canary."""

    slot: int
    page: int
    records: list[RecordShown]


class InspectorApi:
    """Handlers of the inspector's endpoints."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._manager = front.manager
        self._files = PageFiles("inspector")
        self._incidents = IncidentBoard(self._manager.canary_incidents)
        source = Source(
            ask=lambda is_whole: self._manager.pool_snapshot(is_whole=is_whole),
            incidents=self._incidents,
            closed=self._why_closed,
            side_work=front.manager.side_work,
        )
        self._feed = SnapshotFeed(source)
        self._records = Turns(RECORD_SECONDS, max_waiting=MAX_WAITING)

    def routes(self) -> list[BaseRoute]:
        return [
            Endpoint(
                "/canary",
                self.page,
                methods=["GET"],
                summary="The inspector: the KV pool, its requests and incidents as a "
                "page",
                media_type=HTML,
                errors=(404,),
            ),
            Endpoint(
                "/canary/assets/{name}",
                self.asset,
                methods=["GET"],
                summary="A part of the inspector's page",
                media_type=TEXT,
                errors=(404,),
            ),
            Endpoint(
                "/canary/events",
                self.events,
                methods=["GET"],
                summary="Everything that the inspector shows, as it changes",
                event=Hello | Snapshot | Incidents | Trouble | End,
                is_named=True,
                errors=(403, 404, 503),
            ),
            Endpoint(
                "/canary/incidents/{name}",
                self.incident,
                methods=["GET"],
                summary="One incident of the KV canary, by its rank and number",
                answer=dict[str, Any],
                errors=(403, 404, 500, 503),
            ),
            Endpoint(
                "/canary/slot/{slot}",
                self.slot,
                methods=["GET"],
                summary="The KV canary's records of a slot",
                answer=SlotShown,
                errors=(400, 403, 404, 500, 503),
            ),
            Endpoint(
                "/canary/tiers",
                self.tiers,
                methods=["GET"],
                summary="KV in host memory and files, and between engines",
                answer=TierSnapshot,
                errors=(403, 404, 500, 503),
            ),
        ]

    async def tiers(self, request: Request) -> Response:
        self._check_on()
        require_admin(request)
        async with self._records:
            found = await self._manager.tiers()
        if found is None:
            raise NotFound("this server keeps KV on the device alone")
        for view in found.host:
            # The page draws them.
            view.cells = b""
        return json_response(found)

    async def page(self, request: Request) -> Response:
        self._check_on()
        return self._files.answer()

    async def asset(self, request: Request) -> Response:
        self._check_on()
        return self._files.answer(request.path_params["name"])

    async def events(self, request: Request) -> Response:
        self._check_on()
        args, manager = self._front.server_args, self._manager
        if manager.limits is None:
            raise Unavailable(f"the server is {manager.phase.value}")
        assert args.page_size is not None
        hello = Hello(
            version=__version__,
            model=self._front.model_name,
            kv_canary=args.kv_canary,
            kv_canary_real_data=args.kv_canary_real_data,
            kv_canary_sweep_interval=args.kv_canary_sweep_interval,
            speculative_algorithm=args.speculative_algorithm,
            has_records=bool(args.kv_canary_report_dir) and args.kv_canary_record != 0,
            page_size=args.page_size,
            interval=INTERVAL,
        )
        if request.method == "HEAD":
            return Response(media_type=EVENTS)
        viewer = self._feed.join(client_tag())
        return ViewerStream(viewer, msgspec.json.encode(hello))

    async def incident(self, request: Request) -> Response:
        self._check_on()
        require_admin(request)
        name = request.path_params["name"]
        found = await self._incidents.document(name)
        if found is None:
            raise NotFound(f"there is no incident {quoted(name)}, or not any more")
        return json_response(found)

    async def slot(self, request: Request) -> Response:
        self._check_on()
        require_admin(request)
        args = self._front.server_args
        slot, page_size = self._requested_slot(request), args.page_size
        assert page_size is not None
        found: list[dict[str, Any]] = []
        if args.kv_canary != "none":
            async with self._records:
                found = await self._manager.slot_records(slot)
        return json_response(
            SlotShown(
                slot=slot,
                page=slot // page_size,
                records=msgspec.convert(found, list[RecordShown]),
            )
        )

    def _requested_slot(self, request: Request) -> int:
        limits, page_size = self._manager.limits, self._front.server_args.page_size
        if limits is None:
            raise Unavailable(f"the server is {self._manager.phase.value}")
        assert page_size is not None
        last = limits.max_total_num_tokens + page_size - 1
        given = request.path_params["slot"]
        # `isdigit` also accepts digits of other scripts.
        is_number = given.isascii() and given.isdigit() and len(given) <= len(str(last))
        if not is_number or not page_size <= int(given) <= last:
            raise BadRequest(
                f"slot {quoted(given)}: this pool has the slots {page_size} to {last}",
                param="slot",
            )
        return int(given)

    def _check_on(self) -> None:
        if self._front.server_args.disable_canary_page:
            raise NotFound("the server was started with --disable-canary-page")

    def _why_closed(self) -> str | None:
        phase = self._manager.phase
        is_over = phase in (ServerPhase.DRAINING, ServerPhase.DEAD)
        return f"the server is {phase.value}" if is_over else None
