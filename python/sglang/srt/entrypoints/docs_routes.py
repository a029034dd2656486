"""`/openapi.json`, and `/docs`: the same schema as a page without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.endpoint import HTML, JSON, Endpoint
from sglang.srt.entrypoints.openapi import openapi_schema
from sglang.srt.entrypoints.openapi_page import STYLE, schema_page
from sglang.srt.entrypoints.page_headers import page_headers


class DocsRoutes:
    """Serves the schema of `routes` and of itself, built on first use."""

    def __init__(self, routes: Sequence[BaseRoute], *, needs_key: bool) -> None:
        self._routes = [*routes, *self.routes()]
        self._needs_key = needs_key

    def routes(self) -> list[BaseRoute]:
        return [
            Endpoint(
                "/openapi.json",
                self.schema,
                methods=["GET"],
                summary="This API as an OpenAPI 3.1 schema",
                answer=dict[str, Any],
            ),
            Endpoint(
                "/docs",
                self.page,
                methods=["GET"],
                summary="This API as a page",
                media_type=HTML,
            ),
        ]

    @cached_property
    def _schema(self) -> dict[str, Any]:
        return openapi_schema(self._routes, needs_key=self._needs_key)

    @cached_property
    def _json(self) -> bytes:
        return msgspec.json.encode(self._schema)

    @cached_property
    def _html(self) -> str:
        return schema_page(self._schema)

    async def schema(self, request: Request) -> Response:
        return Response(self._json, media_type=JSON)

    async def page(self, request: Request) -> Response:
        headers = page_headers(style=STYLE)
        return Response(self._html, media_type=HTML, headers=headers)
