"""Progress of a start: a bar in a terminal, elsewhere a line now and then."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

# Between two lines. A short phase has none.
LINE_SECONDS = 5.0


def with_progress(
    items: Iterable[T], *, total: int, what: str, unit: str, logger: logging.Logger
) -> Iterable[T]:
    """Return `items`, and show how many of them were taken.

    A bar on stderr where that is a terminal, lines of `logger` elsewhere; nothing where
    it does not log at INFO.

    Args:
        total: number of items.
        what: the phase, in front of the bar or line.
        unit: one item, in words.
    """
    if not logger.isEnabledFor(logging.INFO):
        return items
    if not sys.stderr.isatty():
        return _with_lines(items, f"{what}: %d of {total} {unit}s", logger)
    bar: Iterable[T] = tqdm(items, total=total, desc=what, unit=unit, file=sys.stderr)
    return bar


def _with_lines(items: Iterable[T], line: str, logger: logging.Logger) -> Iterator[T]:
    said = time.monotonic()
    for number, item in enumerate(items):
        if time.monotonic() - said >= LINE_SECONDS:
            logger.info(line, number)
            said = time.monotonic()
        yield item
