"""Calls written as tags: `<function=f><parameter=a>1</parameter></function>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sglang.srt.function_call.base_detector import ToolCallDetector
from sglang.srt.function_call.json_values import to_json
from sglang.srt.utils.text_source import NoMatchError, Read


class Qwen3CoderDetector(ToolCallDetector):
    """A function and its parameters as tags, within `<tool_call>` (Qwen3-Coder).

    A parameter comes out when it is whole; the schema of the tool says whether its text
    is a string or another value.
    """

    openers = ("<tool_call>", "<function=")
    closers = ("</function>", "</tool_call>")
    marks = ("<tool_call>", "</tool_call>")

    _name = re.compile(r"^\s*(\S+)\s*$")

    def _read_calls(self, opener: str) -> Read[None]:
        source = self._source
        if opener != self.openers[1]:
            yield from source.skip_space()
            yield from source.expect(self.openers[1])
        name = yield from self._read_header(">", self._name)
        self._begin_call(name)
        kinds = self._tools[name].parameters.get("properties")
        separator = "{"
        while (parameter := (yield from self._read_parameter())) is not None:
            key, text = parameter
            kind = kinds.get(key) if isinstance(kinds, Mapping) else None
            value = to_json(_value(text, kind))
            self._add_arguments(f"{separator}{to_json(key)}: {value}")
            separator = ", "
        if not (yield from self._is_cut_off()):
            self._add_arguments("{}" if separator == "{" else "}")
            yield from self._skip_any(*self.closers)

    def _read_parameter(self) -> Read[tuple[str, str] | None]:
        """Read the next parameter; None where none comes next, or it is cut off."""
        source = self._source
        yield from source.skip_space()
        if not (yield from source.accept("<parameter=")):
            return None
        key: list[str] = []
        value: list[str] = []
        yield from source.copy_until((">",), key.append)
        if (yield from source.copy_until(("</parameter>",), value.append)) is None:
            return None
        text = "".join(value).removeprefix("\n").removesuffix("\n")
        return "".join(key).strip(), text

    def _is_cut_off(self) -> Read[bool]:
        return not (yield from self._source.peek())


def _value(text: str, schema: Any) -> Any:
    """Return the value that `text` means where `schema` declares a type other
    than a string; else `text`."""
    kinds = _kinds(schema)
    if not kinds or "string" in kinds:
        return text
    if text.strip() in ("True", "False", "None"):
        text = text.lower().replace("none", "null")
    try:
        value = json.loads(text)
        to_json(value)
    except (ValueError, RecursionError, NoMatchError):
        return text
    return value


def _kinds(schema: Any) -> set[str]:
    """The types that a schema declares, in `type` or in its alternatives."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set()
    if isinstance(kind, list):
        kinds.update(entry for entry in kind if isinstance(entry, str))
    for name in ("anyOf", "oneOf"):
        choices = schema.get(name)
        for choice in choices if isinstance(choices, list) else ():
            kinds |= _kinds(choice)
    return kinds
