"""Limits the work and text of one rendering of a chat template.

A template comes with a checkpoint and its variables from clients. Jinja's sandbox keeps
both away from the interpreter, but does not stop them from looping for hours or
doubling a text until memory runs out. This module defines what a rendering may spend,
and how large a value is. Shared parts of a value count as often as they are referenced:
a list that contains another list twice, and so on, is small in memory but endless to
compare, sort, hash or print.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Set, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2.utils import Namespace

MAX_STEPS = 500_000
# Maximum of one text and of all output; more than the largest request body.
MAX_CHARS = 64 << 20
# Processor time, which is not used up by a busy machine or other threads.
MAX_SECONDS = 10.0
STEPS_PER_CLOCK = 1024
CHARS_PER_STEP = 16384
# Each entry of a container counts as this many characters, because visiting it takes
# time.
ENTRY_CHARS = 64
# Maximum nesting of containers. Hashing and printing recurse on the C stack.
MAX_DEPTH = 500
CONTAINERS = (list, tuple, Mapping, Set, ValuesView, Namespace)


class TemplateTooExpensive(jinja2.TemplateError):
    """A rendering that exceeds a bound."""


class Budget:
    """Steps and output characters that one rendering may still use."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._chars = MAX_CHARS
        self._deadline = time.thread_time() + MAX_SECONDS

    def step(self, count: int) -> None:
        before = self._steps // STEPS_PER_CLOCK
        self._steps -= count
        if self._steps < 0:
            raise TemplateTooExpensive(f"it takes more than {MAX_STEPS} steps")
        has_turned = self._steps // STEPS_PER_CLOCK != before
        if has_turned and time.thread_time() > self._deadline:
            raise TemplateTooExpensive(f"it takes more than {MAX_SECONDS:g} s")

    def output(self, chars: int) -> None:
        self._chars -= chars
        if self._chars < 0:
            raise _too_long()


_BUDGET: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


@contextmanager
def limited_rendering() -> Iterator[None]:
    """Scope of one rendering.

    Raises:
        TemplateTooExpensive: the template exceeded a bound.
    """
    token = _BUDGET.set(Budget())
    try:
        yield
    finally:
        _BUDGET.reset(token)


def charge(steps: int) -> None:
    """Take steps from the budget of the current rendering, if any."""
    budget = _BUDGET.get()
    if budget is not None:
        budget.step(steps)


def output(value: Any) -> Any:
    """Charge for a value that is about to become output."""
    size = text_size(value)
    budget = _BUDGET.get()
    if budget is not None:
        budget.output(size)
    grow(size)
    return value


def grow(chars: int) -> None:
    """Charge for one text before it is built."""
    if chars > MAX_CHARS:
        raise _too_long()
    charge(1 + chars // CHARS_PER_STEP)


def _too_long() -> TemplateTooExpensive:
    return TemplateTooExpensive(f"it makes more than {MAX_CHARS} characters of text")


def text_size(value: Any) -> int:
    """Return the approximate number of characters of a value as text; visits each
    object once.

    Raises:
        TemplateTooExpensive: there are too many characters, or values are nested too
            deeply.
    """
    if not isinstance(value, CONTAINERS):
        return len(value) if isinstance(value, str) else ENTRY_CHARS
    known: dict[int, int] = {}
    # Containers on the path to the current one: entries left, size of the others.
    path: list[tuple[Any, Iterator[Any]]] = [(value, iter(_entries(value)))]
    sizes = [ENTRY_CHARS]
    while True:
        container, left = path[-1]
        for entry in left:
            if isinstance(entry, str):
                sizes[-1] += len(entry)
            elif not isinstance(entry, CONTAINERS):
                sizes[-1] += ENTRY_CHARS
            elif id(entry) in known:
                sizes[-1] += known[id(entry)]
            else:
                path.append((entry, iter(_entries(entry))))
                sizes.append(ENTRY_CHARS)
                break
        else:
            path.pop()
            size = known[id(container)] = sizes.pop()
            if size > MAX_CHARS:
                raise _too_long()
            if not path:
                return size
            sizes[-1] += size
        if len(path) > MAX_DEPTH:
            raise TemplateTooExpensive(f"it nests values more than {MAX_DEPTH} deep")


def _entries(container: Any) -> Iterable[Any]:
    if isinstance(container, Mapping):
        return (part for pair in container.items() for part in pair)
    if isinstance(container, Namespace):
        return _entries(container._Namespace__attrs)
    return container  # type: ignore[no-any-return]
