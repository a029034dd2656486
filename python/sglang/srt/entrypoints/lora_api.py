"""SGLang's routes that load and unload adapters."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.endpoint import CHANGING_ERRORS, Endpoint
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import json_response, read_body
from sglang.srt.managers.messages.errors import BadRequest


class LoadLoraRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/load_lora_adapter`; `lora_path` is a folder of the server."""

    lora_name: str
    lora_path: str
    pinned: bool | None = False


class UnloadLoraRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/unload_lora_adapter`."""

    lora_name: str


class LoraAnswer(msgspec.Struct, kw_only=True):
    """All adapters by name, with their paths."""

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]


class LoraApi:
    """Handlers of these routes."""

    def __init__(self, front: Front) -> None:
        self._manager = front.manager

    def routes(self) -> list[BaseRoute]:
        errors: Any = (*CHANGING_ERRORS, 500, 503)
        return [
            Endpoint(
                "/load_lora_adapter",
                self.load,
                methods=["POST"],
                summary="Load an adapter under a name",
                body=LoadLoraRequest,
                answer=LoraAnswer,
                errors=errors,
            ),
            Endpoint(
                "/unload_lora_adapter",
                self.unload,
                methods=["POST"],
                summary="Unload an adapter once its requests have ended",
                body=UnloadLoraRequest,
                answer=LoraAnswer,
                errors=errors,
            ),
        ]

    async def load(self, request: Request) -> Response:
        body = await read_body(request, LoadLoraRequest)
        if body.pinned:
            raise BadRequest(
                "pinned is true; every adapter may leave the device while it is idle: "
                "raise --max-loras-per-batch instead",
                param="pinned",
            )
        await self._manager.load_lora(body.lora_name, body.lora_path)
        return self._answer()

    async def unload(self, request: Request) -> Response:
        body = await read_body(request, UnloadLoraRequest)
        await self._manager.unload_lora(body.lora_name)
        return self._answer()

    def _answer(self) -> Response:
        loaded = {ref.name: ref.path for ref in self._manager.loras.loaded}
        return json_response(
            LoraAnswer(success=True, error_message="", loaded_adapters=loaded)
        )
