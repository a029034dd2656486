"""Routes that parse a text as an output would be: tool calls, reasoning."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import json_response, read_body
from sglang.srt.entrypoints.openai.tools import read_tools
from sglang.srt.function_call.function_call_parser import DETECTORS as CALL_DETECTORS
from sglang.srt.function_call.function_call_parser import parse_calls
from sglang.srt.managers.errors import BadRequest
from sglang.srt.parser.reasoning_parser import DETECTORS as REASONING_DETECTORS
from sglang.srt.parser.reasoning_parser import split_reasoning
from sglang.srt.utils.quoting import quoted

MAX_TEXT_CHARS = 256 * 1024


class ParseFunctionCallRequest(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True
):
    """The body of `/parse_function_call`; without a parser, the server's own."""

    text: str
    tools: list[dict[str, Any]] | None = None
    tool_call_parser: str | None = None


class SeparateReasoningRequest(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True
):
    """The body of `/separate_reasoning`; without a parser, the server's own."""

    text: str
    reasoning_parser: str | None = None


class ParseRoutes:
    """Handlers of the two routes."""

    def __init__(self, front: Front) -> None:
        self._args = front.server_args

    def routes(self) -> list[Route]:
        return [
            Route("/parse_function_call", self.parse_function_call, methods=["POST"]),
            Route("/separate_reasoning", self.separate_reasoning, methods=["POST"]),
        ]

    async def parse_function_call(self, request: Request) -> Response:
        body = await read_body(request, ParseFunctionCallRequest)
        parser = _parser(
            "tool_call_parser",
            body.tool_call_parser or self._args.tool_call_parser,
            CALL_DETECTORS,
        )
        tools = read_tools(body.tools or ())
        _check_length(body.text)
        text, calls = await asyncio.to_thread(
            parse_calls, body.text, parser=parser, tools=tools
        )
        found = [
            {"tool_index": i, "name": call.name, "parameters": call.arguments}
            for i, call in enumerate(calls)
        ]
        return json_response({"normal_text": text, "calls": found})

    async def separate_reasoning(self, request: Request) -> Response:
        body = await read_body(request, SeparateReasoningRequest)
        parser = _parser(
            "reasoning_parser",
            body.reasoning_parser or self._args.reasoning_parser,
            REASONING_DETECTORS,
        )
        _check_length(body.text)
        reasoning, text = await asyncio.to_thread(
            split_reasoning, body.text, parser=parser
        )
        return json_response({"reasoning_text": reasoning, "text": text})


def _parser(field: str, name: str | None, known: Iterable[str]) -> str:
    if name is None or name not in known:
        given = "missing" if name is None else quoted(name)
        raise BadRequest(
            f"{field} is {given}; supported: {', '.join(known)}", param=field
        )
    return name


def _check_length(text: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise BadRequest(
            f"text has {len(text)} characters, but at most {MAX_TEXT_CHARS} are "
            "accepted",
            param="text",
        )
