"""Reasoning between two marks at the beginning of an output.

The formats differ in data: their marks, and whether an output begins inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sglang.srt.parser.reasoning_detector import ReasoningDetector

if TYPE_CHECKING:
    from sglang.srt.utils.text_source import Read

# What begins the calls of models that think between such marks. A call at the start of
# a line ends reasoning that was never closed.
CALL_MARKS = (
    "<tool_call>",
    "<minimax:tool_call>",
    "<|tool_calls_section_begin|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool_calls_begin｜>",
    "<｜DSML｜",
    "<|tool_call>",
    "[TOOL_CALLS]",
)
# Control tokens, which nobody writes within a sentence: they end it anywhere.
_CONTROLS = ("<|", "<｜")


class ThinkDetector(ReasoningDetector):
    """One passage between two marks at the beginning of the output.

    A call of a tool ends a passage that was never closed. An end that nothing began is
    dropped.

    Class attributes:
        starts, ends: marks of the passage; the formats that have several take any.
        begins_open: whether it begins without a mark where the prompt does not say.
    """

    starts: ClassVar[tuple[str, ...]] = ("<think>",)
    ends: ClassVar[tuple[str, ...]] = ("</think>",)
    marks = (*starts, *ends)
    begins_open: ClassVar[bool] = False

    def __init__(self, *, call_marks: Sequence[str] = (), **options: Any) -> None:
        # A mark of one character, such as a bracket, begins many a line.
        marks = [mark for mark in call_marks if len(mark) > 1]
        super().__init__(
            call_marks=list(dict.fromkeys((*CALL_MARKS, *marks))), **options
        )

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
        """Read to the end of the passage; what begins a call is text."""
        source = self._source
        controls = [mark for mark in self._call_marks if mark.startswith(_CONTROLS)]
        found: str | None = "\n"
        while found == "\n":
            self._think((yield from source.skip_space()))
            found = yield from self._accept(self._call_marks)
            if not found:
                stops = ("\n", *self.ends, *controls)
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
        """Read the text; up to its first call, ends that nothing began are dropped."""
        num_open = 0
        stops = (*self.starts, *self.ends, *self._call_marks)
        while found := (yield from self._source.copy_until(stops, self._say)):
            if found in self.starts:
                num_open += 1
            elif found in self._call_marks:
                stops = ()
            elif num_open:
                num_open -= 1
            else:
                self._mark(found)
                continue
            self._say(found)

    def _accept(self, literals: Sequence[str]) -> Read[str]:
        """Read one of `literals` if it comes next; else return an empty text."""
        for literal in literals:
            if (yield from self._source.accept(literal)):
                return literal
        return ""


class ForcedThinkDetector(ThinkDetector):
    """The same, of models whose output begins inside the passage."""

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
    """A channel of its own, whose name comes after the token that opens it."""

    starts = ("<|channel>thought",)
    ends = ("<channel|>",)
    marks = ("<|channel>", *ends)


class AppendedThinkDetector(ThinkDetector):
    """Reasoning stays in the text, which begins with the mark that the prompt ends
    with, as clients of MiniMax send it back."""

    def _run(self) -> Read[None]:
        space = yield from self._source.skip_space()
        start = yield from self._accept(self.starts)
        if not (start or self._is_raw or self._is_open is False):
            self._say(self.starts[0])
        self._say(space + start)
        yield from self._source.copy_until((), self._say)
