"""A tool of a request, and a piece of a call to one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Fields:
        parameters: JSON schema of the arguments, which are an object.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A piece of a call: the first piece has the name, the following ones its
    arguments.

    Fields:
        index: index of the call in the output. name, call_id: set in the first piece,
        None in the others.
        arguments: a fragment of the JSON text; empty in the first piece.
    """

    index: int
    name: str | None = None
    call_id: str | None = None
    arguments: str = ""
