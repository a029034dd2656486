"""Formats whose calls are JSON objects: Hermes and Qwen, Llama 3, Mistral."""

from __future__ import annotations

import random
import re
import string
from typing import TYPE_CHECKING

from sglang.srt.function_call.json_calls import JsonCallDetector

if TYPE_CHECKING:
    from sglang.srt.utils.text_source import Read


class HermesDetector(JsonCallDetector):
    r"""`<tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>`, as often as
    there are calls (Hermes, Qwen 2.5, Qwen 3)."""

    openers = ("<tool_call>",)
    closer = "</tool_call>"
    marks = (*openers, closer)

    def _read_calls(self, opener: str) -> Read[None]:
        yield from self._source.skip_space()
        yield from self._read_call(closer=self.closer)
        yield from self._skip_any(self.closer)


class Llama3Detector(JsonCallDetector):
    """`{"name": "f", "parameters": {...}}`, after `<|python_tag|>` or as the beginning
    of the output; further calls after a semicolon."""

    openers = ("<|python_tag|>",)
    bare_opener = "{"
    marks = openers

    def _read_calls(self, opener: str) -> Read[None]:
        source = self._source
        yield from source.skip_space()
        yield from self._read_call()
        while True:
            source.mark()
            yield from self._skip_any(";", *self.openers)
            yield from source.skip_space()
            yield from self._read_call()


class MistralDetector(JsonCallDetector):
    """`[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`, or the newer
    `[TOOL_CALLS]f[ARGS]{...}` for each call."""

    openers = ("[TOOL_CALLS]",)
    marks = (*openers, "[ARGS]", "[CALL_ID]")

    # The templates of Mistral's models refuse ids of any other form.
    id_chars = string.ascii_letters + string.digits
    id_length = 9
    _name = re.compile(r"^\s*([^\s\[]+)")

    def _read_calls(self, opener: str) -> Read[None]:
        source = self._source
        yield from source.skip_space()
        first = yield from source.peek()
        if first == "[":
            yield from source.expect("[")
            yield from self._read_list(self._read_call)
        elif first == "{":
            yield from self._read_call()
        else:
            name = yield from self._read_header("[ARGS]", self._name)
            yield from self._read_object(name)

    def _call_id(self, index: int) -> str:
        return "".join(random.choices(self.id_chars, k=self.id_length))


class DeepSeekV3Detector(JsonCallDetector):
    """A section of calls: `function`, a separator, the name, and a block of JSON."""

    openers = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    separator = "<｜tool▁sep｜>"
    closers = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    marks = (*openers, separator, *closers)

    _name = re.compile(rf"function{separator}([^\s]+)\s*$")

    def _read_calls(self, opener: str) -> Read[None]:
        yield from self._skip_any(*self.openers)
        name = yield from self._read_header("```json", self._name)
        yield from self._read_object(name, closer="```")
        yield from self._skip_any("```", *self.closers)


class GptOssDetector(JsonCallDetector):
    """A message to `functions.f` in the Harmony format.

    Messages to nobody are expected to have been told apart before, by the reasoning
    parser of the same name.
    """

    openers = ("<|start|>", "<|channel|>")
    closer = "<|call|>"
    marks = (*openers, "<|message|>", "<|constrain|>", "<|end|>", closer)

    _name = re.compile(r"\bto=functions\.([\w-]+)")

    def _read_calls(self, opener: str) -> Read[None]:
        name = yield from self._read_header("<|message|>", self._name)
        yield from self._read_object(name, closer=self.closer)
        yield from self._skip_any(self.closer)
