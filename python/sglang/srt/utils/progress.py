"""Shows the progress of a start: a bar in a terminal, otherwise occasional lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

# Seconds between two lines. A short phase logs none.
LINE_SECONDS = 5.0


def with_progress(
    items: Iterable[T], *, total: int, what: str, unit: str, logger: logging.Logger
) -> Iterable[T]:
    """Yield `items`, showing how many were consumed.

    Shows a bar on stderr if that is a terminal, otherwise lines of `logger`, or nothing
    if it does not log at INFO.

    Args:
        total: number of items.
        what: name of the phase, shown before the bar or line.
        unit: word for one item.
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
