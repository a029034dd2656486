"""Tool call formats by their names in `--tool-call-parser`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.function_call.call_formats import FORMATS
from sglang.srt.function_call.core_types import CallDelta, Tool

if TYPE_CHECKING:
    from sglang.srt.function_call.base_detector import CallFormat

DETECTORS: dict[str, CallFormat] = FORMATS


class Call(NamedTuple):
    """A complete call; `arguments` is the JSON text, as far as the model wrote it."""

    call_id: str
    name: str
    arguments: str


def collect_calls(deltas: Iterable[CallDelta]) -> list[Call]:
    """Assemble the pieces of all calls of one output."""
    begun: list[CallDelta] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if delta.name is not None:
            begun.append(delta)
            arguments.append([])
        arguments[-1].append(delta.arguments)
    return [
        Call(first.call_id or "", first.name or "", "".join(pieces))
        for first, pieces in zip(begun, arguments, strict=True)
    ]


def parse_calls(
    text: str, *, parser: str, tools: Sequence[Tool]
) -> tuple[str, list[Call]]:
    """Split a whole output into text and calls, given the name of a format."""
    detector = DETECTORS[parser](tools)
    pieces = [*detector.push(text), *detector.finish()]
    shown = "".join(piece for piece in pieces if isinstance(piece, str))
    return shown, collect_calls(p for p in pieces if isinstance(p, CallDelta))
