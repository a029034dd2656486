"""The Harmony format of gpt-oss: an output of several messages, each with a channel."""

from __future__ import annotations

import re

from sglang.srt.parser.reasoning_detector import ReasoningDetector
from sglang.srt.utils.text_source import NoMatchError, Read

OPENERS = ("<|start|>", "<|channel|>")
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")

_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_RECIPIENT = re.compile(r"\bto=")


class HarmonyDetector(ReasoningDetector):
    """Messages on the `analysis` channel are reasoning; messages without a recipient
    are text. A message to a tool keeps its header, for the tool call detector.
    """

    marks = (*OPENERS, MESSAGE, *ENDS, "<|constrain|>")

    def _run(self) -> Read[None]:
        source = self._source
        opener = yield from source.copy_until(OPENERS, self._say)
        while opener is not None:
            header = yield from self._read_header(opener)
            if header is None:
                self._say(opener)
                opener = None
            else:
                opener = yield from self._read_content(header)
            if opener != "<|start|>":
                opener = yield from source.copy_until(OPENERS, self._say)

    def _read_header(self, opener: str) -> Read[str | None]:
        """Read to the beginning of the content; returns None if no header comes
        next.
        """
        source = self._source
        parts = [opener]
        source.mark()
        try:
            found = yield from source.copy_until((MESSAGE,), parts.append)
        except NoMatchError:
            found = None
        if found is None:
            source.rewind()
            return None
        source.commit()
        return "".join(parts) + MESSAGE

    def _read_content(self, header: str) -> Read[str | None]:
        """Read the content of a message; returns the mark that ends it."""
        if _RECIPIENT.search(header):
            self._say(header)
            end = yield from self._source.copy_until(ENDS, self._say)
            if end is not None and end != "<|start|>":
                self._say(end)
            return end
        self._mark(header)
        is_thought = _ANALYSIS.search(header) is not None
        emit = self._think if is_thought else self._say
        end = yield from self._source.copy_until(ENDS, emit)
        if end is not None and end != "<|start|>":
            self._mark(end)
        if is_thought and not self._is_raw:
            self._held = ["\n"]  # between two passages
        return end
