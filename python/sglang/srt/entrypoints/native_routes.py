"""SGLang's own routes: generate, health, info, cache, abort, metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.arg_groups.kv_events_hook import describe_kv_events
from sglang.srt.entrypoints.access import request_owner, require_admin
from sglang.srt.entrypoints.answers import (
    Generated,
    HealthShown,
    IncidentList,
    ModelInfo,
    VersionShown,
)
from sglang.srt.entrypoints.endpoint import (
    CHANGING_ERRORS,
    ENGINE_ERRORS,
    TEXT,
    Endpoint,
)
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.generate_api import (
    GenerateAnswer,
    GenerateRequest,
    ParsedGenerate,
    parse_generate,
)
from sglang.srt.entrypoints.http_io import (
    answer_size,
    aside,
    event,
    json_response,
    read_body,
    whole_results,
)
from sglang.srt.managers.front.health_probe import HealthProbe
from sglang.srt.managers.front.request_state import RequestGroup
from sglang.srt.managers.front.tokenizer_manager import ServerPhase
from sglang.srt.managers.messages.errors import (
    ApiError,
    BadRequest,
    NotFound,
    Unavailable,
)
from sglang.srt.metrics.front_metrics import CONTENT_TYPE
from sglang.version import __version__

SCRAPE_TIMEOUT_SECONDS = 1.0
# The seed predicts the samples of every request without its own seed.
SECRET_FIELDS = frozenset({"api_key", "api_key_file", "admin_api_key", "random_seed"})
GENERATE_EXAMPLES = {
    "text": {
        "text": "The capital of France is",
        "sampling_params": {"max_new_tokens": 16, "temperature": 0},
    },
    "token ids": {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}},
    "logprobs": {
        "text": ["Once", "Twice"],
        "sampling_params": {"max_new_tokens": 4, "stop": ["."]},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "stream": True,
    },
}


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/abort_request`."""

    rid: str | None = None
    abort_all: bool = False


class NativeRoutes:
    """Handlers of SGLang's own routes."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._manager = front.manager
        self._health = HealthProbe(front.manager)

    def routes(self) -> list[BaseRoute]:
        return [
            Endpoint(
                "/generate",
                self.generate,
                methods=["POST", "PUT"],
                summary="Generate from a text, token ids or embeddings; a list of them "
                "makes a list of answers",
                body=GenerateRequest,
                answer=Generated | list[Generated],
                event=Generated,
                errors=ENGINE_ERRORS,
                examples=GENERATE_EXAMPLES,
            ),
            *(
                Endpoint(
                    path,
                    self.health,
                    methods=["GET"],
                    summary="200 while requests are accepted and the scheduler lives",
                    errors=(503,),
                )
                for path in ("/health", "/readyz", "/ping")
            ),
            Endpoint(
                "/livez",
                self.live,
                methods=["GET"],
                summary="200 unless only a restart helps",
                errors=(503,),
            ),
            Endpoint(
                "/health_generate",
                self.health_generate,
                methods=["GET"],
                summary="200 where the engine has just shown that it works",
                answer=HealthShown,
                errors=(500, 503),
            ),
            Endpoint(
                "/version",
                self.version,
                methods=["GET"],
                summary="The version of the server",
                answer=VersionShown,
            ),
            *self._info_routes(),
            Endpoint(
                "/abort_request",
                self.abort_request,
                methods=["POST"],
                summary="End a request of one's own, or all",
                body=AbortRequest,
                errors=CHANGING_ERRORS,
                examples={"one": {"rid": "my-request"}},
            ),
            Endpoint(
                "/metrics",
                self.metrics,
                methods=["GET"],
                summary="Prometheus metrics, with --enable-metrics",
                media_type=TEXT,
                errors=(404,),
            ),
            Endpoint(
                "/canary/incidents",
                self.canary_incidents,
                methods=["GET"],
                summary="Incidents of the KV canary, with --kv-canary",
                answer=IncidentList,
                errors=(403, 404, 500, 503),
            ),
        ]

    def _info_routes(self) -> list[BaseRoute]:
        """Facts about the model and the server, under new and old names."""
        routes: list[BaseRoute] = []
        for prefix in ("/", "/get_"):
            routes += [
                Endpoint(
                    f"{prefix}model_info",
                    self.model_info,
                    methods=["GET"],
                    summary="The model that is served",
                    answer=ModelInfo,
                ),
                Endpoint(
                    f"{prefix}server_info",
                    self.server_info,
                    methods=["GET"],
                    summary="Flags, limits and the scheduler's numbers",
                    answer=dict[str, Any],
                    errors=(500, 503),
                ),
            ]
        return routes

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def generate(self, request: Request) -> Response:
        body = await read_body(request, GenerateRequest)
        self._front.check_model(body.model)
        self._manager.check_sizes(body.text, field="text")
        self._manager.check_sizes(body.input_ids, field="input_ids")
        parsed = await aside(
            request,
            self._manager,
            parse_generate,
            body,
            sampling_defaults=self._manager.sampling_defaults,
            loras=self._manager.loras,
        )
        group = await self._manager.submit(parsed.prompts)
        if parsed.stream:
            events = self._events(group, parsed)
            return self._front.stream(events, group)
        updates = await whole_results(request, self._manager, group)

        def answer() -> Response:
            answers = [self._answer(parsed).add(update) for update in updates]
            return json_response(answers if parsed.is_list else answers[0])

        return await self._manager.side_work.run(answer_size(updates), answer)

    async def health(self, request: Request) -> Response:
        """Answer 200 while requests are accepted and the scheduler is alive."""
        if not self._front.is_ready:
            raise Unavailable(f"the server is {self._manager.phase.value}")
        self._manager.check_alive()
        return Response()

    async def live(self, request: Request) -> Response:
        """Answer 200 unless only a restart helps; starting and draining count as
        alive.
        """
        if self._manager.phase is ServerPhase.DEAD:
            raise Unavailable("the scheduler is dead")
        if self._manager.phase is not ServerPhase.STARTING:
            self._manager.check_alive()
        return Response()

    async def health_generate(self, request: Request) -> Response:
        """Answer 200 if the engine has just proved that it makes tokens; `degraded`
        means that the KV canary has to heal it.
        """
        health = await self._health.check()
        return json_response(
            {
                "status": "degraded" if health.is_degraded else "ok",
                "seconds_since_last_sign": round(health.age, 3),
            }
        )

    async def model_info(self, request: Request) -> Response:
        args, limits = self._front.server_args, self._manager.limits
        tokenizer = self._manager.tokenizer
        return json_response(
            {
                "model_path": args.model_path,
                "tokenizer_path": args.tokenizer_path,
                "served_model_name": self._front.model_name,
                "is_generation": True,
                "context_length": None if limits is None else limits.context_len,
                "vocab_size": None if limits is None else limits.vocab_size,
                "has_chat_template": tokenizer is not None
                and tokenizer.chat_template is not None,
            }
        )

    async def server_info(self, request: Request) -> Response:
        limits = self._manager.limits
        stats = await self._manager.scheduler_stats()
        return json_response(
            {
                **public_args(self._front),
                **({} if limits is None else dataclasses.asdict(limits)),
                "status": self._manager.phase.value,
                "version": __version__,
                "num_in_flight": self._manager.num_in_flight,
                "kv_events": describe_kv_events(self._front.server_args),
                "internal_states": [stats],
            }
        )

    async def abort_request(self, request: Request) -> Response:
        body = await read_body(request, AbortRequest)
        if not body.rid and not body.abort_all:
            raise BadRequest("set rid or abort_all", param="rid")
        if body.abort_all:
            require_admin(request)
        owner = None if body.abort_all else request_owner(request)
        self._manager.abort(body.rid or "", abort_all=body.abort_all, owner=owner)
        return Response()

    async def metrics(self, request: Request) -> Response:
        metrics = self._manager.metrics
        if metrics is None:
            raise NotFound("start the server with --enable-metrics")
        if self._front.is_ready:
            # Someone is watching: a silence is noticed even if nothing runs.
            self._manager.heartbeat.beat()
        try:
            stats = await self._manager.scheduler_stats(SCRAPE_TIMEOUT_SECONDS)
        except ApiError:
            # A scrape must not fail while the scheduler is loading or busy: series must
            # not come and go.
            stats = None
        text = metrics.render(stats, silence=self._manager.heartbeat.silence)
        return Response(text, media_type=CONTENT_TYPE)

    async def canary_incidents(self, request: Request) -> Response:
        """Return the KV canary's incidents, or 404 while it is off."""
        mode = self._front.server_args.kv_canary
        if mode == "none":
            raise NotFound("start the server with --kv-canary log, raise or heal")
        incidents = await self._manager.canary_incidents()
        return json_response({"mode": mode, "incidents": incidents})

    def _answer(self, parsed: ParsedGenerate) -> GenerateAnswer:
        return GenerateAnswer(
            self._manager.tokenizer,
            with_text=parsed.with_text,
            is_incremental=parsed.stream
            and self._front.server_args.incremental_streaming_output,
        )

    async def _events(
        self, group: RequestGroup, parsed: ParsedGenerate
    ) -> AsyncIterator[bytes]:
        answers = [self._answer(parsed) for _ in group.states]
        async for news in self._manager.updates(group):
            chunks = []
            for update in news:
                content = answers[update.index].add(update)
                if parsed.is_list:
                    content["index"] = update.index
                chunks.append(event(content))
            yield b"".join(chunks)


def public_args(front: Front) -> dict[str, Any]:
    """Return the server's flags without secrets."""
    values = dataclasses.asdict(front.server_args)
    return {key: value for key, value in values.items() if key not in SECRET_FIELDS}
