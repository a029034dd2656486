"""Blocks of an output: in order, the same however it arrives, streamed or whole."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from blocks_world import (
    make_answer,
    on_the_wire,
    replay_messages,
    replay_responses,
    stable,
    updates,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.entrypoints.chat_blocks import BlockMachine, BlockStep
from sglang.srt.function_call.core_types import CallDelta
from sglang.srt.managers.messages.io_struct import FinishReason, LogprobDelta
from sglang.srt.parser.output_parser import Piece
from sglang.srt.parser.reasoning_detector import Reasoning
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="cpu")

STOP = FinishReason(type="stop")
REPLAYS = {"responses": replay_responses, "messages": replay_messages}
words = st.text(alphabet="ab é{", min_size=1, max_size=8).map(lambda text: f".{text}.")
arguments = st.dictionaries(st.sampled_from(["a", "b"]), words | st.integers())


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str, list[tuple[str, Any]]]:
    """An output, and the blocks that are in it."""
    text, blocks = "", list[tuple[str, Any]]()
    if draw(st.booleans()):
        thought = draw(words)
        text += f"<think>\n{thought}\n</think>\n\n"
        blocks.append(("reasoning", thought))
    for kind in draw(st.lists(st.sampled_from(["text", "call"]), max_size=4)):
        if kind == "call":
            name, given = draw(st.sampled_from("fg")), draw(arguments)
            call = json.dumps({"name": name, "arguments": given})
            text += f"<tool_call>\n{call}\n</tool_call>"
            blocks.append(("call", (name, given)))
        elif not blocks or blocks[-1][0] != "text":
            said = draw(words)
            text += said
            blocks.append(("text", said))
    if draw(st.booleans()):
        # The beginning of a mark that never comes: text, known as such at the end.
        text += "<tool"
        said = blocks.pop()[1] if blocks and blocks[-1][0] == "text" else ""
        blocks.append(("text", said + "<tool"))
    return text, blocks or [("text", "")]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in zip(ends, ends[1:], strict=False)] or [""]


def blocks_of(api: str, shown: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The blocks of an answer in the terms of `outputs`."""
    if api == "responses":
        return [
            ("call", (item["name"], json.loads(item["arguments"])))
            if item["type"] == "function_call"
            else (
                "text" if item["type"] == "message" else "reasoning",
                item["content"][0]["text"],
            )
            for item in shown
        ]
    names = {"text": "text", "thinking": "reasoning", "tool_use": "call"}
    return [
        (
            names[block["type"]],
            (block["name"], block["input"])
            if block["type"] == "tool_use"
            else block[block["type"]],
        )
        for block in shown
    ]


@pytest.mark.parametrize("api", REPLAYS)
@settings(max_examples=60, deadline=None)
@given(output=outputs(), places=st.lists(st.integers(0, 120), max_size=60))
def test_any_pieces_of_an_output_give_the_same_blocks(
    api: str, output: tuple[str, list[tuple[str, Any]]], places: list[int]
) -> None:
    text, expected = output
    answer, whole = make_answer(api), make_answer(api)
    news = updates(cut(text, places), STOP)
    events = [on_the_wire(event) for update in news for event in answer.add(update)]
    shown = REPLAYS[api](events)
    assert blocks_of(api, shown) == expected
    key = "output" if api == "responses" else "content"
    assert shown == on_the_wire(answer.body())[key]
    # At once, with the counts that the stream ended with.
    for update in updates([text], STOP):
        whole.add(update)
    body, at_once = (stable(on_the_wire(a.body())) for a in (answer, whole))
    assert body[key] == at_once[key]
    assert set(body) == set(at_once)
    if api == "responses":
        assert stable(events[-1]["response"]) == body
    else:
        assert events[-2]["usage"] == body["usage"]
        assert events[-2]["delta"]["stop_reason"] == body["stop_reason"]


pieces = st.lists(
    st.one_of(
        words,
        words.map(Reasoning),
        st.sampled_from(["", CallDelta(index=0, name="f", call_id="c")]),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(planted=pieces)
def test_one_block_is_open_at_a_time(planted: list[Piece]) -> None:
    machine = BlockMachine()
    events = [event for piece in planted for event in machine.push([piece])]
    events += machine.finish()
    assert machine.blocks and not machine.finish()
    at = 0
    for block in machine.blocks:
        own = [event for event in events if event.block is block]
        assert events[at : at + len(own)] == own, "the events of blocks are mixed"
        at += len(own)
        steps = [event.step for event in own]
        grown = [BlockStep.GROW] * (len(own) - 2)
        assert steps == [BlockStep.OPEN, *grown, BlockStep.CLOSE]
        assert block.text == "".join(event.text for event in own)
    kinds = [block.kind for block in machine.blocks if block.kind.value != "call"]
    assert at == len(events) and (kinds or planted)


@pytest.mark.parametrize("api", REPLAYS)
def test_a_call_that_is_cut_off(api: str) -> None:
    answer = make_answer(api)
    text = 'so<tool_call>\n{"name": "f", "arguments": {"a": 1, "b'
    finish = FinishReason(type="length", length=1000)
    for update in updates([text], finish, completion_tokens=1000):
        answer.add(update)
    body = on_the_wire(answer.body())
    if api == "responses":
        assert body["status"] == "incomplete"
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        said, call = body["output"]
        assert (said["status"], call["status"]) == ("completed", "incomplete")
        assert call["arguments"] == '{"a": 1, "b'
    else:
        assert body["stop_reason"] == "max_tokens"
        assert body["content"][1]["input"] == {"INVALID_JSON": '{"a": 1, "b'}


def test_logprobs_of_a_stream_are_those_of_the_whole() -> None:
    def delta(*tokens: int) -> LogprobDelta:
        return LogprobDelta(output_token=[(-1.0, token) for token in tokens])

    answer = make_answer("responses", return_logprob=True)
    events = []
    # Some tokens add no text of their own, the last among them.
    for text, tokens, finish in (
        ("", [5], None),
        ("ab", [6, 7], None),
        ("", [8], STOP),
    ):
        (update,) = updates([text], STOP, logprobs=delta(*tokens))
        answer_events = answer.add(dataclasses.replace(update, finish_reason=finish))
        events += [on_the_wire(event) for event in answer_events]
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [(e["delta"], len(e["logprobs"])) for e in deltas] == [("ab", 3), ("", 1)]
    (item,) = replay_responses(events)
    assert item["content"][0]["text"] == "ab"
    shown = on_the_wire(answer.body())["output"][0]["content"][0]["logprobs"]
    assert shown == [entry for event in deltas for entry in event["logprobs"]]
    assert set(shown[0]) == {"token", "logprob", "bytes", "top_logprobs"}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
