"""Reasoning between two marks at the beginning of an output.

The formats differ in data: their marks, and whether an output begins inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from sglang.srt.function_call.function_call_parser import DETECTORS as CALL_FORMATS
from sglang.srt.parser.reasoning_detector import ReasoningDetector

if TYPE_CHECKING:
    from sglang.srt.utils.text_source import Read

# A call at the start of a line ends unclosed reasoning, in any call format except
# gpt-oss, whose reasoning works differently. One-character marks such as brackets are
# excluded, because many lines begin with them.
CALL_MARKS = tuple(
    {
        opener: None
        for name, form in CALL_FORMATS.items()
        for opener in form.openers
        if name != "gpt-oss" and len(opener) > 1
    }
)
# Control tokens never occur within a sentence, so they end reasoning anywhere.
_CONTROL_MARKS = [mark for mark in CALL_MARKS if mark.startswith(("<|", "<｜"))]


class ThinkDetector(ReasoningDetector):
    """One passage between two marks at the beginning of the output.

    A tool call ends an unclosed passage. An end mark without a beginning is dropped.

    Class attributes:
        starts, ends: marks of the passage; any of them is accepted.
        begins_open: whether the passage begins without a mark if the prompt does not
            say.
    """

    starts: ClassVar[tuple[str, ...]] = ("<think>",)
    ends: ClassVar[tuple[str, ...]] = ("</think>",)
    marks = (*starts, *ends)
    begins_open: ClassVar[bool] = False

    @classmethod
    def opened_by(cls, prompt: str) -> bool | None:
        tail = prompt.rstrip()
        if tail.endswith(cls.starts):
            return True
        return False if tail.endswith(cls.ends) else None

    @classmethod
    def opened_by_message(cls, text: str) -> bool:
        return max(map(text.rfind, cls.starts)) > max(map(text.rfind, cls.ends))

    @classmethod
    def opened_in(cls, text: str) -> bool | None:
        first = min((at for at in map(text.find, cls.ends) if at >= 0), default=0)
        before = text[:first]
        is_bare = first > 0 and not any(start in before for start in cls.starts)
        return True if is_bare else None

    def _run(self) -> Read[None]:
        space = yield from self._source.skip_space()
        start = yield from self._accept(self.starts)
        is_open = self.begins_open if self._is_open is None else self._is_open
        if start or is_open:
            self._mark(space)
            while start:
                self._mark(start)
                self._mark((yield from self._source.skip_space()))
                start = yield from self._accept(self.starts)
            yield from self._read_passage()
        else:
            self._say(space)
        yield from self._read_text()

    def _read_passage(self) -> Read[None]:
        """Read to the end of the passage; anything that begins a call is text."""
        source = self._source
        found: str | None = "\n"
        while found == "\n":
            self._think((yield from source.skip_space()))
            found = yield from self._accept(CALL_MARKS)
            if not found:
                stops = ("\n", *self.ends, *_CONTROL_MARKS)
                found = yield from source.copy_until(stops, self._think)
                if found == "\n":
                    self._think(found)
        if found is None:
            return
        self._held = []
        if found in self.ends:
            self._mark(found)
            self._mark((yield from source.skip_space()))
        else:
            self._say(found)
            yield from source.copy_until((), self._say)

    def _read_text(self) -> Read[None]:
        """Read the text, dropping end marks without a beginning up to the first
        call.
        """
        num_open = 0
        stops = (*self.starts, *self.ends, *CALL_MARKS)
        while found := (yield from self._source.copy_until(stops, self._say)):
            if found in self.starts:
                num_open += 1
            elif found in CALL_MARKS:
                stops = ()
            elif num_open:
                num_open -= 1
            else:
                self._mark(found)
                continue
            self._say(found)

    def _accept(self, literals: Sequence[str]) -> Read[str]:
        """Read one of `literals` if it comes next, or return an empty text."""
        for literal in literals:
            if (yield from self._source.accept(literal)):
                return literal
        return ""


class ForcedThinkDetector(ThinkDetector):
    """A `ThinkDetector` for models whose output begins inside the passage."""

    begins_open = True


class KimiDetector(ThinkDetector):
    starts = ("◁think▷",)
    ends = ("◁/think▷",)
    marks = (*starts, *ends)


class KimiK2Detector(ThinkDetector):
    """Kimi K2 and later; the marks changed with K2 Thinking."""

    starts = ("<think>", "◁think▷")
    ends = ("</think>", "◁/think▷")
    marks = (*starts, *ends)


class MistralDetector(ThinkDetector):
    starts = ("[THINK]",)
    ends = ("[/THINK]",)
    marks = (*starts, *ends)


class Gemma4Detector(ThinkDetector):
    """A separate channel, whose name follows the token that opens it."""

    starts = ("<|channel>thought",)
    ends = ("<channel|>",)
    marks = ("<|channel>", *ends)


class AppendedThinkDetector(ThinkDetector):
    """Keeps reasoning in the text, which begins with the mark at the end of the prompt,
    because MiniMax clients send it back.
    """

    def _run(self) -> Read[None]:
        space = yield from self._source.skip_space()
        start = yield from self._accept(self.starts)
        if not (start or self._is_raw or self._is_open is False):
            self._say(self.starts[0])
        self._say(space + start)
        yield from self._source.copy_until((), self._say)
