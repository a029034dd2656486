"""The fields with which a router pairs a prefill engine and a decode engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sglang.srt.managers.messages.errors import BadRequest
from sglang.srt.managers.messages.io_struct import Bootstrap

_DEFAULT_PORT = 8998
_MAX_PORT = 65535
_MAX_ROOM = (1 << 63) - 1
_MAX_HOST_CHARS = 255


class BootstrapFields(Protocol):
    """The address of the prefill engine's bootstrap server, and the number of the
    request there. Lists have one entry per prompt or per output."""

    bootstrap_host: str | list[str | None] | None
    bootstrap_port: int | list[int | None] | None
    bootstrap_room: int | list[int | None] | None


def read_bootstraps(
    fields: BootstrapFields, *, prompts: int, copies: int
) -> list[tuple[Bootstrap, ...]]:
    """Return, for each prompt, nothing, one for all of its outputs, or one for each.

    Args:
        prompts: number of prompts. copies: outputs per prompt.

    Raises:
        BadRequest: names the field, the value and what it may be.
    """
    if fields.bootstrap_room is None:
        return [()] * prompts
    entries = [
        _bootstrap(host, port, room)
        for host, port, room in zip(
            *(
                _spread(name, getattr(fields, name), prompts, copies)
                for name in BootstrapFields.__annotations__
            ),
            strict=True,
        )
    ]
    grouped = [entries[i * copies : (i + 1) * copies] for i in range(prompts)]
    return [
        () if None in own else tuple(one for one in own if one is not None)
        for own in grouped
    ]


def _spread(name: str, value: Any, prompts: int, copies: int) -> Sequence[Any]:
    """Return a field's value for each output."""
    if not isinstance(value, list):
        return [value] * (prompts * copies)
    if len(value) == prompts * copies:
        return value
    if len(value) == prompts:
        return [one for one in value for _ in range(copies)]
    raise BadRequest(
        f"{name} has {len(value)} entries for {prompts} prompt(s) with {copies} "
        "output(s) each",
        param=name,
    )


def _bootstrap(
    host: str | None, port: int | None, room: int | None
) -> Bootstrap | None:
    if room is None:
        return None
    port = _DEFAULT_PORT if port is None else port
    for name, value, most in (
        ("bootstrap_room", room, _MAX_ROOM),
        ("bootstrap_port", port, _MAX_PORT),
    ):
        if not 0 <= value <= most:
            raise BadRequest(f"{name} is {value}; it must be 0 to {most}", param=name)
    if host is not None and len(host) > _MAX_HOST_CHARS:
        raise BadRequest(
            f"bootstrap_host has {len(host)} characters; at most {_MAX_HOST_CHARS} "
            "make a host name",
            param="bootstrap_host",
        )
    return Bootstrap(host=host or "", port=port, room=room)
