"""Whose request the running task handles: set at the door, read where it matters.

A context variable and no argument: a route that forgot to hand it on would put its
requests out of their owner's reach.
"""

from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

CALLER: ContextVar[str] = ContextVar("caller", default="")
"""A name made of the client's key; empty where there are no keys."""

PEER: ContextVar[str] = ContextVar("peer", default="")
"""The address that the request came from; empty for the offline engine."""

LEAVING: ContextVar[Callable[[], Coroutine[Any, Any, None]] | None] = ContextVar(
    "leaving", default=None
)
"""Waits until the client has left; to be called once its body is read."""


def client_tag() -> str:
    """Tells clients apart where they share something: by key and address."""
    return f"{CALLER.get()}@{PEER.get()}"
