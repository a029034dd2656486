"""Reports how busy the server is, in the shapes that SGLang's routers poll."""

from __future__ import annotations

import time
from datetime import datetime, timezone

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.endpoint import Endpoint
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import json_response
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.managers.messages.io_struct import SchedulerStats
from sglang.version import __version__

# The rank of the only replica.
DP_RANK = 0
# SGLang's sections; sections without a field in `Load` are empty here.
SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")


class SpeculativeLoad(msgspec.Struct, kw_only=True):
    accept_length: float


class QueueLoad(msgspec.Struct, kw_only=True):
    waiting: int
    retracted: int


class Load(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Load of one replica. `utilization` is the used share of the places in the
    batch.
    """

    dp_rank: int
    timestamp: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_total_reqs: int
    num_used_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    max_running_requests: int
    speculative: SpeculativeLoad | None = None
    queues: QueueLoad | None = None


class AggregateLoad(msgspec.Struct, kw_only=True):
    """Sums and means over the replicas."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_throughput: float
    avg_utilization: float


class LoadReport(msgspec.Struct, kw_only=True):
    """The answer of `/v1/loads`."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[Load]
    aggregate: AggregateLoad


class OldLoad(msgspec.Struct, kw_only=True):
    """The answer of `/get_load` is a list of these, one per replica."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    ts_tic: float


class LoadsApi:
    """Handlers of the load endpoints."""

    def __init__(self, front: Front) -> None:
        self._manager = front.manager

    def routes(self) -> list[BaseRoute]:
        query = {
            "include": f"Sections, separated by commas: {', '.join(SECTIONS)}",
            "dp_rank": "Only this replica; there is one, of rank 0",
        }
        return [
            *(
                Endpoint(
                    path,
                    self.loads,
                    methods=["GET"],
                    summary="Running and waiting requests, tokens, throughput",
                    answer=LoadReport,
                    query=query,
                    errors=(400, 500, 503),
                )
                for path in ("/v1/loads", "/get_loads")
            ),
            Endpoint(
                "/get_load",
                self.old_load,
                methods=["GET"],
                summary="Requests and tokens, as older routers ask for them",
                answer=list[OldLoad],
                errors=(500, 503),
            ),
        ]

    async def loads(self, request: Request) -> Response:
        sections = set(request.query_params.get("include", "all").split(","))
        unknown = sorted(sections - set(SECTIONS))
        if unknown:
            raise BadRequest(
                f"include names {unknown[0][:40]!r}; known: {', '.join(SECTIONS)}",
                param="include",
            )
        rank = request.query_params.get("dp_rank", str(DP_RANK))
        if rank != str(DP_RANK):
            raise BadRequest(
                f"dp_rank is {rank[:40]!r}, but the only replica has rank {DP_RANK}",
                param="dp_rank",
            )
        if request.query_params.get("format", "json") != "json":
            raise BadRequest("format must be json; see also /metrics", param="format")
        stats = await self._manager.scheduler_stats()
        load = self._load(stats)
        if sections & {"spec", "all"} and stats.spec_accept_length:
            load.speculative = SpeculativeLoad(accept_length=stats.spec_accept_length)
        if sections & {"queues", "all"}:
            load.queues = QueueLoad(
                waiting=stats.num_queue_reqs, retracted=stats.num_retracted_reqs
            )
        return json_response(_report(load))

    async def old_load(self, request: Request) -> Response:
        stats = await self._manager.scheduler_stats()
        load = OldLoad(
            dp_rank=DP_RANK,
            num_reqs=stats.num_running_reqs + stats.num_queue_reqs,
            num_waiting_reqs=stats.num_queue_reqs,
            num_tokens=stats.num_used_tokens + stats.num_queue_tokens,
            ts_tic=time.monotonic(),
        )
        return json_response([load])

    def _load(self, stats: SchedulerStats) -> Load:
        # A scheduler that reports its statistics has reported its limits.
        assert self._manager.limits is not None
        most = self._manager.limits.max_running_requests
        return Load(
            dp_rank=DP_RANK,
            timestamp=time.time(),
            num_running_reqs=stats.num_running_reqs,
            num_waiting_reqs=stats.num_queue_reqs,
            num_waiting_uncached_tokens=stats.num_queue_tokens,
            num_total_reqs=stats.num_running_reqs + stats.num_queue_reqs,
            num_used_tokens=stats.num_used_tokens,
            num_total_tokens=stats.num_used_tokens + stats.num_queue_tokens,
            max_total_num_tokens=stats.max_total_num_tokens,
            token_usage=stats.token_usage,
            gen_throughput=stats.gen_throughput,
            cache_hit_rate=stats.cache_hit_rate,
            utilization=stats.num_running_reqs / most,
            max_running_requests=most,
        )


def _report(load: Load) -> LoadReport:
    return LoadReport(
        timestamp=datetime.now(timezone.utc).isoformat(),
        version=__version__,
        dp_rank_count=1,
        loads=[load],
        aggregate=AggregateLoad(
            total_running_reqs=load.num_running_reqs,
            total_waiting_reqs=load.num_waiting_reqs,
            total_reqs=load.num_total_reqs,
            avg_token_usage=load.token_usage,
            avg_throughput=load.gen_throughput,
            avg_utilization=load.utilization,
        ),
    )
