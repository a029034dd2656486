"""Calls written as JSON objects: `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

import json
import re

from sglang.srt.function_call.base_detector import ToolCallDetector
from sglang.srt.utils.text_source import Emit, NoMatchError, Read, TextSource

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_STRING_STOP = re.compile(r'["\\]')
# All but white space, numbers, true, false, null and what parts them.
_NO_SCALAR = re.compile(r"[^\sa-z0-9.+:,E-]")
_SCALAR_STOP = re.compile(r"[,}\]\s]")


class JsonCallDetector(ToolCallDetector):
    """A detector of formats whose calls, or whose arguments, are JSON.

    Arguments come out as the model wrote them: a client must expect text that is not
    valid JSON, as from any model.
    """

    def _read_call(self, *, closer: str = "") -> Read[None]:
        """Read one call as an object; other keys of it are dropped.

        Args:
            closer: ends arguments whose brackets do not match.

        Raises:
            NoMatchError: it is not an object of this kind, or it is cut off.
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
        source = self._source
        key = yield from read_string(source)
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        return key

    def _read_arguments(
        self, emit: Emit, *, name: str | None, closer: str
    ) -> Read[None]:
        """Read an object, the JSON text of one in a string, or null for none.

        Args:
            name: begins the call as soon as its arguments do; None: not known yet.
        """
        source = self._source
        first = yield from source.peek()
        if first == "{":
            if name is not None:
                self._begin_call(name)
            yield from copy_nested(source, emit, closer=closer, is_strict=name is None)
            return
        if first == '"':
            text = (yield from read_string(source)).strip()
            if not text.startswith("{"):
                raise NoMatchError
        else:
            yield from source.expect("null")
            text = "{}"
        if name is not None:
            self._begin_call(name)
        emit(text)

    def _read_object(self, name: str, *, closer: str = "") -> Read[None]:
        """Read the arguments of a call whose name came before them."""
        yield from self._source.skip_space()
        if (yield from self._source.peek()) != "{":
            raise NoMatchError
        self._begin_call(name)
        yield from copy_nested(self._source, self._add_arguments, closer=closer)


class JsonArrayDetector(JsonCallDetector):
    """The output of a request that is constrained to a list of calls.

    What is no call is the rest of the list, which is this server's own: nobody asked
    for it, and a client would take it for the model's answer.
    """

    bare_opener = "["

    def _emit_text(self, text: str) -> None:
        """Show nothing."""

    def _read_calls(self, opener: str) -> Read[None]:
        yield from self._source.expect("[")
        yield from self._read_list(self._read_call)


def read_string(source: TextSource) -> Read[str]:
    """Read and decode a JSON string.

    Raises:
        NoMatchError: it is none, or it is cut off.
    """
    parts: list[str] = []
    if (yield from source.peek()) != '"':
        raise NoMatchError
    if not (yield from _copy_string(source, parts.append)):
        raise NoMatchError
    try:
        # Models write line breaks into strings.
        text = str(json.loads("".join(parts), strict=False))
        text.encode()  # refuses half of a surrogate pair
        return text
    except ValueError as error:
        raise NoMatchError from error


def skip_value(source: TextSource) -> Read[None]:
    """Read any JSON value."""
    first = yield from source.peek()
    if first in ("{", "["):
        yield from copy_nested(source, _drop, is_strict=True)
    elif first == '"':
        yield from read_string(source)
    else:
        yield from source.copy_before(_SCALAR_STOP, _drop)


def copy_nested(
    source: TextSource, emit: Emit, *, closer: str = "", is_strict: bool = False
) -> Read[None]:
    """Emit an object or a list as it comes, to its last bracket, to the end of the
    text, or before a `closer` outside of its strings.

    Brackets of both kinds are counted, not matched.

    Args:
        is_strict: refuse characters that JSON has only in strings. A text full of
            openers would be read as often as it has some otherwise.

    Raises:
        NoMatchError: there is such a character.
    """
    structure = re.compile(f'["{{}}\\[\\]{re.escape(closer[:1])}]')
    if is_strict:
        structure = _NO_SCALAR
    depth = 0
    while char := (yield from source.copy_before(structure, emit)):
        if char == '"':
            yield from _copy_string(source, emit)
            continue
        if char == closer[:1] and not is_strict:
            if (yield from source.peek(len(closer))) == closer:
                return
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        else:
            raise NoMatchError
        emit((yield from source.take()))
        if depth == 0:
            return


def _copy_string(source: TextSource, emit: Emit) -> Read[bool]:
    """Emit a JSON string as it comes; False where it is cut off."""
    emit((yield from source.take()))
    while char := (yield from source.copy_before(_STRING_STOP, emit)):
        emit((yield from source.take(1 if char == '"' else 2)))
        if char == '"':
            return True
    return False


def _drop(text: str) -> None:
    """Read text and keep none of it."""
