"""The client whose request the running task handles: set on entry, read where needed.

A context variable rather than an argument: a route that forgot to pass it on would put
its requests out of their owner's reach.
"""

from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

CALLER: ContextVar[str] = ContextVar("caller", default="")
"""A name derived from the client's key; empty if there are no keys."""

CALLER_SALT: ContextVar[str] = ContextVar("caller_salt", default="")
"""The `cache_salt` that the key file gives the client's key; empty without one."""

PEER: ContextVar[str] = ContextVar("peer", default="")
"""The address the request came from; empty for the offline engine."""

LEAVING: ContextVar[Callable[[], Coroutine[Any, Any, None]] | None] = ContextVar(
    "leaving", default=None
)
"""Waits until the client has left; call it once the body is read."""


def client_tag() -> str:
    """Identify a client by key and address, for sharing resources fairly."""
    return f"{CALLER.get()}@{PEER.get()}"
