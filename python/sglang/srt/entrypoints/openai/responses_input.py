"""Converts requests of `/v1/responses` to the form of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sglang.srt.entrypoints.body_level import (
    REFUSAL,
    BodyLevel,
    entries,
    joined_texts,
    read_kind,
)
from sglang.srt.entrypoints.chat_turns import ChatTurns
from sglang.srt.entrypoints.neutral_fields import (
    ANY,
    EMPTY,
    NOTHING,
    OFF,
    UNSET,
    Neutral,
)
from sglang.srt.entrypoints.openai.common import ClientNames
from sglang.srt.entrypoints.openai.protocol import ChatRequest
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesRequest
from sglang.srt.managers.front.chat_messages import ROLES
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.utils.quoting import quoted

LOGPROBS = "message.output_text.logprobs"
# These ask for results of built-in tools or for stored data.
VAIN_INCLUDES = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
MAX_METADATA_BYTES = 64 * 1024
MESSAGE_PARTS = ("input_text", "output_text", "text")
# Fields of items that this server sent, or that mean nothing to a model.
_SENT: dict[str, Neutral] = {"id": ANY, "status": ANY}
_DIRECT: dict[str, Neutral] = {"caller": ANY, "namespace": NOTHING}
_PART_FIELDS = ("annotations", "logprobs", "prompt_cache_breakpoint")
_TOOL_FIELDS: dict[str, Neutral] = {
    "allowed_callers": Neutral(["direct"]),
    "defer_loading": OFF,
    "output_schema": NOTHING,
}
# Parts of paths in the chat -> parts in this API.
_PATHS = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    ".function": "",
}


def to_chat(body: ResponsesRequest) -> ChatRequest:
    """Return the chat that `body` asks for.

    Raises:
        BadRequest: names the item and the field.
    """
    logprobs = _wants_logprobs(body)
    text, reasoning = body.text, body.reasoning
    return ChatRequest(
        **body.options(),
        messages=_messages(body),
        tools=_tools(body.tools),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        max_completion_tokens=body.max_output_tokens,
        response_format=_response_format(text.format if text else None),
        reasoning_effort=reasoning.effort if reasoning else None,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        stop=body.stop,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def client_names(chat: ChatRequest) -> ClientNames:
    """Return this API's field names for errors about `chat`."""
    return ClientNames(
        chat,
        prompt="input",
        max_tokens="max_output_tokens",
        top_logprobs="top_logprobs",
        paths=_PATHS,
    )


def read_metadata(body: ResponsesRequest) -> dict[str, str]:
    """Return the texts that are repeated in the answer.

    Raises:
        BadRequest: they are not texts, or too many.
    """
    raw = bytes(body.metadata)
    if body.metadata is UNSET:
        return {}
    if len(raw) > MAX_METADATA_BYTES:
        raise BadRequest(
            f"metadata has {len(raw)} bytes, but at most {MAX_METADATA_BYTES} are "
            "accepted",
            param="metadata",
        )
    try:
        return msgspec.json.decode(raw, type=dict[str, str] | None) or {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(
            "metadata must be an object whose values are strings", param="metadata"
        ) from error


def _wants_logprobs(body: ResponsesRequest) -> bool:
    """Whether to return log probabilities of the text; checks everything in
    `include`.
    """
    for name in body.include or ():
        if name != LOGPROBS and name not in VAIN_INCLUDES:
            known = ", ".join((LOGPROBS, *sorted(VAIN_INCLUDES)))
            raise BadRequest(
                f"include holds {quoted(name)}; known values: {known}", param="include"
            )
    if body.truncation not in (None, "", "auto", "disabled"):
        raise BadRequest(
            f"truncation is {quoted(body.truncation)}; known values: auto, disabled",
            param="truncation",
        )
    asked = LOGPROBS in (body.include or ())
    if body.top_logprobs and not asked:
        raise BadRequest(
            f'top_logprobs needs include: ["{LOGPROBS}"]', param="top_logprobs"
        )
    return asked


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    turns = ChatTurns()
    if body.instructions is not None:
        turns.say("system", body.instructions)
    if isinstance(body.input, str):
        turns.say("user", body.input)
        return turns.messages
    if not body.input:
        raise BadRequest("input must not be empty", param="input")
    for item, where in entries(body.input, "input"):
        kind = read_kind(item, where, tuple(_ITEMS), default="message")
        _ITEMS[kind](turns, item, where)
    return turns.messages


def _add_message(turns: ChatTurns, item: Any, where: str) -> None:
    level = BodyLevel(
        item,
        where,
        read=("type", "role", "content"),
        neutral=_SENT | {"phase": ANY},
    )
    role = level.text("role")
    known = [name for name in ROLES if name != "tool"]
    if role not in known:
        raise BadRequest(
            f"{where}.role is {quoted(role)}; supported: {', '.join(known)}",
            param=f"{where}.role",
        )
    is_answer = role == "assistant"
    text = joined_texts(
        level.get("content"),
        f"{where}.content",
        (*MESSAGE_PARTS, REFUSAL) if is_answer else MESSAGE_PARTS,
        _PART_FIELDS,
    )
    if is_answer:
        turns.answer(text)
    else:
        turns.say(role, text)


def _add_call(turns: ChatTurns, item: Any, where: str) -> None:
    level = BodyLevel(
        item,
        where,
        read=("type", "call_id", "name", "arguments"),
        neutral=_SENT | _DIRECT,
    )
    turns.call(level.text("call_id"), level.text("name"), level.text("arguments"))


def _add_result(turns: ChatTurns, item: Any, where: str) -> None:
    level = BodyLevel(
        item,
        where,
        read=("type", "call_id", "output"),
        neutral=_SENT | _DIRECT | {"name": ANY},
    )
    output = joined_texts(
        level.get("output"), f"{where}.output", MESSAGE_PARTS, _PART_FIELDS
    )
    turns.result(level.text("call_id"), output)


def _add_reasoning(turns: ChatTurns, item: Any, where: str) -> None:
    """Add the text of the reasoning, or else its summary."""
    level = BodyLevel(
        item,
        where,
        read=("type", "content", "summary"),
        neutral=_SENT | {"encrypted_content": EMPTY},
    )
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        text = joined_texts(level.get(name) or [], f"{where}.{name}", (kind,), ())
        if text:
            turns.reasoning(text)
            return


_ITEMS: dict[str, Callable[[ChatTurns, Any, str], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_result,
    "reasoning": _add_reasoning,
}


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    nested = []
    for tool, where in entries(tools, "tools"):
        read_kind(tool, where, ("function",))
        BodyLevel(
            tool,
            where,
            read=("type", "name", "description", "parameters", "strict"),
            neutral=_TOOL_FIELDS,
        )
        function = {
            name: value
            for name, value in tool.items()
            if name != "type" and name not in _TOOL_FIELDS
        }
        nested.append({"type": "function", "function": function})
    return nested


def _tool_choice(choice: Any) -> Any:
    """Return the choice in chat form: names inside `function`."""
    if not isinstance(choice, dict):
        return choice
    kind = read_kind(choice, "tool_choice", ("function", "allowed_tools"))
    if kind == "function":
        level = BodyLevel(choice, "tool_choice", read=("type", "name"))
        return _named(level)
    level = BodyLevel(choice, "tool_choice", read=("type", "mode", "tools"))
    named = []
    for tool, where in entries(level.get("tools"), "tool_choice.tools"):
        read_kind(tool, where, ("function",))
        named.append(_named(BodyLevel(tool, where, read=("type", "name"))))
    allowed = {"mode": level.text("mode", default="auto"), "tools": named}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _named(level: BodyLevel) -> dict[str, Any]:
    return {"type": "function", "function": {"name": level.text("name")}}


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the format in chat form: a schema inside `json_schema`."""
    if form is None or form.get("type") != "json_schema":
        return dict(form) if form is not None else None
    holder = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": holder}
