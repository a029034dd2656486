"""Wraps one method of the engine from outside, until it is undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def wrap(owner: Any, method: str, fault: Callable[..., Any]) -> Callable[[], None]:
    """Call `fault(original, *args)` instead of a method of an object or class. Return
    what restores it.
    """
    original, before = getattr(owner, method), vars(owner).get(method)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return fault(original, *args, **kwargs)

    def restore() -> None:
        if before is None:
            delattr(owner, method)
        else:
            setattr(owner, method, before)

    setattr(owner, method, wrapped)
    return restore
