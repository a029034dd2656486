"""Answers of `/v1/responses` and `/v1/messages` to outputs that arrive in pieces, and
what a client makes of their events."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
from manager_world import TOKENIZER, Wire

from sglang.srt.entrypoints.anthropic.messages_answer import MessagesAnswer
from sglang.srt.entrypoints.chat_blocks import BlockAnswer
from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.openai.chat_submit import SubmittedChat
from sglang.srt.entrypoints.openai.responses_answer import ResponsesAnswer
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesRequest
from sglang.srt.function_call.call_formats import HERMES
from sglang.srt.function_call.core_types import Tool
from sglang.srt.managers.front.prompt_request import PromptRequest
from sglang.srt.managers.front.request_state import Update
from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.srt.parser.output_parser import OutputFormat
from sglang.srt.parser.think_detector import ThinkDetector
from sglang.srt.sampling.sampling_params import SamplingParams

Events = list[dict[str, Any]]
FORM = OutputFormat(
    reasoning=ThinkDetector,
    calls=HERMES,
    tools=(Tool(name="f"), Tool(name="g")),
)
WIRE = Wire()
FRONT = Front(
    server_args=WIRE.manager.server_args, manager=WIRE.manager, model_name="m"
)
MAX_TOKENS = 1000
# Fields that differ from one answer to the next.
_MADE_UP = {"id", "item_id", "call_id", "created_at", "completed_at"}


def make_answer(api: str, *, return_logprob: bool = False) -> BlockAnswer:
    form = OutputFormat() if return_logprob else FORM
    chat = SubmittedChat(
        prompt=PromptRequest(
            prompt="x",
            sampling_params=SamplingParams(max_new_tokens=MAX_TOKENS),
            return_logprob=return_logprob,
        ),
        form=form,
        names=cast("Any", None),
        tokenizer=TOKENIZER,
        group=cast("Any", None),
    )
    if api == "messages":
        return MessagesAnswer(FRONT, chat, model=None)
    asked = ResponsesRequest(input="x")
    return ResponsesAnswer(FRONT, chat, asked, metadata={})


def updates(pieces: Sequence[str], finish: FinishReason, **fields: Any) -> list[Update]:
    """The pieces of an output as they arrive; the last one ends it."""
    return [
        Update(
            index=0,
            rid="r",
            text=piece,
            output_ids=[],
            prompt_tokens=7,
            cached_tokens=0,
            finish_reason=finish if i == len(pieces) - 1 else None,
            e2e_latency=0.0,
            spec_verify_ct=0,
            spec_accept_tokens=0,
            **(
                {"logprobs": None, "hidden_states": None, "completion_tokens": i + 1}
                | fields
            ),
        )
        for i, piece in enumerate(pieces)
    ]


def stable(value: Any) -> Any:
    """The value as clients read it, without what is made up for each answer."""
    if isinstance(value, dict):
        return {k: stable(v) for k, v in value.items() if k not in _MADE_UP}
    return [stable(entry) for entry in value] if isinstance(value, list) else value


def on_the_wire(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def replay_responses(events: Events) -> Events:
    """The output items that a client builds from the events, each in its turn.

    Fails where an event is out of place.
    """
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    items: Events = []
    is_open = False
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open and event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            is_open = True
            continue
        item = items[-1]
        assert is_open and event["output_index"] == len(items) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        is_open = kind != "output_item.done"
        _RESPONSE_STEPS[kind](item, event)
    assert not is_open
    return items


def _grow_part(item: dict[str, Any], event: dict[str, Any]) -> None:
    assert event["delta"] or event["logprobs"]
    part = item["content"][event["content_index"]]
    part["text"] += event["delta"]
    if "logprobs" in part:
        part["logprobs"] += event["logprobs"]


def _check_text(item: dict[str, Any], event: dict[str, Any]) -> None:
    assert item["content"][-1]["text"] == event["text"]


def _add_part(item: dict[str, Any], event: dict[str, Any]) -> None:
    assert event["content_index"] == len(item["content"])
    item["content"].append(event["part"])


def _check_part(item: dict[str, Any], event: dict[str, Any]) -> None:
    assert item["content"][-1]["text"] == event["part"]["text"]


def _grow_arguments(item: dict[str, Any], event: dict[str, Any]) -> None:
    item["arguments"] += event["delta"]


def _check_arguments(item: dict[str, Any], event: dict[str, Any]) -> None:
    assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])


def _end_item(item: dict[str, Any], event: dict[str, Any]) -> None:
    item["status"] = event["item"]["status"]
    assert item == event["item"]


_RESPONSE_STEPS: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "content_part.added": _add_part,
    "content_part.done": _check_part,
    "output_text.delta": _grow_part,
    "output_text.done": _check_text,
    "reasoning_text.delta": _grow_part,
    "reasoning_text.done": _check_text,
    "function_call_arguments.delta": _grow_arguments,
    "function_call_arguments.done": _check_arguments,
    "output_item.done": _end_item,
}


def replay_messages(events: Events) -> Events:
    """The content blocks that a client builds from the events."""
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks: Events = []
    is_open = False
    for event in events[1:-2]:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            is_open = True
            continue
        assert is_open and event["index"] == len(blocks) - 1
        block = blocks[-1]
        if kind == "delta":
            _grow_block(block, event["delta"])
            continue
        assert kind == "stop"
        is_open = False
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("json", "{}"))
    assert not is_open
    return blocks


def _grow_block(block: dict[str, Any], delta: dict[str, Any]) -> None:
    field = {
        "text_delta": "text",
        "thinking_delta": "thinking",
        "signature_delta": "signature",
        "input_json_delta": "partial_json",
    }[delta["type"]]
    assert delta[field]
    target = "json" if field == "partial_json" else field
    block[target] = block.get(target, "") + delta[field]
