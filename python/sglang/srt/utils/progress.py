"""Progress bars of a start, for somebody who watches it in a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def with_bar(
    items: Iterable[T], *, total: int, what: str, unit: str, logger: logging.Logger
) -> Iterable[T]:
    """Return `items`, with a bar on stderr while they are iterated; only in a terminal,
    and where `logger` says what is going on.

    Args:
        total: number of items.
        what: the phase, in front of the bar.
        unit: one item, in words.
    """
    if not sys.stderr.isatty() or not logger.isEnabledFor(logging.INFO):
        return items
    bar: Iterable[T] = tqdm(items, total=total, desc=what, unit=unit, file=sys.stderr)
    return bar
