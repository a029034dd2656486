"""Formats of tool calls by the names of `--tool-call-parser`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.function_call.core_types import CallDelta, Tool
from sglang.srt.function_call.json_detectors import (
    DeepSeekV3Detector,
    GptOssDetector,
    HermesDetector,
    Llama3Detector,
    MistralDetector,
)
from sglang.srt.function_call.pythonic_detector import PythonicDetector
from sglang.srt.function_call.qwen3_coder_detector import Qwen3CoderDetector

if TYPE_CHECKING:
    from sglang.srt.function_call.base_detector import ToolCallDetector

DETECTORS: dict[str, type[ToolCallDetector]] = {
    "deepseekv3": DeepSeekV3Detector,
    "gpt-oss": GptOssDetector,
    "hermes": HermesDetector,
    "llama3": Llama3Detector,
    "mistral": MistralDetector,
    "pythonic": PythonicDetector,
    "qwen": HermesDetector,
    "qwen25": HermesDetector,
    "qwen3_coder": Qwen3CoderDetector,
}


class Call(NamedTuple):
    """A whole call; `arguments` is JSON text, as far as the model wrote it."""

    call_id: str
    name: str
    arguments: str


def collect_calls(deltas: Iterable[CallDelta]) -> list[Call]:
    """Put the pieces of all calls of one output together."""
    calls: list[Call] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append(Call(delta.call_id or "", delta.name, ""))
        last = calls[-1]
        calls[-1] = last._replace(arguments=last.arguments + delta.arguments)
    return calls


def parse_calls(
    text: str, *, parser: str, tools: Sequence[Tool]
) -> tuple[str, list[Call]]:
    """Split a whole output into its text and its calls, by the name of a format."""
    detector = DETECTORS[parser](tools)
    pieces = [*detector.push(text), *detector.finish()]
    shown = "".join(piece for piece in pieces if isinstance(piece, str))
    return shown, collect_calls(p for p in pieces if isinstance(p, CallDelta))
