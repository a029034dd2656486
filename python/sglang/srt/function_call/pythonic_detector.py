"""Calls written as a Python list: `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from sglang.srt.function_call.base_detector import ToolCallDetector
from sglang.srt.function_call.json_values import to_json
from sglang.srt.utils.text_source import NoMatchError, Read

# Names of JSON that models mix into Python.
CONSTANTS = {"true": True, "false": False, "null": None}

MAX_CALL_CHARS = 1 << 20

_NAME_STOP = re.compile(r"[^\w.-]")
_STRUCTURE = re.compile(r"""["'()\[\]{}]""")
_QUOTES = "\"'"
_STRING_STOP = {quote: re.compile(rf"[{quote}\\]") for quote in _QUOTES}


class PythonicDetector(ToolCallDetector):
    """Calls with keyword arguments that are literals (Llama 3.2, Llama 4).

    A call comes out when its last bracket has come, because only then is it one.
    """

    openers = ("[", "<|python_start|>")
    closer = "<|python_end|>"
    marks = (openers[1], closer)

    def _read_calls(self, opener: str) -> Read[None]:
        source = self._source
        if opener != "[":
            yield from source.skip_space()
            yield from source.expect("[")
        yield from self._read_list(self._read_call)
        yield from self._skip_any(self.closer)

    def _read_call(self) -> Read[None]:
        source = self._source
        parts: list[str] = []
        yield from source.copy_before(_NAME_STOP, parts.append)
        name = "".join(parts)
        if name not in self._tools or (yield from source.peek()) != "(":
            raise NoMatchError
        source.extend(MAX_CALL_CHARS)
        arguments = to_json(keyword_arguments((yield from self._read_brackets())))
        self._begin_call(name)
        self._add_arguments(arguments)

    def _read_brackets(self) -> Read[str]:
        """Read from a bracket to the one that closes it.

        Raises:
            NoMatchError: none does, or there is a call inside. (Texts with many
                beginnings of calls would be read many times otherwise.)
        """
        source = self._source
        parts: list[str] = []
        depth = 0
        while char := (yield from source.copy_before(_STRUCTURE, parts.append)):
            if char == "(" and parts and parts[-1][-1:].isidentifier():
                raise NoMatchError
            parts.append((yield from source.take()))
            if char in _QUOTES:
                yield from self._read_string(char, parts)
                continue
            depth += 1 if char in "([{" else -1
            if depth == 0:
                return "".join(parts)
        raise NoMatchError

    def _read_string(self, quote: str, parts: list[str]) -> Read[None]:
        """Read the rest of a string after its opening quote."""
        source = self._source
        stop = _STRING_STOP[quote]
        while char := (yield from source.copy_before(stop, parts.append)):
            parts.append((yield from source.take(1 if char == quote else 2)))
            if char == quote:
                return


def keyword_arguments(brackets: str) -> dict[str, Any]:
    """Evaluate `(a=1, b=[2])`.

    Raises:
        NoMatchError: no Python, a positional argument, or a value that is no literal.
    """
    try:
        with warnings.catch_warnings():  # of escapes that Python does not know
            warnings.simplefilter("ignore")
            call = ast.parse(f"f{brackets}", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise NoMatchError from error
    if not isinstance(call, ast.Call) or call.args:
        raise NoMatchError
    keywords = {entry.arg: entry.value for entry in call.keywords}
    if None in keywords:  # **name
        raise NoMatchError
    try:
        return {str(name): _literal(value) for name, value in keywords.items()}
    except (ValueError, RecursionError) as error:
        raise NoMatchError from error


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(entry) for entry in node.elts]
    if isinstance(node, ast.Dict):
        return {
            _literal_key(key): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
        }
    return ast.literal_eval(node)


def _literal_key(node: ast.expr | None) -> str:
    key = None if node is None else ast.literal_eval(node)
    if not isinstance(key, str):
        raise ValueError("a key of a JSON object is a string")
    return key
