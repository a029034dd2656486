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
CALLED = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
KIMI_CALL = "<|tool_calls_section_begin|>"
CASES = [
    ("qwen3", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", "<think>Hm. a\n", "Hm. a", ""),
    (
        "qwen3",
        "<think>\n\n</think>\n\nYes. <think>no</think>",
        "",
        "Yes. <think>no</think>",
    ),
    # A passage that was never closed ends where a call begins.
    ("qwen3", f"<think>\nHm.\n{CALLED}", "Hm.", CALLED),
    ("qwen3", f"<think>{CALLED}", "", CALLED),
    ("qwen3", f"<think>Hm.\n\n  {CALLED}</think>", "Hm.", f"{CALLED}</think>"),
    ("qwen3", f"<think>As in {CALLED}.</think>Yes.", f"As in {CALLED}.", "Yes."),
    ("qwen3", "<think>Hm.\n<tool_cal", "Hm.\n<tool_cal", ""),
    ("deepseek-r1", "Hm.<｜tool▁calls▁begin｜>f", "Hm.", "<｜tool▁calls▁begin｜>f"),
    ("glm45", "<think>Hm.\n<tool_call>f\n", "Hm.", "<tool_call>f\n"),
    ("kimi_k2", "<think>Hm.<|tool_calls_section_begin|>", "Hm.", KIMI_CALL),
    ("minimax", "Hm.\n<minimax:tool_call>", "Hm.", "<minimax:tool_call>"),
    ("qwen3", "<think>Hm.\n<seed:tool_call>", "Hm.", "<seed:tool_call>"),
    ("step3", "Hm.<｜tool_calls_begin｜>", "Hm.", "<｜tool_calls_begin｜>"),
    ("deepseek-v3", "<think>Hm.<｜DSML｜tool_calls>", "Hm.", "<｜DSML｜tool_calls>"),
    # Repeated marks, and ends that nothing began.
    ("qwen3", "<think><think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", "<think>\n<think>\nHm.</think>\n</think>Yes.", "Hm.", "Yes."),
    ("deepseek-r1", "<think>\n<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", "</think>\nYes.", "", "\nYes."),
    ("qwen3", "<think>Hm.</think>Yes.</think>", "Hm.", "Yes."),
    ("qwen3", "<think>Hm.</think><think>a</think>b", "Hm.", "<think>a</think>b"),
    ("glm45", f"</think>{CALLED}</think>", "", f"{CALLED}</think>"),
    ("qwen3", "<thin", "", "<thin"),
    ("deepseek-v3", "Yes.", "", "Yes."),
    ("deepseek-r1", "Hm.\n</think>\nYes.", "Hm.", "Yes."),
    ("deepseek-r1", "<think>\nHm.</think>Yes. ", "Hm.", "Yes. "),
    ("deepseek-r1", "Hm. </thi", "Hm. </thi", ""),
    ("qwen3-thinking", "Hm.</think>Yes.", "Hm.", "Yes."),
    ("glm45", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("kimi", "◁think▷Hm.◁/think▷Yes.", "Hm.", "Yes."),
    ("kimi_k2", "◁think▷Hm.◁/think▷Yes.", "Hm.", "Yes."),
    ("kimi_k2", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("deepseek-v31", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("minimax", "Hm.</think>Yes.", "Hm.", "Yes."),
    ("minimax-append-think", "\nHm.</think>Yes.", "", "<think>\nHm.</think>Yes."),
    ("minimax-append-think", "<think>Hm.</think>", "", "<think>Hm.</think>"),
    ("mistral", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ("mistral", "[THINK]Hm.[TOOL_CALLS]f", "Hm.[TOOL_CALLS]f", ""),
    ("mistral", "[THINK]Hm.\n[TOOL_CALLS]f", "Hm.", "[TOOL_CALLS]f"),
    ("gemma4", "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    ("nemotron_3", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("step3", "Hm.</think>Yes.", "Hm.", "Yes."),
    ("step3p5", "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
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


@pytest.mark.parametrize("name", ["qwen3", "glm45", "deepseek-v3", "nemotron_3"])
def test_an_end_without_a_beginning_in_a_whole_text(name: str) -> None:
    """No prompt says whether such a text began inside the reasoning: its end does."""
    assert split_reasoning("a thought</think>answer", parser=name) == (
        "a thought",
        "answer",
    )
    text = f"a thought\n{CALLED}\n</think>"
    assert split_reasoning(text, parser=name) == ("a thought", text[10:])


def test_an_end_without_a_beginning_in_an_output_that_began_outside() -> None:
    """What was sent as text stays text; only the mark can be dropped."""
    for is_open in (None, False):
        form = OutputFormat(reasoning=DETECTORS["qwen3"], is_open=is_open)
        for pieces in (["So</think> be it."], "So</think> be it."):
            parsed = ParsedOutput.of(pieces_of(form, pieces))
            assert (parsed.reasoning, parsed.text) == ("", "So be it.")


def test_a_call_of_the_servers_format_ends_reasoning() -> None:
    """Marks of the parser of calls, but for single brackets."""
    for name, call, num_calls in (
        ("qwen3_coder", "<function=now>\n</function>", 1),
        ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}', 1),
        ("pythonic", "[now()]", 0),
    ):
        form = OutputFormat(
            reasoning=DETECTORS["qwen3"],
            calls=CALL_DETECTORS[name],
            tools=(Tool(name="now"),),
        )
        text = f"<think>Hm.\n{call}"
        for pieces in ([text], text):
            parsed = ParsedOutput.of(pieces_of(form, pieces))
            assert len(parsed.calls) == num_calls
            assert parsed.reasoning == (text[7:] if not num_calls else "Hm.")


@pytest.mark.parametrize(
    ("name", "prompt", "is_open"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3-thinking", "assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek-r1", "<|Assistant|>", None),
        ("gpt-oss", "<|start|>assistant", None),
        ("minimax", "]~b]ai\n<think>\n", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("kimi_k2", "assistant<think></think>", False),
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
    *("<tool_call>", "[TOOL_CALLS]", "<|tool_calls_section_begin|>", "[THINK]"),
    *("[/THINK]", "<|channel>thought", "<channel|>", "<minimax:tool_call>", "[/"),
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
