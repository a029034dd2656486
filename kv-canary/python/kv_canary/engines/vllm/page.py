"""The entry point `vllm.endpoint_plugins`: `/kv_canary` on vLLM's own port.

| path | |
|---|---|
| `/kv_canary` | a page, without data |
| `/kv_canary/report` | JSON: what each rank checks, and its newest incidents |
| `/kv_canary/explain/RANK/NUMBER` | an incident for humans |

vLLM loads it only if `VLLM_PLUGINS` names `kv_canary`.
"""

from __future__ import annotations

import json
import os
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from kv_canary.engines.readers import Readers
from kv_canary.engines.settings import Mode, read_settings
from kv_canary.engines.vllm.worker_report import METHOD
from kv_canary.explain import explain
from kv_canary.runtime.host import HEALING_MODES

PATH = "/kv_canary"
TIMEOUT_SECONDS = 10.0
_FILES = {
    "": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class CanaryEndpoint:
    """Serves what the workers report. Without `KV_CANARY` it has no paths."""

    name = "kv_canary"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._readers = Readers(())

    def attach_router(self, app: FastAPI) -> None:
        if read_settings(modes=HEALING_MODES).mode is Mode.OFF:
            return
        for suffix, (name, kind) in _FILES.items():
            app.add_api_route(PATH + suffix, _file(name, kind), include_in_schema=False)
        app.add_api_route(PATH + "/report", self.report)
        app.add_api_route(PATH + "/explain/{rank}/{number}", self.explain)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        self._engine = engine_client
        # As vLLM reads them.
        given = getattr(args, "api_key", None) or os.environ.get("VLLM_API_KEY", "")
        self._readers = Readers([given] if isinstance(given, str) else list(given))

    async def report(self, request: Request) -> Response:
        refused, ranks = await self._ranks(request)
        return refused or JSONResponse({"ranks": ranks}, headers=_HEADERS)

    async def explain(self, request: Request, rank: int, number: int) -> Response:
        refused, ranks = await self._ranks(request)
        if refused is not None:
            return refused
        for of_rank in ranks:
            for incident in of_rank.get("incidents", ()):
                if of_rank["rank"] == rank and incident["number"] == number:
                    return PlainTextResponse(explain(incident), headers=_HEADERS)
        return _problem(404, f"rank {rank} does not keep an incident {number}")

    async def _ranks(
        self, request: Request
    ) -> tuple[Response | None, list[dict[str, Any]]]:
        """Return the workers' reports, or a refusal."""
        denial = self._readers.denial(
            peer=None if request.client is None else request.client.host,
            host=request.headers.get("host", ""),
            authorization=request.headers.get("authorization", ""),
        )
        if denial is not None:
            return _problem(*denial), []
        try:
            found = await self._engine.collective_rpc(METHOD, timeout=TIMEOUT_SECONDS)
        except Exception as error:
            # A step that was stopped has ended the engine; others of its errors differ.
            why = f"the workers do not answer: {type(error).__name__}: {error}"
            return _problem(503, f"{why}; KV_CANARY_REPORT_DIR keeps incidents"), []
        return None, [json.loads(document) for document in found]


def _file(name: str, kind: str) -> Any:
    content = (files(__package__) / "page_files" / name).read_text(encoding="utf-8")

    async def serve() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return serve


def _problem(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status_code=status, headers=_HEADERS)
