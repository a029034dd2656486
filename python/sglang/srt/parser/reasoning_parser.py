"""Formats of reasoning by the names of `--reasoning-parser`.

A detector splits an output into its reasoning and the text after it. Whether an output
begins with reasoning depends on the end of its prompt: templates of some models open or
close the passage there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sglang.srt.parser.harmony_detector import HarmonyDetector
from sglang.srt.parser.reasoning_detector import Reasoning, ReasoningDetector

if TYPE_CHECKING:
    from sglang.srt.utils.text_source import Read


class ThinkDetector(ReasoningDetector):
    """One passage between two marks at the beginning of the output.

    Class attributes:
        begins_open: whether it begins without a mark where the prompt does not say.
    """

    start: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    marks = (start, end)
    begins_open: ClassVar[bool] = False

    @classmethod
    def opened_by(cls, prompt: str) -> bool | None:
        tail = prompt.rstrip()
        if tail.endswith(cls.start):
            return True
        return False if tail.endswith(cls.end) else None

    @classmethod
    def opened_by_message(cls, text: str) -> bool:
        return text.rfind(cls.start) > text.rfind(cls.end)

    def _run(self) -> Read[None]:
        source = self._source
        space = yield from source.skip_space()
        starts = yield from source.accept(self.start)
        is_open = self.begins_open if self._is_open is None else self._is_open
        if not (starts or is_open):
            self._say(space)
            yield from source.copy_until((), self._say)
            return
        self._mark(space + self.start * starts)
        self._mark((yield from source.skip_space()))
        if (yield from source.copy_until((self.end,), self._think)) is None:
            return
        self._space = ""
        self._mark(self.end)
        self._mark((yield from source.skip_space()))
        yield from source.copy_until((), self._say)


class ForcedThinkDetector(ThinkDetector):
    """The same, of models whose output begins inside the passage."""

    begins_open = True


class KimiDetector(ThinkDetector):
    start = "◁think▷"
    end = "◁/think▷"
    marks = (start, end)


DETECTORS: dict[str, type[ReasoningDetector]] = {
    "deepseek-r1": ForcedThinkDetector,
    "deepseek-v3": ThinkDetector,
    "glm45": ThinkDetector,
    "gpt-oss": HarmonyDetector,
    "kimi": KimiDetector,
    "qwen3": ThinkDetector,
    "qwen3-thinking": ForcedThinkDetector,
}


def split_reasoning(text: str, *, parser: str) -> tuple[str, str]:
    """Split a whole output into reasoning and text, by the name of a format."""
    detector = DETECTORS[parser]()
    pieces = [*detector.push(text), *detector.finish()]
    reasoning = "".join(p.text for p in pieces if isinstance(p, Reasoning))
    return reasoning, "".join(piece for piece in pieces if isinstance(piece, str))
