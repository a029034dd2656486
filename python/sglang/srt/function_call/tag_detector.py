"""Calls written as tags: `<function=f><parameter=a>1</parameter></function>`.

A parameter is emitted when it is complete; the tool's schema says whether its text is a
string or another value.

A value ends at its own end tag. Models sometimes omit it; then the next parameter, the
end of the call or the next call ends the value. But a string may also contain such
tags, so the end of a call counts only if the value's own end tag does not follow before
the next call or the end of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.function_call.base_detector import CallFormat
from sglang.srt.function_call.json_calls import JsonCallDetector
from sglang.srt.function_call.json_values import to_json
from sglang.srt.function_call.schema_values import read_text
from sglang.srt.function_call.tool_schema import ToolSchema
from sglang.srt.utils.text_source import NoMatchError, Read, drop

if TYPE_CHECKING:
    from sglang.srt.function_call.core_types import Tool

_HEAD = re.compile(
    r"""\s*(["']?)(?P<name>[^\s"'<>=]+)\1"""
    r"""(?:\s+string\s*=\s*["']?(?P<string>true|false)["']?)?\s*"""
)
_HEAD_STOP = re.compile(r"[<>]")
_BARE_NAME = re.compile(r"[\w.-]+\s*")
_BARE_NAME_STOP = re.compile(r"[\n<{]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TagFormat(CallFormat):
    """The tags of a format.

    The openers begin a section of calls, or a call itself; `closers` end a call, then
    the section; the first closer ends a call's last parameter.

    Fields:
        prelude: strings that may come between an opener and a call, in this order.
        call: text that begins a call, followed by the name and `>`. If empty, the name
            follows the opener, up to the end of the line or the next tag.
        parameter: text that begins a parameter, followed by its name.
        parameter_head_end: text that ends the name of a parameter.
        value: text that begins its value. If empty, `parameter_head_end` begins it.
        value_end: text that ends its value.
        has_line_breaks: whether a line break after the name and one before `value_end`
            belong to the format.
    """

    prelude: tuple[str, ...] = ()
    call: str
    parameter: str
    parameter_head_end: str = ">"
    value: str = ""
    value_end: str
    has_line_breaks: bool = False

    def __call__(
        self, tools: Sequence[Tool], *, max_calls: int | None = None
    ) -> TagDetector:
        return TagDetector(self, tools, max_calls=max_calls)


class Head(NamedTuple):
    """The name in a tag, and whether the tag says that the value is JSON or a
    string.
    """

    name: str
    is_json: bool = False
    is_string: bool = False


class TagDetector(JsonCallDetector):
    """Calls of a `TagFormat`. Calls or their arguments may also be JSON."""

    _form: TagFormat

    def __init__(
        self, form: TagFormat, tools: Sequence[Tool], *, max_calls: int | None = None
    ) -> None:
        super().__init__(form, tools, max_calls=max_calls)
        self._schemas: dict[str, ToolSchema] = {}
        heads = (form.call or form.openers[0], *form.openers)
        self._calls = tuple(dict.fromkeys(heads))
        self._ends = tuple(
            dict.fromkeys((form.value_end, form.parameter, *form.closers, *self._calls))
        )

    def _schema(self, name: str) -> ToolSchema:
        if name not in self._schemas:
            self._schemas[name] = ToolSchema(self._tools[name].parameters)
        return self._schemas[name]

    def _read_calls(self, opener: str) -> Read[None]:
        source, form = self._source, self._form
        yield from source.skip_space()
        if opener != form.call and (yield from source.peek()) in ("{", "["):
            yield from self._read_objects(closer=form.closers[-1])
        else:
            name = self._known((yield from self._read_call_head(opener)))
            self._begin_call(name)
            yield from source.skip_space()
            if (yield from source.peek()) == "{":
                yield from self._copy_arguments(closer=form.closers[0])
            elif not (yield from self._read_parameters(name)):
                return
        yield from self._skip_any(*form.closers)

    def _read_call_head(self, opener: str) -> Read[str]:
        """Read the name of a call after an opener."""
        source, form = self._source, self._form
        if not form.call:
            yield from self._skip_any(*form.prelude)
            name: list[str] = []
            yield from source.skip_space()
            yield from source.copy_before(_BARE_NAME_STOP, name.append)
            if not _BARE_NAME.fullmatch("".join(name)):
                raise NoMatchError
            return "".join(name).strip()
        if opener != form.call:
            yield from self._skip_any(*form.prelude)
            yield from source.skip_space()
            yield from source.expect(form.call)
        return (yield from self._read_head(">")).name

    def _read_head(self, end: str) -> Read[Head]:
        """Read the name in a tag and the end of the tag.

        Raises:
            NoMatchError: it is none.
        """
        parts: list[str] = []
        yield from self._source.copy_before(_HEAD_STOP, parts.append)
        yield from self._source.expect(end)
        found = _HEAD.fullmatch("".join(parts))
        if found is None:
            raise NoMatchError
        said = found["string"]
        return Head(found["name"], is_json=said == "false", is_string=said == "true")

    def _read_parameters(self, name: str) -> Read[bool]:
        """Read the parameters of the current call; returns False if it is cut off."""
        schema = self._schema(name)
        given: set[str] = set()
        separator = "{"
        while (
            parameter := (yield from self._read_parameter(schema, given))
        ) is not None:
            head, text = parameter
            value: object = text
            reading = schema.reading(head.name)
            if not (head.is_string and reading.allows(text)):
                value = read_text(text, reading, is_json=head.is_json)
            self._add_arguments(f"{separator}{to_json(head.name)}: {to_json(value)}")
            separator = ", "
        if not (yield from self._source.peek()):
            return False
        self._add_arguments("{}" if separator == "{" else "}")
        return True

    def _read_parameter(
        self, schema: ToolSchema, given: set[str]
    ) -> Read[tuple[Head, str] | None]:
        """Read the next parameter and add its name to `given`. Returns None if there is
        none, or it is cut off.
        """
        source, form = self._source, self._form
        if not (yield from self._find_parameter()):
            return None
        yield from source.expect(form.parameter)
        head = yield from self._read_head(form.parameter_head_end)
        if form.value:
            yield from source.skip_space()
            yield from source.expect(form.value)
        given.add(head.name)
        text = yield from self._read_value(schema, given)
        if text is None:
            return None
        if form.has_line_breaks:
            text = text.removeprefix("\n").removesuffix("\n")
        return head, text

    def _find_parameter(self) -> Read[bool]:
        """Skip to the next parameter or the end of the call; text followed by neither
        stays. Returns whether a parameter comes next.
        """
        source, form = self._source, self._form
        yield from source.skip_space()
        source.mark(None)
        while (found := (yield from source.copy_to(self._ends, drop))) is not None:
            if found != form.value_end:
                break
            yield from source.accept(found)
        if found is None or found in self._calls:
            source.rewind()
            source.skip_cut(self._ends)
            return False
        source.commit()
        return found == form.parameter

    def _read_value(self, schema: ToolSchema, given: set[str]) -> Read[str | None]:
        """Read a value and its optional end tag; returns None if it is cut off."""
        source, form = self._source, self._form
        parts: list[str] = []
        # Number of parts before an end of the call that may be part of the value.
        whole: int | None = None
        while True:
            found = yield from source.copy_to(self._ends, parts.append)
            if found == form.value_end:
                source.commit()
                yield from source.accept(found)
                return "".join(parts)
            if found == form.parameter and (
                yield from source.look_ahead(
                    self._is_parameter(schema, given, is_line=_ends_line(parts))
                )
            ):
                source.commit()
                return self._unclosed(parts)
            if found is None or found in self._calls:
                has_end = whole is not None
                is_end = found is None or (
                    yield from source.look_ahead(self._is_call(found, is_any=has_end))
                )
                if is_end and has_end:
                    source.rewind()
                    return self._unclosed(parts[:whole])
                if is_end:
                    return None if found is None else self._unclosed(parts)
            if found in form.closers and whole is None:
                whole = len(parts)
                source.mark(None)
            parts.append((yield from source.take(len(found or ""))))

    def _unclosed(self, parts: Sequence[str]) -> str:
        """Return a value without an end tag; the next tag is on its own line."""
        text = "".join(parts)
        return text if self._form.has_line_breaks else text.removesuffix("\n")

    def _is_parameter(
        self, schema: ToolSchema, given: set[str], *, is_line: bool
    ) -> Read[bool]:
        """Read the head of a parameter; returns False if it is probably part of a
        string.

        Args:
            is_line: whether it begins a line, which an undeclared parameter must.
        """
        yield from self._source.expect(self._form.parameter)
        head = yield from self._read_head(self._form.parameter_head_end)
        is_known = not schema.names or head.name in schema.names
        return head.name not in given and (is_known or is_line)

    def _is_call(self, opener: str, *, is_any: bool) -> Read[bool]:
        """Read the head of a call and what follows; returns False if it is probably
        part of a string.

        Args:
            is_any: whether a call may have any name.
        """
        source = self._source
        yield from source.expect(opener)
        if is_any and opener in self._form.openers[:1]:
            yield from source.skip_space()
            if (yield from source.peek()) == "{":
                return True
        name = yield from self._read_call_head(opener)
        if is_any:
            return bool(name)
        yield from source.skip_space()
        return name in self._tools and (yield from source.peek()) == "<"


def _ends_line(parts: Sequence[str]) -> bool:
    """Whether the text of `parts` ends in a line break and spaces."""
    for part in reversed(parts):
        if text := part.rstrip(" \t"):
            return text.endswith("\n")
    return False
