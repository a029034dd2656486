"""Messages in OpenAI's format, checked and brought into the form of chat templates.

Owns the roles, the fields and the content parts that this engine accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sglang.srt.managers.errors import BadRequest
from sglang.srt.utils.quoting import quoted

# Role of the API -> role that templates know.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# The last three are in answers (of OpenAI, of litellm) that clients send back.
IGNORED_MESSAGE_FIELDS = frozenset(
    {"name", "refusal", "annotations", "provider_specific_fields", "thinking_blocks"}
)
FIELDS_OF_ROLE = {
    "assistant": frozenset({"tool_calls", "reasoning_content", "reasoning"}),
    "tool": frozenset({"tool_call_id"}),
}
TEXT_PARTS = frozenset({"text", "input_text"})


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as a template sees them.

    The arguments of tool calls become objects where they are JSON, and a tool's message
    bears the name of the function that was called.

    Raises:
        BadRequest: names the message and the field.
    """
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    plain = [_plain_message(i, message) for i, message in enumerate(messages)]
    names: dict[str, str] = {}
    for message in plain:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return plain


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(
            f"{where}.role is {quoted(role)}; supported: {', '.join(ROLES)}",
            param=f"{where}.role",
        )
    known = {"role", "content"} | IGNORED_MESSAGE_FIELDS
    known |= FIELDS_OF_ROLE.get(role, frozenset())
    for field in sorted(set(message) - known):
        # Clients send empty lists and nulls in place of fields that a message lacks.
        if message[field] not in (None, []):
            raise BadRequest(
                f"{where}.{field} is not supported", param=f"{where}.{field}"
            )
    plain: dict[str, Any] = {"role": ROLES[role]}
    if role == "assistant":
        return plain | _assistant_fields(where, message)
    plain["content"] = _text(f"{where}.content", message.get("content"))
    if role == "tool":
        plain |= _tool_fields(where, message)
    return plain


def _tool_fields(where: str, message: Mapping[str, Any]) -> dict[str, str]:
    fields = {"tool_call_id": _string(message, "tool_call_id", where=where)}
    if message.get("name") is not None:
        fields["name"] = _string(message, "name", where=where)
    return fields


def _assistant_fields(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return content, reasoning and tool calls; without content there are calls."""
    fields: dict[str, Any] = {"content": ""}
    calls = message.get("tool_calls") or []
    if message.get("content") is not None or not calls:
        fields["content"] = _text(f"{where}.content", message.get("content"))
    for name in ("reasoning_content", "reasoning"):
        if message.get(name):
            fields["reasoning_content"] = _string(message, name, where=where)
            break
    if calls:
        if not isinstance(calls, list):
            raise BadRequest(
                f"{where}.tool_calls must be a list", param=f"{where}.tool_calls"
            )
        fields["tool_calls"] = [
            _tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)
        ]
    return fields


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type") not in ("function", None):
        raise BadRequest(
            f"{where} must be {{id, type: 'function', function: {{name, arguments}}}}",
            param=where,
        )
    return {
        "id": _string(call, "id", where=where),
        "type": "function",
        "function": {
            "name": _string(function, "name", where=f"{where}.function"),
            "arguments": _arguments(
                f"{where}.function.arguments", function.get("arguments")
            ),
        },
    }


def _arguments(where: str, value: Any) -> dict[str, Any] | str:
    """Return the object that templates expect; text that is none stays text."""
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise BadRequest(f"{where} must be JSON text", param=where)
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return value
    return decoded if isinstance(decoded, dict) else value


def _string(holder: Mapping[str, Any], name: str, *, where: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str) or not value:
        raise BadRequest(
            f"{where}.{name} must be a non-empty string", param=f"{where}.{name}"
        )
    return value


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(
            f"{where} must be a string or a list of text parts", param=where
        )
    return "".join(_part_text(f"{where}[{i}]", p) for i, p in enumerate(content))


def _part_text(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise BadRequest(
            f"{where} is of type {quoted(kind)}; this engine reads text parts only",
            param=where,
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise BadRequest(f"{where}.text must be a string", param=f"{where}.text")
    return text
