"""Finds stop strings and stop patterns in a growing output, token by token."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sglang.srt.utils.detokenizer import IncrementalDetokenizer


class StopMatcher:
    """Watches the text of one request.

    A stop string is searched in what could contain a new hit: the newest text and as
    many characters before it as the longest stop string. A pattern has no such bound,
    so it is searched in the whole output.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        *,
        stops: Sequence[str],
        patterns: Sequence[str],
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._patterns = tuple(re.compile(pattern) for pattern in patterns)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._text = ""

    def push(self, token: int) -> str | None:
        """The text that matched once `token` is out, or None."""
        new_text = self._detokenizer.push(token)
        if not new_text:
            return None
        start = max(len(self._text) - self._longest, 0)
        self._text += new_text
        hits = [
            (position, stop)
            for stop in self._stops
            if (position := self._text.find(stop, start)) >= 0
        ]
        for pattern in self._patterns:
            found = pattern.search(self._text)
            if found is not None and found.group():
                hits.append((found.start(), found.group()))
        return min(hits)[1] if hits else None
