"""Shared by all formats of reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sglang.srt.utils.text_source import TextParser


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning."""

    text: str


class ReasoningDetector(TextParser[str | Reasoning]):
    """Separates reasoning from text in one output; text pieces are plain strings.

    Args:
        is_open: whether the output begins inside the reasoning, or None for the
            format's default.
        is_raw: whether reasoning keeps its marks, so that the pieces together equal the
            output exactly.

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
        """Whether `prompt` ends inside the reasoning, or None if it does not say."""
        return None

    @classmethod
    def opened_by_message(cls, text: str) -> bool:
        """Whether an assistant message to be continued ends inside the reasoning."""
        return False

    @classmethod
    def opened_in(cls, text: str) -> bool | None:
        """Whether a whole output begins inside the reasoning, or None for the format's
        default.
        """
        return None

    def _say(self, text: str) -> None:
        if text:
            self._out.append(text)

    def _think(self, text: str) -> None:
        """Emit reasoning, holding back white space at its end until more follows."""
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
