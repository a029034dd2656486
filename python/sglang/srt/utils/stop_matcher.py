"""Searches for stop strings and stop patterns in a growing output, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from sglang.srt.utils.stop_patterns import StopPatterns

if TYPE_CHECKING:
    from sglang.srt.utils.detokenizer import IncrementalDetokenizer


class EndMatcher(Protocol):
    """Finds the token that ends an output."""

    def at(self, tokens: Sequence[int]) -> EndMatcher:
        """Return a matcher for the same output that has only seen `tokens`."""

    def push(self, token: int) -> str | None:
        """Add a token; return the stop that it completes, or None."""


class StopMatcher:
    """Finds stop strings and patterns in the output of one request.

    A match contains text of the newest token, because earlier matches were already
    reported. So a stop string is searched in the newest text and in as many preceding
    characters as could begin it.

    Args:
        create_detokenizer: creates a detokenizer for an empty output.
    """

    def __init__(
        self,
        create_detokenizer: Callable[[], IncrementalDetokenizer],
        *,
        stops: Sequence[str],
        patterns: Sequence[str],
    ) -> None:
        self._create_detokenizer = create_detokenizer
        self._detokenizer = create_detokenizer()
        self._stops = tuple(stops)
        self._sources = tuple(patterns)
        self._patterns = StopPatterns(patterns)
        self._text = ""

    def at(self, tokens: Sequence[int]) -> StopMatcher:
        """Return a matcher for the same output that has only seen `tokens`."""
        matcher = StopMatcher(
            self._create_detokenizer, stops=self._stops, patterns=self._sources
        )
        for token in tokens:
            matcher.push(token)
        return matcher

    def push(self, token: int) -> str | None:
        """Add `token`; return the stop string or pattern that now matches, or None.

        Stop strings take precedence over patterns: only they are cut off.
        """
        new_text = self._detokenizer.push(token)
        if not new_text:
            return None
        known = len(self._text)
        self._text += new_text
        hits = [
            (position, stop)
            for stop in self._stops
            if (position := find_stop(self._text, stop, known=known)) >= 0
        ]
        if hits:
            return min(hits)[1]
        return self._patterns.find(self._text, known=known)


def find_stop(text: str, stop: str, *, known: int) -> int:
    """Return the first index of `stop` that extends beyond `text[:known]`, or -1."""
    return text.find(stop, max(known - len(stop) + 1, 0))
