"""A task beside its owner, who may leave before it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def owned_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start `work`. Its error is its owner's to read, who may be gone by then.

    The loop reports errors of other tasks that nobody has read.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(_read_error)
    return task


def _read_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
