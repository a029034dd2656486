"""Calls written as JSON objects: `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.function_call.base_detector import CallFormat, ToolCallDetector
from sglang.srt.function_call.json_values import to_json
from sglang.srt.function_call.relaxed_json import RelaxedCopier, read_value
from sglang.srt.utils.text_source import (
    Emit,
    NoMatchError,
    Read,
    TextSource,
    drop,
)

if TYPE_CHECKING:
    from sglang.srt.function_call.core_types import Tool

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
SEPARATORS = (",", ";")
# Templates of Mistral models reject ids of any other form.
SHORT_ID_CHARS = string.ascii_letters + string.digits
SHORT_ID_LENGTH = 9

_STRING_STOP = {quote: re.compile(rf"[{quote}\\]") for quote in ('"', "'")}
_SCALAR_STOP = re.compile(r"[^\w.+-]")
_KEY_STOP = re.compile(r"[^\w-]")
_NO_CLOSING = re.compile(r"[^\s}\]]")
_HEADER_STOP = re.compile(r"[{]")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonFormat(CallFormat):
    """Calls between marks that are JSON, or have JSON arguments.

    Fields:
        has_objects: whether an opener may be followed by a call as an object, or a list
            of them.
        header: pattern for the text between an opener with white space and arguments
            that are a separate object. Group `name` is the function; group `id`, if
            there is one, the call's id.
        quote: mark that begins and ends strings instead of `"`.
        has_short_ids: whether ids are nine letters and digits.
    """

    has_objects: bool = True
    header: re.Pattern[str] | None = None
    quote: str = ""
    has_short_ids: bool = False

    def __call__(
        self, tools: Sequence[Tool], *, max_calls: int | None = None
    ) -> JsonDetector:
        return JsonDetector(self, tools, max_calls=max_calls)


class JsonCallDetector(ToolCallDetector):
    """A detector that reads JSON.

    Arguments are passed on as the model wrote them, as far as that is JSON or close to
    it (`RelaxedCopier`). As with any model, a client must expect text that is not valid
    JSON.
    """

    def _read_objects(self, *, closer: str = "") -> Read[None]:
        """Read a list of calls, or one or more consecutive calls.

        Raises:
            NoMatchError: no call comes next, or no further one.
        """
        source = self._source

        def read_call() -> Read[None]:
            return self._read_call(closer=closer)

        if (yield from source.accept("[")):
            yield from self._read_list(read_call)
            return
        yield from read_call()
        while True:
            source.mark()
            yield from self._skip_any(*SEPARATORS, *self._form.openers)
            yield from source.skip_space()
            if (yield from source.peek()) != "{":
                source.rewind()
                return
            yield from read_call()

    def _read_call(self, *, closer: str = "") -> Read[None]:
        """Read one call as an object, dropping other keys.

        Args:
            closer: text that ends arguments with unbalanced brackets.

        Raises:
            NoMatchError: it is not such an object, or it is cut off.
        """
        source, before = self._source, self.num_calls
        name: str | None = None
        arguments: list[str] | None = None
        yield from source.expect("{")
        while True:
            yield from source.skip_space()
            if (yield from source.accept("}")):
                break
            key = yield from self._read_key()
            if key == "name" and name is None:
                name = self._known((yield from read_string(source)))
                if arguments is not None:
                    self._begin_call(name)
                    self._add_arguments("".join(arguments))
            elif key in ARGUMENT_KEYS and arguments is None:
                arguments = []
                emit = arguments.append if name is None else self._add_arguments
                yield from self._read_arguments(emit, name=name, closer=closer)
            else:
                yield from skip_value(source)
            yield from source.skip_space()
            if (yield from source.accept(",")):
                continue
            if not (yield from source.accept("}")) and self.num_calls == before:
                raise NoMatchError
            break
        if name is None:
            raise NoMatchError
        if self.num_calls == before:
            self._begin_call(name)
            self._add_arguments("{}")

    def _read_key(self) -> Read[str]:
        """Read a key, quoted or not, and the colon after it."""
        source = self._source
        if (yield from source.peek()) in _STRING_STOP:
            key = yield from read_string(source)
        else:
            parts: list[str] = []
            yield from source.copy_before(_KEY_STOP, parts.append)
            key = "".join(parts)
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        return key

    def _read_arguments(
        self, emit: Emit, *, name: str | None, closer: str
    ) -> Read[None]:
        """Read an object, a string with its JSON text, or null for no arguments.

        Args:
            name: name of the function, to begin the call as soon as its arguments
                begin, or None if not known yet.
        """
        source = self._source
        first = yield from source.peek()
        if first == "{":
            if name is not None:
                self._begin_call(name)
            copier = RelaxedCopier(emit, closer=closer, is_strict=name is None)
            yield from source.copy_through(copier.step)
            return
        if first in _STRING_STOP:
            text = _object_text((yield from read_string(source)).strip())
        else:
            for literal in ("null", "None"):
                if (yield from source.accept(literal)):
                    break
            else:
                raise NoMatchError
            text = "{}"
        if name is not None:
            self._begin_call(name)
        emit(text)

    def _copy_arguments(self, *, closer: str = "", quote: str = "") -> Read[None]:
        """Read the arguments object of a call that has begun."""
        copier = RelaxedCopier(self._add_arguments, closer=closer, quote=quote)
        yield from self._source.copy_through(copier.step)


class JsonDetector(JsonCallDetector):
    """Calls of a `JsonFormat`."""

    _form: JsonFormat

    def _read_calls(self, opener: str) -> Read[None]:
        source, form = self._source, self._form
        closer = form.closers[0] if form.closers else ""
        yield from source.skip_space()
        first = yield from source.peek()
        if form.has_objects and first in ("{", "["):
            yield from self._read_objects(closer=closer)
        elif form.header is not None:
            yield from self._read_header(form.header)
            yield from self._copy_arguments(closer=closer, quote=form.quote)
        else:
            raise NoMatchError
        if closer:
            yield from self._skip_brackets(closer)
        yield from self._skip_any(*form.closers)

    def _skip_brackets(self, closer: str) -> Read[None]:
        """Skip closing brackets that close nothing, if `closer` follows them."""
        source = self._source
        source.mark()
        yield from source.copy_before(_NO_CLOSING, drop)
        if (yield from source.peek(len(closer))) == closer:
            source.commit()
        else:
            source.rewind()

    def _read_header(self, pattern: re.Pattern[str]) -> Read[None]:
        """Read the header before the arguments, and begin the call.

        Raises:
            NoMatchError: no header comes next, or no such tool exists.
        """
        header: list[str] = []
        end = yield from self._source.copy_before(_HEADER_STOP, header.append)
        found = pattern.fullmatch("".join(header))
        if not end or found is None:
            raise NoMatchError
        groups = found.groupdict()
        self._begin_call(self._known(groups["name"]), groups.get("id"))

    def _call_id(self) -> str:
        if self._form.has_short_ids:
            return "".join(random.choices(SHORT_ID_CHARS, k=SHORT_ID_LENGTH))
        return super()._call_id()


def read_string(source: TextSource) -> Read[str]:
    """Read and decode a JSON string, or one in single quotes.

    Raises:
        NoMatchError: it is not a string, or it is cut off.
    """
    quote = yield from source.peek()
    if quote not in _STRING_STOP:
        raise NoMatchError
    parts: list[str] = []

    def add(text: str) -> None:
        parts.append(text if quote == '"' else text.replace('"', '\\"'))

    yield from source.take()
    while char := (yield from source.copy_before(_STRING_STOP[quote], add)):
        piece = yield from source.take(1 if char == quote else 2)
        if char == quote:
            break
        parts.append("'" if piece == "\\'" else piece)  # JSON has no such escape
    else:
        raise NoMatchError
    try:
        # Models write line breaks into strings.
        text = str(json.loads(f'"{"".join(parts)}"', strict=False))
        text.encode()  # rejects half of a surrogate pair
        return text
    except ValueError as error:
        raise NoMatchError from error


def skip_value(source: TextSource) -> Read[None]:
    """Read any JSON value."""
    first = yield from source.peek()
    if first in ("{", "["):
        copier = RelaxedCopier(drop, is_strict=True)
        yield from source.copy_through(copier.step)
    elif first in _STRING_STOP:
        yield from read_string(source)
    else:
        yield from source.copy_before(_SCALAR_STOP, drop)


def _object_text(text: str) -> str:
    """Return the JSON text of an object that a model wrote as a string.

    Raises:
        NoMatchError: it is not an object.
    """
    if not text:
        return "{}"
    if not text.startswith("{"):
        raise NoMatchError
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        try:
            return to_json(read_value(text))
        except NoMatchError:
            pass
    return text
