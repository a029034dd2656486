"""Strings that a parser searches for in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple


class Pattern(NamedTuple):
    """Finds literals that are followed by certain text.

    Fields:
        whole: pattern of a literal, with look-ahead.
        begun: pattern of the end of a text that may become such a match.
        max_chars: maximum length of a match of `begun`.
    """

    whole: re.Pattern[str]
    begun: re.Pattern[str]
    max_chars: int

    def held_back(self, text: str, begin: int) -> int:
        """Return the length of the end of `text` that must wait for more."""
        found = self.begun.search(text, max(begin, len(text) - self.max_chars))
        return 0 if found is None else len(text) - found.start()


class Stops(NamedTuple):
    """Literals and all of their prefixes."""

    whole: re.Pattern[str]
    first: re.Pattern[str]
    prefixes: frozenset[str]
    max_chars: int

    def held_back(self, text: str, begin: int) -> int:
        """Return the length of the longest end of `text[begin:]` that is a prefix of a
        literal.
        """
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
    """Return the length of the longest end of `text` that is a prefix of one of
    `literals`.
    """
    longest = 0
    for literal in literals:
        for length in range(min(len(literal) - 1, len(text)), longest, -1):
            if text.endswith(literal[:length]):
                longest = length
                break
    return longest
