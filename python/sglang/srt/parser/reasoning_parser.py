"""Reasoning formats by their names in `--reasoning-parser`.

A detector splits an output into reasoning and the text after it. Whether an output
begins with reasoning depends on the end of its prompt, where some models' templates
open or close the passage.
"""

from __future__ import annotations

from sglang.srt.parser.harmony_detector import HarmonyDetector
from sglang.srt.parser.reasoning_detector import Reasoning, ReasoningDetector
from sglang.srt.parser.think_detector import (
    AppendedThinkDetector,
    ForcedThinkDetector,
    Gemma4Detector,
    KimiDetector,
    KimiK2Detector,
    MistralDetector,
    ThinkDetector,
)

DETECTORS: dict[str, type[ReasoningDetector]] = {
    "deepseek-r1": ForcedThinkDetector,
    "deepseek-v3": ThinkDetector,
    "deepseek-v31": ThinkDetector,
    "deepseek-v4": ThinkDetector,
    "gemma4": Gemma4Detector,
    "glm45": ThinkDetector,
    "gpt-oss": HarmonyDetector,
    "interns1": ThinkDetector,
    "kimi": KimiDetector,
    "kimi_k2": KimiK2Detector,
    "mimo": ThinkDetector,
    "minimax": ForcedThinkDetector,
    "minimax-append-think": AppendedThinkDetector,
    "mistral": MistralDetector,
    "nemotron_3": ForcedThinkDetector,
    "qwen3": ThinkDetector,
    "qwen3-thinking": ForcedThinkDetector,
    "step3": ForcedThinkDetector,
    "step3p5": ForcedThinkDetector,
}


def split_reasoning(text: str, *, parser: str) -> tuple[str, str]:
    """Split a whole output into reasoning and text, given the name of a format.

    There is no prompt that says whether the output begins inside the reasoning, but an
    end mark without a beginning implies it.
    """
    kind = DETECTORS[parser]
    detector = kind(is_open=kind.opened_in(text))
    pieces = [*detector.push(text), *detector.finish()]
    reasoning = "".join(p.text for p in pieces if isinstance(p, Reasoning))
    return reasoning, "".join(piece for piece in pieces if isinstance(piece, str))
