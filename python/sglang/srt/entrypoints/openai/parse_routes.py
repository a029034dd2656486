"""Routes that parse a text like an output: tool calls, reasoning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sglang.srt.entrypoints.endpoint import ENGINE_ERRORS, Endpoint
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_io import json_response, read_body
from sglang.srt.entrypoints.openai.tools import read_tools
from sglang.srt.function_call.function_call_parser import DETECTORS as CALL_DETECTORS
from sglang.srt.function_call.function_call_parser import Call
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.parser.reasoning_parser import DETECTORS as REASONING_DETECTORS
from sglang.srt.utils.quoting import quoted

MAX_TEXT_CHARS = 256 * 1024
CALL_EXAMPLES = {
    "one call": {
        "text": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "tool_call_parser": "hermes",
    }
}
REASONING_EXAMPLES = {
    "a thought": {"text": "<think>Hm.</think>Yes.", "reasoning_parser": "qwen3"}
}


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


class ParsedCall(msgspec.Struct, kw_only=True):
    """A call in a text; `parameters` are JSON."""

    tool_index: int
    name: str
    parameters: str


class ParseFunctionCallAnswer(msgspec.Struct, kw_only=True):
    normal_text: str
    calls: list[ParsedCall]


class SeparateReasoningAnswer(msgspec.Struct, kw_only=True):
    reasoning_text: str
    text: str


class ParseRoutes:
    """Handlers of the two routes."""

    def __init__(self, front: Front) -> None:
        self._args = front.server_args
        self._manager = front.manager

    def routes(self) -> list[BaseRoute]:
        return [
            Endpoint(
                "/parse_function_call",
                self.parse_function_call,
                methods=["POST"],
                summary="The tool calls in a text, by a format of outputs",
                body=ParseFunctionCallRequest,
                answer=ParseFunctionCallAnswer,
                errors=ENGINE_ERRORS,
                examples=CALL_EXAMPLES,
            ),
            Endpoint(
                "/separate_reasoning",
                self.separate_reasoning,
                methods=["POST"],
                summary="The reasoning in a text, by a format of outputs",
                body=SeparateReasoningRequest,
                answer=SeparateReasoningAnswer,
                errors=ENGINE_ERRORS,
                examples=REASONING_EXAMPLES,
            ),
        ]

    async def parse_function_call(self, request: Request) -> Response:
        body = await read_body(request, ParseFunctionCallRequest)
        name = body.tool_call_parser or self._args.tool_call_parser
        parser = _named_parser(body.text, CALL_DETECTORS, tool_call_parser=name)
        tools = read_tools(body.tools or ())
        raw = await self._manager.side_work.call(
            "parse_calls", field="text", text=body.text, parser=parser, tools=tools
        )
        text, calls = msgspec.json.decode(raw, type=tuple[str, list[Call]])
        found = [
            ParsedCall(tool_index=i, name=call.name, parameters=call.arguments)
            for i, call in enumerate(calls)
        ]
        return json_response(ParseFunctionCallAnswer(normal_text=text, calls=found))

    async def separate_reasoning(self, request: Request) -> Response:
        body = await read_body(request, SeparateReasoningRequest)
        name = body.reasoning_parser or self._args.reasoning_parser
        parser = _named_parser(body.text, REASONING_DETECTORS, reasoning_parser=name)
        raw = await self._manager.side_work.call(
            "split_reasoning", field="text", text=body.text, parser=parser
        )
        reasoning, text = msgspec.json.decode(raw, type=tuple[str, str])
        answer = SeparateReasoningAnswer(reasoning_text=reasoning, text=text)
        return json_response(answer)


def _named_parser(text: str, known: Iterable[str], **given: str | None) -> str:
    """Return the parser named by the field in `given`; checks it and `text`."""
    ((field, name),) = given.items()
    if name is None or name not in known:
        found = "missing" if name is None else quoted(name)
        raise BadRequest(
            f"{field} is {found}; supported: {', '.join(known)}", param=field
        )
    if len(text) > MAX_TEXT_CHARS:
        raise BadRequest(
            f"text has {len(text)} characters, but at most {MAX_TEXT_CHARS} are "
            "accepted",
            param="text",
        )
    return name
