"""Rooms above the engine: modules that wrap it from outside and that it never imports.

An environment variable may belong to such a room (`EnvVar.room`). While one is set,
schedulers are built inside the room; otherwise the room is not even loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import rooms_of_set_variables

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def load_room(name: str) -> Any:
    """Import the room's module. Its `opened(server_args)` is a context manager."""
    return importlib.import_module(name)


@contextmanager
def opened_rooms(server_args: ServerArgs) -> Iterator[None]:
    """Open every room with a set variable while a scheduler is built.

    Raises:
        ValueError: a variable does not fit the arguments; names the variable.
    """
    with ExitStack() as stack:
        for name in rooms_of_set_variables():
            stack.enter_context(load_room(name).opened(server_args))
        yield
