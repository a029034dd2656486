"""Reasoning in the formats of models: whole texts, and any fragmentation of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.function_call.core_types import Tool
from sglang.srt.function_call.function_call_parser import DETECTORS as CALL_DETECTORS
from sglang.srt.parser.output_parser import OutputFormat, OutputParser, ParsedOutput
from sglang.srt.parser.reasoning_detector import Reasoning
from sglang.srt.parser.reasoning_parser import DETECTORS, split_reasoning
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

HARMONY = (
    "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>"
    "commentary<|message|>Wait.<|end|><|start|>assistant<|channel|>analysis"
    "<|message|>More.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
)
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json"
    "<|message|>{}"
)
CASES = [
    ("qwen3", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", "<think>Hm. a\n", "Hm. a", ""),
    (
        "qwen3",
        "<think>\n\n</think>\n\nYes. <think>no</think>",
        "",
        "Yes. <think>no</think>",
    ),
    ("qwen3", " Yes </think> ", "", " Yes </think> "),
    ("qwen3", "<thin", "", "<thin"),
    ("deepseek-v3", "Yes.", "", "Yes."),
    ("deepseek-r1", "Hm.\n</think>\nYes.", "Hm.", "Yes."),
    ("deepseek-r1", "<think>\nHm.</think>Yes. ", "Hm.", "Yes. "),
    ("deepseek-r1", "Hm. </thi", "Hm. </thi", ""),
    ("qwen3-thinking", "Hm.</think>Yes.", "Hm.", "Yes."),
    ("glm45", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("kimi", "◁think▷Hm.◁/think▷Yes.", "Hm.", "Yes."),
    ("gpt-oss", HARMONY, "Think.\nMore.", "Wait.Yes."),
    ("gpt-oss", "<|channel|>analysis<|message|>Hm.<|end|>" + CALL, "Hm.", CALL),
    ("gpt-oss", "Yes. <|chan", "", "Yes. <|chan"),
    ("gpt-oss", "<|channel|>final Yes.", "", "<|channel|>final Yes."),
]


def pieces_of(form: OutputFormat, pieces: Sequence[str]) -> list[Any]:
    parser = OutputParser(form)
    return [f for piece in pieces for f in parser.push(piece)] + parser.finish()


@pytest.mark.parametrize(("name", "text", "reasoning", "shown"), CASES)
def test_a_text_and_its_characters_one_by_one(
    name: str, text: str, reasoning: str, shown: str
) -> None:
    assert split_reasoning(text, parser=name) == (reasoning, shown)
    form = OutputFormat(reasoning=DETECTORS[name])
    parsed = ParsedOutput.of(pieces_of(form, text))
    assert (parsed.reasoning, parsed.text) == (reasoning, shown)


@pytest.mark.parametrize(
    ("name", "prompt", "is_open"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3-thinking", "assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek-r1", "<|Assistant|>", None),
        ("gpt-oss", "<|start|>assistant", None),
    ],
)
def test_a_prompt_may_open_or_close_the_reasoning(
    name: str, prompt: str, is_open: bool | None
) -> None:
    assert DETECTORS[name].opened_by(prompt) is is_open


def test_a_closed_passage_wins_over_a_format_that_thinks_always() -> None:
    kind = DETECTORS["qwen3-thinking"]
    form = OutputFormat(reasoning=kind, is_open=False)
    assert pieces_of(form, ["Yes."]) == ["Yes."]
    form = OutputFormat(reasoning=DETECTORS["qwen3"], is_open=True)
    assert pieces_of(form, ["Hm.</think>Yes."]) == [Reasoning("Hm."), "Yes."]


@pytest.mark.parametrize(
    ("text", "is_open"),
    [("<think>a", True), ("<think>a</think>b", False), ("b", False)],
)
def test_a_continued_message_may_end_within_reasoning(text: str, is_open: bool) -> None:
    assert DETECTORS["deepseek-r1"].opened_by_message(text) is is_open


def test_reasoning_in_one_piece() -> None:
    form = OutputFormat(reasoning=DETECTORS["qwen3"], stream_reasoning=False)
    whole = [Reasoning("Hm. a"), *"Yes."]
    assert pieces_of(form, "<think>Hm. a</think>Yes.") == whole
    assert pieces_of(form, "<think>Hm. a") == whole[:1]


WORDS = [
    *("<think>", "</think>", "◁think▷", "◁/think▷", "<thi", " ", "\n", "a", "<"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|"),
    *("analysis", "final", " to=functions.now", "{}", HARMONY, CALL),
]


@st.composite
def fragmented(draw: st.DrawFn) -> list[str]:
    text = "".join(draw(st.lists(st.sampled_from(WORDS), max_size=10)))
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=10).map(sorted))
    ends = [0, *cuts, len(text)]
    return [text[a:b] for a, b in zip(ends, ends[1:], strict=False)]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(DETECTORS)),
    fragmented(),
    st.sampled_from([None, True, False]),
    st.booleans(),
)
def test_fragmentation_changes_nothing(
    name: str, pieces: list[str], is_open: bool | None, stream_reasoning: bool
) -> None:
    kind, text = DETECTORS[name], "".join(pieces)
    form = OutputFormat(
        reasoning=kind, is_open=is_open, stream_reasoning=stream_reasoning
    )
    whole = ParsedOutput.of(pieces_of(form, [text]))
    assert ParsedOutput.of(pieces_of(form, pieces)) == whole
    assert ParsedOutput.of(pieces_of(form, text)) == whole
    # Kept together, nothing is lost.
    form = OutputFormat(reasoning=kind, is_open=is_open, separate_reasoning=False)
    assert "".join(pieces_of(form, pieces)) == text


def test_calls_are_not_searched_in_reasoning() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    text = f"<think>I could {call}.</think>\n{call}"
    for separate, reasoning in ((True, f"I could {call}."), (False, "")):
        form = OutputFormat(
            reasoning=DETECTORS["qwen3"],
            separate_reasoning=separate,
            calls=CALL_DETECTORS["qwen25"],
            tools=(Tool(name="now"),),
        )
        for pieces in ([text], text):
            parsed = ParsedOutput.of(pieces_of(form, pieces))
            assert len(parsed.calls) == 1 and parsed.reasoning == reasoning
            shown = "" if separate else f"<think>I could {call}.</think>\n"
            assert parsed.text == shown


def test_calls_of_gpt_oss_pass_through_the_reasoning() -> None:
    form = OutputFormat(
        reasoning=DETECTORS["gpt-oss"],
        calls=CALL_DETECTORS["gpt-oss"],
        tools=(Tool(name="now"),),
    )
    for pieces in ([HARMONY + CALL], HARMONY + CALL):
        parsed = ParsedOutput.of(pieces_of(form, pieces))
        assert (parsed.reasoning, parsed.text) == ("Think.\nMore.", "Wait.Yes.")
        assert [(call.name, call.arguments) for call in parsed.calls] == [("now", "{}")]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
