"""The part that all formats of reasoning share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sglang.srt.utils.text_source import TextParser


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning."""

    text: str


class ReasoningDetector(TextParser[str | Reasoning]):
    """Tells the reasoning of one output apart; the text is a list of plain strings.

    Args:
        is_open: whether the output begins inside the reasoning; None: by the format.
        is_raw: reasoning comes out with its marks, so that the pieces together are the
            output, character by character.

    Class attributes:
        marks: all strings of the format that may be special tokens of a tokenizer.
    """

    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, is_open: bool | None = None, is_raw: bool = False) -> None:
        super().__init__()
        self._is_open = is_open
        self._is_raw = is_raw
        self._held: list[str] = []

    @classmethod
    def opened_by(cls, prompt: str) -> bool | None:
        """Whether `prompt` ends inside the reasoning; None: it does not say."""
        return None

    @classmethod
    def opened_by_message(cls, text: str) -> bool:
        """Whether an assistant's message that is to be continued ends inside it."""
        return False

    @classmethod
    def opened_in(cls, text: str) -> bool | None:
        """Whether a whole output begins inside the reasoning; None: by the format."""
        return None

    def _say(self, text: str) -> None:
        if text:
            self._out.append(text)

    def _think(self, text: str) -> None:
        """Emit reasoning; white space at its end waits for what follows."""
        body = text if self._is_raw else text.rstrip()
        if not body:
            self._held.append(text)
            return
        self._out.append(Reasoning("".join(self._held) + body))
        self._held = [text[len(body) :]]

    def _mark(self, text: str) -> None:
        """Emit a mark, or white space that belongs to it."""
        if self._is_raw and text:
            self._out.append(Reasoning(text))
