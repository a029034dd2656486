"""Calls written as a Python list: `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.function_call.base_detector import CallFormat
from sglang.srt.function_call.json_calls import JsonCallDetector
from sglang.srt.function_call.json_values import to_json
from sglang.srt.function_call.relaxed_json import RelaxedCopier, load
from sglang.srt.utils.text_source import NoMatchError, Read

if TYPE_CHECKING:
    from sglang.srt.function_call.core_types import Tool

MAX_CALL_CHARS = 1 << 20

_NAME_STOP = re.compile(r"[^\w.-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicFormat(CallFormat):
    """Calls with literal keyword arguments, in a list between marks. A list of calls as
    JSON objects is also accepted.
    """

    def __call__(
        self, tools: Sequence[Tool], *, max_calls: int | None = None
    ) -> PythonicDetector:
        return PythonicDetector(self, tools, max_calls=max_calls)


class PythonicDetector(JsonCallDetector):
    """Calls of a `PythonicFormat`.

    A call is emitted at its last bracket, because only then is it known to be a call.
    """

    def _read_calls(self, opener: str) -> Read[None]:
        source = self._source
        yield from source.skip_space()
        # If the opener is the bracket itself, it has already been read.
        is_list = opener == "[" or (yield from source.accept("["))
        yield from source.skip_space()
        if (yield from source.peek()) != "{":
            if not is_list:
                raise NoMatchError
            yield from self._read_list(self._read_python_call)
        elif is_list:
            yield from self._read_list(self._read_call)
        else:
            yield from self._read_objects()
        yield from self._skip_any(*self._form.closers)

    def _read_python_call(self) -> Read[None]:
        source = self._source
        parts: list[str] = []
        yield from source.copy_before(_NAME_STOP, parts.append)
        name = "".join(parts)
        if name not in self._tools or (yield from source.peek()) != "(":
            raise NoMatchError
        source.extend(MAX_CALL_CHARS)
        parts.clear()
        # Strict: otherwise a text with many nested beginnings of calls would be read
        # many times.
        copier = RelaxedCopier(parts.append, is_strict=True, is_call=True)
        if not (yield from source.copy_through(copier.step)):
            raise NoMatchError
        arguments = to_json(load(parts))
        self._begin_call(name)
        self._add_arguments(arguments)
