"""Finds the form in which a chat template expects messages, by trial renderings.

Published templates agree on OpenAI's messages, but not on details: some append a call's
arguments as text and some take them apart, some recognize a call by its null content,
some read content as a list of parts. What a template shows of a short conversation
reveals this, once, when it is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

Message = dict[str, Any]
# Renders a conversation with optional tools, or returns None if the template rejects
# it.
Trial = Callable[[Sequence[Message], Sequence[Message] | None], str | None]

# Fields where templates look for an assistant's reasoning; messages use the first.
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")

_DEVELOPER = "developer"
_TESTS_DEVELOPER = re.compile(r"""(['"])developer\1""")
_NAME, _KEY, _VALUE = "probed_function", "probed_key", "probed value"
_TEXT, _THOUGHT, _RESULT = "probed text", "probed thought", "probed result"
_ARGUMENTS = {_KEY: _VALUE}
_NULLS = ("None", "null")
_USER: Message = {"role": "user", "content": "Hello"}
# Nine letters and digits, as required by Mistral's templates.
_ID = "probecall"
_CALL = {
    "id": _ID,
    "type": "function",
    "function": {"name": _NAME, "arguments": json.dumps(_ARGUMENTS)},
}
# A model's output may end inside the arguments, and the client may continue it.
_BROKEN_CALL = {**_CALL, "function": {"name": _NAME, "arguments": '{"a'}}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "Probe"}}
_ANSWER: Message = {
    "role": "tool",
    "tool_call_id": _ID,
    "name": _NAME,
    "content": _RESULT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """How `adapt` changes messages in OpenAI's format.

    Fields:
        has_objects: whether call arguments that are JSON become objects instead of
            text.
        wraps_text: whether arguments that are not JSON become an object with their text
            instead of staying text.
        takes_null: whether null content stays null instead of becoming empty.
        takes_null_beside_calls: the same, for messages with calls.
        needs_null: whether empty content with calls becomes null.
        splits_calls: whether text and calls of one message become two messages.
        has_parts: whether content becomes a list of text parts.
        blank: replaces an assistant's empty text without calls.
        knows_developer: whether the role developer stays instead of becoming system.
        reasoning_name: field for an assistant's reasoning.
        drops_reasoning: whether reasoning is dropped from messages with both text and
            calls.
    """

    has_objects: bool = True
    wraps_text: bool = False
    takes_null: bool = False
    takes_null_beside_calls: bool = False
    needs_null: bool = False
    splits_calls: bool = False
    has_parts: bool = False
    blank: str = ""
    knows_developer: bool = False
    reasoning_name: str = REASONING_NAMES[0]
    drops_reasoning: bool = False

    def adapt(self, messages: Iterable[Mapping[str, Any]]) -> list[Message]:
        """Return the messages in the template's form, without changing them in
        place.
        """
        return [part for message in messages for part in self._adapted(message)]

    def _adapted(self, message: Mapping[str, Any]) -> list[Message]:
        content, calls = message.get("content"), message.get("tool_calls")
        changed = self._renamed(dict(message))
        if changed["role"] == _DEVELOPER and not self.knows_developer:
            changed["role"] = "system"
        if not calls:
            if changed["role"] == "assistant":
                content = self._said(content)
            return [{**changed, "content": self._content(content)}]
        changed["tool_calls"] = [self._call(call) for call in calls]
        if not content:
            return [{**changed, "content": self._no_content(content)}]
        if self.drops_reasoning:
            changed.pop(self.reasoning_name, None)
        if not self.splits_calls:
            return [{**changed, "content": self._content(content)}]
        said = {**changed, "content": self._content(content)}
        del said["tool_calls"]
        changed.pop(self.reasoning_name, None)
        return [said, {**changed, "content": self._no_content(None)}]

    def _content(self, content: Any) -> Any:
        if self.has_parts and content is not None:
            return [{"type": "text", "text": content}]
        return content

    def _said(self, content: Any) -> str | None:
        """Return the content of an assistant message without calls."""
        if content is None and self.takes_null:
            return None
        return content or self.blank

    def _no_content(self, content: Any) -> str | None:
        """Return the content of a message with calls but no text."""
        is_null = self.takes_null_beside_calls if content is None else self.needs_null
        return None if is_null else ""

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        convert = _object if self.has_objects else _text
        arguments = convert(function["arguments"])
        if self.wraps_text and isinstance(arguments, str):
            arguments = {"arguments": arguments}
        return {**call, "function": {**function, "arguments": arguments}}

    def _renamed(self, message: Message) -> Message:
        standard = REASONING_NAMES[0]
        if standard in message and self.reasoning_name != standard:
            message[self.reasoning_name] = message.pop(standard)
        return message


def find_form(source: str, trial: Trial) -> MessageForm:
    """Return the form for the template `source`, which `trial` renders."""
    form = _find_content(trial)
    form = _find_calls(form, trial)
    form = _find_reasoning(form, trial)
    # Many templates show any role, which says nothing about what the model understands.
    return replace(form, knows_developer=_TESTS_DEVELOPER.search(source) is not None)


def _find_content(trial: Trial) -> MessageForm:
    """Use parts if only they make a user's text appear."""
    form, parts = MessageForm(), MessageForm(has_parts=True)
    said: Message = {"role": "user", "content": _TEXT}
    if not _shows(trial(form.adapt([said]), None), _TEXT):
        text = trial(parts.adapt([said]), None)
        # A list rendered as text also shows the text.
        if _shows(text, _TEXT) and not _shows(text, "'type'"):
            form = parts

    def answered(form: MessageForm, content: str | None) -> str | None:
        answer = {"role": "assistant", "content": content}
        return trial(form.adapt([_USER, answer, _USER]), None)

    blanks = [replace(form, blank=blank) for blank in ("", " ")]
    form = next((f for f in blanks if answered(f, "") is not None), form)
    null = answered(replace(form, takes_null=True), None)
    is_taken = null is not None and not _tells_null(null, answered(form, ""))
    return replace(form, takes_null=is_taken, takes_null_beside_calls=is_taken)


def _find_calls(form: MessageForm, trial: Trial) -> MessageForm:
    """Use the first combination that makes a call appear; objects come first."""

    def told(form: MessageForm, content: str | None, call: Message) -> str | None:
        asked = {"role": "assistant", "content": content, "tool_calls": [call]}
        said = form.adapt([_USER, asked, _ANSWER])
        text = trial(said, None)
        # Some templates show calls only if there are tools.
        return text if _shows(text, _NAME) else trial(said, [_TOOL])

    def called(form: MessageForm, content: str | None) -> str | None:
        """Return the text of a call, or None if it is not shown."""
        text = told(form, content, _CALL)
        is_shown = _shows(text, _NAME, _VALUE) and not _shows(text, repr(_ARGUMENTS))
        return text if is_shown else None

    for has_objects in (True, False):
        tried = replace(form, has_objects=has_objects, needs_null=False)
        empty = called(tried, "")
        null = called(replace(tried, takes_null_beside_calls=True), None)
        if null is not None and _tells_null(null, empty):
            null = None
        if null is None and empty is None:
            continue
        found = replace(
            tried, takes_null_beside_calls=null is not None, needs_null=empty is None
        )
        if has_objects and told(found, None, _BROKEN_CALL) is None:
            found = replace(found, wraps_text=True)
        split = replace(found, splits_calls=True)
        if called(found, _TEXT) is None and called(split, _TEXT) is not None:
            return split
        return found
    return form


def _tells_null(null: str, empty: str | None) -> bool:
    """Whether a template renders null content as if it were text."""
    return any(null.count(word) > (empty or "").count(word) for word in _NULLS)


def _find_reasoning(form: MessageForm, trial: Trial) -> MessageForm:
    """Use the first field name under which reasoning is shown."""

    def shown(form: MessageForm, **fields: Any) -> str | None:
        thought = {"role": "assistant", "content": None, REASONING_NAMES[0]: _THOUGHT}
        said = form.adapt([_USER, {**thought, **fields}])
        return trial([*said, _ANSWER] if "tool_calls" in fields else said, None)

    for name in REASONING_NAMES:
        named = replace(form, reasoning_name=name)
        beside_call = shown(named, tool_calls=[_CALL])
        texts = beside_call, shown(named, content=_TEXT)
        if any(_shows(text, _THOUGHT) for text in texts):
            all_three = shown(named, tool_calls=[_CALL], content=_TEXT)
            is_refused = all_three is None and beside_call is not None
            return replace(named, drops_reasoning=is_refused)
    return form


def _shows(text: str | None, *marks: str) -> bool:
    return text is not None and all(mark in text for mark in marks)


def _object(arguments: Any) -> Any:
    """Return the object in a text, or the text if there is none."""
    if not isinstance(arguments, str):
        return arguments
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


def _text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)
