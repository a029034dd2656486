"""Strings that a parser looks for in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple


class Pattern(NamedTuple):
    """Finds literals by the text behind them.

    Fields:
        whole: matches a literal; looks ahead.
        begun: matches an end of a text that may become such a match.
        max_chars: of a match of `begun`.
    """

    whole: re.Pattern[str]
    begun: re.Pattern[str]
    max_chars: int

    def held_back(self, text: str, begin: int) -> int:
        """Return how long the end of `text` is that waits for more."""
        found = self.begun.search(text, max(begin, len(text) - self.max_chars))
        return 0 if found is None else len(text) - found.start()


class Stops(NamedTuple):
    """Literals, and all that they may begin with."""

    whole: re.Pattern[str]
    first: re.Pattern[str]
    prefixes: frozenset[str]
    max_chars: int

    def held_back(self, text: str, begin: int) -> int:
        """Return the length of the longest end of `text`, from `begin` on, that begins
        one of the literals."""
        at = max(begin, len(text) - self.max_chars)
        while found := self.first.search(text, at):
            if text[found.start() :] in self.prefixes:
                return len(text) - found.start()
            at = found.end()
        return 0


@cache
def find_stops(literals: tuple[str, ...]) -> Stops:
    firsts = "".join({re.escape(literal[0]) for literal in literals})
    return Stops(
        whole=re.compile("|".join(map(re.escape, literals)) or r"(?!)"),
        first=re.compile(f"[{firsts}]" if firsts else r"(?!)"),
        prefixes=frozenset(s[:i] for s in literals for i in range(1, len(s))),
        max_chars=max((len(literal) - 1 for literal in literals), default=0),
    )


def held_back(text: str, literals: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins one of `literals`."""
    longest = 0
    for literal in literals:
        for length in range(min(len(literal) - 1, len(text)), longest, -1):
            if text.endswith(literal[:length]):
                longest = length
                break
    return longest
