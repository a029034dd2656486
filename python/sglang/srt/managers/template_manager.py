"""Conversion of chat messages in OpenAI's format to the text of a prompt.

Owns the roles and content parts that this engine accepts; the tokenizer owns the
template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.errors import BadRequest
from sglang.srt.utils.quoting import quoted

if TYPE_CHECKING:
    from sglang.srt.utils.hf_tokenizer import Tokenizer

# Role of the API -> role that templates know.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
IGNORED_MESSAGE_FIELDS = frozenset({"name", "refusal", "reasoning_content"})
TEXT_PARTS = frozenset({"text", "input_text"})


class TemplateManager:
    """Applies the chat template of `tokenizer` (None: token ids only)."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, variables: Mapping[str, Any]
    ) -> str:
        """Return the prompt of a conversation, up to the assistant's next message.

        Args:
            messages: `role` and `content`; content is a string or a list of text parts,
                which are joined.
            variables: extra names for the template (`chat_template_kwargs`).

        Raises:
            BadRequest: names the message and the field.
        """
        if self._tokenizer is None:
            raise BadRequest(
                "chat needs a tokenizer, but the server runs with --skip-tokenizer-init"
            )
        if not messages:
            raise BadRequest("messages must not be empty", param="messages")
        plain = [_plain_message(i, message) for i, message in enumerate(messages)]
        try:
            return self._tokenizer.apply_chat_template(plain, variables=variables)
        except ValueError as error:
            raise BadRequest(str(error), param="messages") from error


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, str]:
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(
            f"{where}.role is {quoted(role)}; supported: {', '.join(ROLES)}",
            param=f"{where}.role",
        )
    extra = sorted(set(message) - {"role", "content"} - IGNORED_MESSAGE_FIELDS)
    for field in extra:
        # Clients send an empty list of tool calls where a message has none.
        if message[field] not in (None, []):
            raise BadRequest(
                f"{where}.{field} is not supported", param=f"{where}.{field}"
            )
    return {"role": ROLES[role], "content": _text(where, message.get("content"))}


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(
            f"{where}.content must be a string or a list of text parts",
            param=f"{where}.content",
        )
    return "".join(
        _part_text(f"{where}.content[{i}]", p) for i, p in enumerate(content)
    )


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
