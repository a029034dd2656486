"""Converts a chat to the text of a prompt with the tokenizer's template."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.front.chat_messages import template_messages
from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.utils.escaped_tokens import EscapedTokens

if TYPE_CHECKING:
    from sglang.srt.utils.hf_tokenizer import Tokenizer


# Roles whose texts are untrusted: from the client's users, or pages that its tools
# read.
UNTRUSTED_ROLES = frozenset({"user", "tool"})


class TemplateManager:
    """Applies the chat template of `tokenizer`, or accepts token ids only if it is
    None.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt of a conversation, up to the assistant's next message.

        Args:
            messages: in OpenAI's format.
            variables: extra variables for the template (`chat_template_kwargs`).
            tools: in OpenAI's format; ignored by a template without tools.
            add_generation_prompt: whether to add the beginning of the assistant's
                message.
            continue_final_message: whether to end after the text of the last message,
                which must be the assistant's.

        Raises:
            BadRequest: names the message and the field.
        """
        if self._tokenizer is None:
            raise BadRequest(
                "chat needs a tokenizer, but the server runs with --skip-tokenizer-init"
            )
        plain = template_messages(messages)
        end = _open_end(plain) if continue_final_message else None
        escaped, mark = self._tokenizer.escaped_tokens, EscapedTokens.new_mark()
        if escaped is not None:
            _mark_tokens(plain, escaped, mark)
        try:
            text = self._tokenizer.apply_chat_template(
                plain,
                add_generation_prompt=add_generation_prompt and end is None,
                tools=tools,
                variables=variables,
            )
        except ValueError as error:
            raise BadRequest(str(error), param="messages") from error
        if escaped is not None:
            text = escaped.guarded(text, mark)
        return text if end is None else _cut(text, end)


def _mark_tokens(
    messages: list[dict[str, Any]], escaped: EscapedTokens, mark: str
) -> None:
    for message in messages:
        if message["role"] in UNTRUSTED_ROLES:
            message["content"] = escaped.marked(message["content"], mark)


def continued_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that `continue_final_message` continues."""
    return str(template_messages(messages[-1:])[0]["content"] or "")


def _open_end(messages: list[dict[str, Any]]) -> str:
    """Append a mark to the last message's text and return it."""
    last = messages[-1]
    if last["role"] != "assistant" or "tool_calls" in last:
        raise BadRequest(
            "continue_final_message needs a last message of the assistant, without "
            f"tool_calls; it is the {last['role']}'s",
            param="continue_final_message",
        )
    # Trailing white space belongs to the text, even if the template trims it.
    end = uuid.uuid4().hex
    last["content"] = (last["content"] or "") + end
    return end


def _cut(text: str, end: str) -> str:
    at = text.rfind(end)
    if at < 0:
        raise BadRequest(
            "the chat template does not show the text of the last message, so that "
            "continue_final_message cannot continue it",
            param="continue_final_message",
        )
    return text[:at]
