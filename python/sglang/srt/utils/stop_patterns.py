"""Searches the regular expressions of `stop_regex` in a growing text.

RE2 takes time linear in text and pattern, so no pattern can block the scheduler. Its
result does not depend on time or machine, so all tensor parallel ranks agree.
https://github.com/google/re2/wiki/Syntax: Python's syntax without look-around and
backreferences, `\\z` for `\\Z`, and `\\w`, `\\d`, `\\s` and `\\b` know ASCII only
(`\\pL` is any letter).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import re2

from sglang.srt.utils.quoting import quoted

# Maximum instructions of all patterns of a request together.
MAX_PROGRAM_SIZE = 8192
# Maximum instructions times characters of one search, at worst about 10 ms. Longer
# texts are searched from their end: common patterns compile to about 20 instructions.
MAX_SEARCH_WORK = 1 << 22
MAX_MEMORY_BYTES = 1 << 20
# Maximum number of single characters the search advances after empty matches.
EMPTY_MATCH_WINDOW = 64
# RE2 reads a count that overflows as literal text.
_HUGE_COUNT = re.compile(r"(?<!\\)\{\d*,?\d{9,}")


def compile_stop_patterns(patterns: Sequence[str]) -> tuple[Any, ...]:
    """Compile `patterns`.

    Raises:
        ValueError: a pattern is not an RE2 regular expression, or they are too large.
    """
    compiled, size = [], 0
    for pattern in patterns:
        compiled.append(_compile(pattern))
        size += compiled[-1].programsize
        if size > MAX_PROGRAM_SIZE:
            raise ValueError(
                f"stop_regex is too large at {quoted(pattern)}: its patterns may "
                f"compile to {MAX_PROGRAM_SIZE} instructions together"
            )
    return tuple(compiled)


def _compile(pattern: str) -> Any:
    if _HUGE_COUNT.search(pattern):
        raise ValueError(f"stop_regex {quoted(pattern)} repeats too often")
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = MAX_MEMORY_BYTES
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        (reason,) = error.args
        raise ValueError(
            f"stop_regex {quoted(pattern)} is not a regular expression of RE2 (which "
            "has neither look-around nor backreferences): "
            f"{quoted(reason.decode(errors='replace'))}"
        ) from error
    except UnicodeEncodeError as error:
        raise ValueError(
            f"stop_regex {quoted(pattern)} is not valid Unicode"
        ) from error


class StopPatterns:
    """Finds matches at the end of a growing text.

    A match counts if its last character is new; earlier matches were already reported,
    and the search continues after them. Empty matches do not count.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._sources = tuple(patterns)
        self._patterns = compile_stop_patterns(patterns)
        self._starts = [0] * len(self._patterns)
        size = sum(pattern.programsize for pattern in self._patterns)
        self._window = MAX_SEARCH_WORK // max(size, 1)

    def find(self, text: str, *, known: int) -> str | None:
        """Return the pattern of the first match that ends after `text[:known]`."""
        hits = [
            (start, index)
            for index in range(len(self._patterns))
            if (start := self._find(index, text, known)) is not None
        ]
        return self._sources[min(hits)[1]] if hits else None

    def _find(self, index: int, text: str, known: int) -> int | None:
        """Return where the match of a pattern begins, if there is one."""
        self._starts[index] = max(self._starts[index], len(text) - self._window)
        start = self._starts[index]
        while start < len(text):
            found = self._patterns[index].search(text, start)
            if found is None:
                return None
            if not found.group():
                # Skipped for this text only, because more text may make it longer.
                start = max(found.end() + 1, len(text) - EMPTY_MATCH_WINDOW)
            elif found.end() <= known:
                self._starts[index] = start = found.end()
            else:
                begin: int = found.start()
                return begin
        return None
