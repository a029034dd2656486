"""Validates messages in OpenAI's format and converts them for chat templates.

Owns the roles, the fields and the content parts that this engine accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.utils.quoting import quoted

ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields that a message of this role cannot use, but whose loss would change its
# meaning; other fields are ignored.
SAYING_FIELDS = ("audio", "function_call", "image", "images", "tool_calls", "videos")
# Other fields of messages. Some come from answers that clients send back.
KNOWN_FIELDS = frozenset(
    (
        *SAYING_FIELDS,
        *("role", "content", "name", "refusal", "annotations", "tool_call_id"),
        *("reasoning_content", "reasoning", "thinking_blocks"),
        "provider_specific_fields",
    )
)
# Type of a content part -> its field with the text.
TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text"), "text")
ASSISTANT_PARTS = {**TEXT_PARTS, "refusal": "refusal"}


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages in the form that `ChatTemplate.render` takes.

    A tool message gets the name of the function that was called.

    Raises:
        BadRequest: names the message and the field.
    """
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    plain = [_plain_message(i, message) for i, message in enumerate(messages)]
    names: dict[str, str] = {}
    for message in plain:
        for call in message.get("tool_calls", ()):
            if "id" in call:
                names[call["id"]] = call["function"]["name"]
        name = names.get(message.get("tool_call_id", ""))
        if message["role"] == "tool" and name is not None:
            message.setdefault("name", name)
    return plain


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(
            f"{where}.role is {quoted(role)}; supported: {', '.join(ROLES)}",
            param=f"{where}.role",
        )
    for field in SAYING_FIELDS:
        is_read = field == "tool_calls" and role == "assistant"
        # Clients send empty lists and nulls for fields that a message lacks.
        if not is_read and message.get(field) not in (None, [], {}, ""):
            raise BadRequest(
                f"{where}.{field} is not supported", param=f"{where}.{field}"
            )
    plain: dict[str, Any] = {"role": role}
    if role == "assistant":
        return plain | _assistant_fields(where, message)
    content = message.get("content")
    if role == "tool":
        plain |= _tool_fields(where, message)
        content = "" if content is None else content
    plain["content"] = _text(f"{where}.content", content, TEXT_PARTS)
    return plain


def _tool_fields(where: str, message: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: _string(message, name, where=where)
        for name in ("tool_call_id", "name")
        if message.get(name) is not None
    }


def _assistant_fields(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return content, reasoning and tool calls; content may be null."""
    fields: dict[str, Any] = {"content": _assistant_text(where, message)}
    for name in ("reasoning_content", "reasoning"):
        if message.get(name):
            fields["reasoning_content"] = _string(message, name, where=where)
            break
    calls = message.get("tool_calls") or []
    if calls:
        if not isinstance(calls, list):
            raise BadRequest(
                f"{where}.tool_calls must be a list", param=f"{where}.tool_calls"
            )
        fields["tool_calls"] = [
            _tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)
        ]
    return fields


def _assistant_text(where: str, message: Mapping[str, Any]) -> str | None:
    """Return what the assistant said: its content, else its refusal, else None."""
    content = message.get("content")
    if content is not None:
        return _text(f"{where}.content", content, ASSISTANT_PARTS)
    return _string(message, "refusal", where=where) if message.get("refusal") else None


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type") not in ("function", None):
        raise BadRequest(
            f"{where} must be {{id, type: 'function', function: {{name, arguments}}}}",
            param=where,
        )
    identity = {}
    if call.get("id") is not None:
        identity["id"] = _string(call, "id", where=where)
    return {
        **identity,
        "type": "function",
        "function": {
            "name": _string(function, "name", where=f"{where}.function"),
            "arguments": _arguments(
                f"{where}.function.arguments", function.get("arguments")
            ),
        },
    }


def _arguments(where: str, value: Any) -> dict[str, Any] | str:
    """Return the arguments as sent; missing ones become an empty object."""
    if value is None or value == "":
        return "{}"
    if not isinstance(value, dict | str):
        raise BadRequest(f"{where} must be JSON text", param=where)
    return value


def _string(holder: Mapping[str, Any], name: str, *, where: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str) or not value:
        raise BadRequest(
            f"{where}.{name} must be a non-empty string", param=f"{where}.{name}"
        )
    return value


def _text(where: str, content: Any, parts: Mapping[str, str]) -> str:
    """Return the text of content; `parts` maps the type of a part to its text field."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(
            f"{where} must be a string or a list of text parts", param=where
        )
    texts = [_part_text(f"{where}[{i}]", part, parts) for i, part in enumerate(content)]
    return "".join(texts)


def _part_text(where: str, part: Any, parts: Mapping[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in parts:
        raise BadRequest(
            f"{where} is of type {quoted(kind)}; this engine reads text parts only",
            param=where,
        )
    field = parts[kind]
    text = part.get(field)
    if not isinstance(text, str):
        raise BadRequest(f"{where}.{field} must be a string", param=f"{where}.{field}")
    return text
