"""Converts requests of `/v1/messages` to the form of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.entrypoints.anthropic.protocol import Conversation, MessagesRequest
from sglang.srt.entrypoints.body_level import (
    BodyLevel,
    entries,
    joined_texts,
    read_kind,
)
from sglang.srt.entrypoints.chat_turns import ChatTurns
from sglang.srt.entrypoints.neutral_fields import ANY, EMPTY, NOTHING, OFF, Neutral
from sglang.srt.entrypoints.openai.common import ClientNames
from sglang.srt.entrypoints.openai.protocol import ChatRequest
from sglang.srt.entrypoints.openai.thinking import THINKING_TYPES
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.utils.quoting import quoted

# Between two messages of one role, which form one turn.
BETWEEN_MESSAGES = "\n\n"
# Before the content of a `tool_result` with `is_error`: templates have no other place.
ERROR_MARK = "Error: "
_TEXT_FIELDS: dict[str, Neutral] = {"cache_control": ANY, "citations": ANY}
_USE_FIELDS: dict[str, Neutral] = {
    "cache_control": ANY,
    "caller": ANY,
    "toolset_name": NOTHING,
}
_TOOL_FIELDS: dict[str, Neutral] = {
    "cache_control": ANY,
    # Arguments are always streamed as they are generated.
    "eager_input_streaming": ANY,
    "allowed_callers": Neutral(["direct"]),
    "defer_loading": OFF,
    "input_examples": EMPTY,
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Parts of paths in the chat -> parts in this API.
_PATHS = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    ".function.parameters": ".input_schema",
    ".function": "",
}


def to_chat(body: Conversation) -> ChatRequest:
    """Return the chat that `body` asks for.

    Raises:
        BadRequest: names the block and the field.
    """
    config = body.output_config
    choice, is_parallel = _tool_choice(body.tool_choice)
    messages = _messages(body)
    is_begun = messages[-1]["role"] == "assistant"
    if is_begun and "tool_calls" in messages[-1]:
        raise BadRequest(
            f"messages[{len(body.messages) - 1}]: the answer goes on with an "
            "assistant's last message, which must not hold tool_use; send the "
            "tool_result of each in a user's message",
            param="messages",
        )
    return ChatRequest(
        **body.options(),
        messages=messages,
        tools=_tools(body.tools),
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        max_tokens=body.max_tokens if isinstance(body, MessagesRequest) else None,
        response_format=_response_format(body),
        reasoning_effort=config.effort if config else None,
        stop=body.stop_sequences,
        continue_final_message=is_begun,
        chat_template_kwargs=_thinking(body.thinking)
        | (body.chat_template_kwargs or {}),
    )


def client_names(chat: ChatRequest) -> ClientNames:
    """Return this API's field names for errors about `chat`."""
    return ClientNames(
        chat,
        prompt="messages",
        max_tokens="max_tokens",
        top_logprobs="top_logprobs",
        paths=_PATHS,
    )


def _messages(body: Conversation) -> list[dict[str, Any]]:
    turns = ChatTurns()
    if body.system is not None:
        text = joined_texts(body.system, "system", ("text",), _TEXT_FIELDS)
        turns.say("system", text)
    if not body.messages:
        raise BadRequest("messages must not be empty", param="messages")
    for message, where in entries(body.messages, "messages"):
        level = BodyLevel(message, where, read=("role", "content"))
        role = level.text("role")
        if role not in _BLOCKS:
            raise BadRequest(
                f"{where}.role is {quoted(role)}; supported: {', '.join(_BLOCKS)}",
                param=f"{where}.role",
            )
        _add_message(turns, role, level.get("content"), f"{where}.content")
    return turns.messages


def _add_message(turns: ChatTurns, role: str, content: Any, where: str) -> None:
    """Add the blocks of a message, without separators between them."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    between = BETWEEN_MESSAGES
    adders = _BLOCKS[role]
    for block, path in entries(content, where):
        kind = read_kind(block, path, tuple(adders))
        if kind == "text":
            level = BodyLevel(block, path, read=("type", "text"), neutral=_TEXT_FIELDS)
            if role == "assistant":
                turns.answer(level.text("text"), between=between)
            else:
                turns.say(role, level.text("text"), between=between)
        else:
            adders[kind](turns, block, path)
        between = ""
    if not content:
        if role == "assistant":
            turns.answer("", between=between)
        else:
            turns.say(role, "", between=between)


def _add_use(turns: ChatTurns, block: Any, where: str) -> None:
    level = BodyLevel(
        block, where, read=("type", "id", "name", "input"), neutral=_USE_FIELDS
    )
    arguments = level.get("input")
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}.input must be an object", param=f"{where}.input")
    turns.call(level.text("id"), level.text("name"), arguments)


def _add_result(turns: ChatTurns, block: Any, where: str) -> None:
    level = BodyLevel(
        block,
        where,
        read=("type", "tool_use_id", "content", "is_error"),
        neutral=_USE_FIELDS,
    )
    content = level.get("content")
    text = joined_texts(
        [] if content is None else content, f"{where}.content", ("text",), _TEXT_FIELDS
    )
    mark = ERROR_MARK if level.flag("is_error") else ""
    turns.result(level.text("tool_use_id"), mark + text)


def _add_thinking(turns: ChatTurns, block: Any, where: str) -> None:
    level = BodyLevel(
        block,
        where,
        read=("type", "thinking"),
        neutral={"signature": ANY, "cache_control": ANY},
    )
    turns.reasoning(level.text("thinking"))


def _add_nothing(turns: ChatTurns, block: Any, where: str) -> None:
    """Do nothing: texts are added elsewhere, where what precedes them is known."""


_Adders = Mapping[str, Callable[[ChatTurns, Any, str], None]]
# Role -> its types of blocks.
_BLOCKS: dict[str, _Adders] = {
    "user": {"text": _add_nothing, "tool_result": _add_result},
    "assistant": {
        "text": _add_nothing,
        "tool_use": _add_use,
        "thinking": _add_thinking,
    },
    "system": {"text": _add_nothing},
}


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    nested = []
    for tool, where in entries(tools, "tools"):
        read_kind(tool, where, ("custom",), default="custom")
        level = BodyLevel(
            tool,
            where,
            read=("type", "name", "description", "input_schema", "strict"),
            neutral=_TOOL_FIELDS,
        )
        schema = level.get("input_schema")
        if not isinstance(schema, dict):
            raise BadRequest(
                f"{where}.input_schema must be the JSON schema of an object",
                param=f"{where}.input_schema",
            )
        function = {"name": level.get("name"), "parameters": schema}
        for name in ("description", "strict"):
            if level.get(name) is not None:
                function[name] = level.get(name)
        nested.append({"type": "function", "function": function})
    return nested


def _tool_choice(choice: dict[str, Any] | None) -> tuple[Any, bool | None]:
    """Return the choice in chat form, and whether calls may be parallel."""
    if choice is None:
        return None, None
    kind = read_kind(choice, "tool_choice", (*_CHOICES, "tool"))
    level = BodyLevel(
        choice, "tool_choice", read=("type", "name", "disable_parallel_tool_use")
    )
    is_parallel = not level.flag("disable_parallel_tool_use")
    if kind == "tool":
        function = {"name": level.text("name")}
        return {"type": "function", "function": function}, is_parallel
    return _CHOICES[kind], is_parallel


def _thinking(thinking: dict[str, Any] | None) -> dict[str, Any]:
    """Return the template variables that enable or disable reasoning.

    The length of reasoning alone cannot be limited, so `budget_tokens` has no effect.
    """
    if thinking is None:
        return {}
    kind = read_kind(thinking, "thinking", tuple(THINKING_TYPES))
    BodyLevel(
        thinking,
        "thinking",
        read=("type",),
        neutral={"budget_tokens": ANY, "display": Neutral("summarized")},
    )
    return dict.fromkeys(("enable_thinking", "thinking"), THINKING_TYPES[kind])


def _response_format(body: Conversation) -> dict[str, Any] | None:
    form = body.output_config.format if body.output_config else None
    where = "output_config.format"
    if body.output_format is not None:
        if form is not None:
            raise BadRequest(
                "output_format and output_config.format are the same: send one",
                param="output_format",
            )
        form, where = body.output_format, "output_format"
    if form is None:
        return None
    read_kind(form, where, ("json_schema",))
    level = BodyLevel(form, where, read=("type", "schema"))
    schema = {"name": "output", "schema": level.get("schema")}
    return {"type": "json_schema", "json_schema": schema}
