"""Requests that clients were seen to send, byte for byte but for texts, and what each
client reads of the answers.

`client_requests.jsonl` has one a line. Descriptions and task prompts were shortened; of
Open WebUI's own 28 tools there are eight. `scripts/client_trials` runs the clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live_server import Server, events

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    client: str
    path: str
    body: dict[str, Any]


LINES = (Path(__file__).parent / "client_requests.jsonl").read_text().splitlines()
RECORDED = [Recorded(**json.loads(line)) for line in LINES]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_server("--tool-call-parser", "hermes").wait_ready()


# Each reader returns how many calls a client finds.


def read_calls(calls: list[dict[str, Any]] | None) -> int:
    for call in calls or []:
        assert call["id"] and call["type"] == "function"
        assert call["function"]["name"]
        assert isinstance(call["function"]["arguments"], str)
    return len(calls or [])


def read_chat(answer: dict[str, Any]) -> int:
    (choice,) = answer["choices"]
    message = choice["message"]
    assert message["role"] == "assistant"
    assert message["content"] is not None or message["tool_calls"]
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")
    usage = answer["usage"]
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    assert usage["total_tokens"] == sum(counts)
    assert answer["id"] and answer["created"] and answer["model"] == "mock"
    return read_calls(message["tool_calls"])


def read_chat_stream(chunks: list[dict[str, Any]]) -> int:
    deltas, finishes = [], []
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk" and "usage" in chunk
        for choice in chunk["choices"]:
            deltas.append(choice["delta"])
            finishes.append(choice["finish_reason"])
    assert deltas[0]["role"] == "assistant"
    for delta in deltas:
        assert {"role", "content", "reasoning_content", "tool_calls"} <= delta.keys()
    began: list[dict[str, Any]] = []
    for delta in deltas:
        for call in delta["tool_calls"] or []:
            if call["index"] == len(began):
                began.append(call)
            assert isinstance(call["function"]["arguments"], str)
    *before, last = finishes
    assert set(before) <= {None} and last is not None
    return read_calls(began)


def read_message(answer: dict[str, Any]) -> int:
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    for call in calls:
        assert call["id"] and call["name"] and isinstance(call["input"], dict)
    assert answer["stop_reason"] in ("end_turn", "max_tokens", "tool_use")
    assert answer["usage"]["input_tokens"] and answer["usage"]["output_tokens"]
    return len(calls)


def read_message_stream(shown: list[dict[str, Any]]) -> int:
    kinds = [event["type"] for event in shown]
    assert (kinds[0], kinds[-2:]) == (
        "message_start",
        ["message_delta", "message_stop"],
    )
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") > 0
    assert shown[0]["message"]["usage"]["input_tokens"]
    assert shown[-2]["delta"]["stop_reason"] and shown[-2]["usage"]["output_tokens"]
    begun = [event["content_block"] for event in shown if "content_block" in event]
    return sum(block["type"] == "tool_use" for block in begun)


def read_response(answer: dict[str, Any]) -> int:
    assert answer["object"] == "response" and answer["error"] is None
    assert answer["status"] in ("completed", "incomplete")
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    for call in calls:
        assert call["call_id"] and call["name"] and isinstance(call["arguments"], str)
    assert answer["usage"]["input_tokens"] and answer["usage"]["output_tokens"]
    return len(calls)


def read_response_stream(shown: list[dict[str, Any]]) -> int:
    assert [event["sequence_number"] for event in shown] == [*range(len(shown))]
    assert shown[0]["type"] == "response.created"
    added = [event for event in shown if event["type"] == "response.output_item.added"]
    final = shown[-1]
    assert final["type"] in ("response.completed", "response.incomplete")
    assert len(added) == len(final["response"]["output"])
    return read_response(final["response"])


# Path -> what reads a whole answer, and a stream.
READERS: dict[str, tuple[Callable[[Any], int], Callable[[Any], int]]] = {
    "/v1/chat/completions": (read_chat, read_chat_stream),
    "/v1/messages": (read_message, read_message_stream),
    "/v1/responses": (read_response, read_response_stream),
}


def named_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream in which each bears its type as its name."""
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.client)
def test_what_a_client_reads(server: Server, recorded: Recorded) -> None:
    answer = server.post(recorded.path, recorded.body)
    assert answer.status_code == 200, answer.text
    if recorded.path.endswith("/count_tokens"):
        assert answer.json()["input_tokens"] > 0
        return
    read_whole, read_stream = READERS[recorded.path]
    if not recorded.body.get("stream"):
        num_calls = read_whole(answer.json())
    elif recorded.path == "/v1/chat/completions":
        num_calls = read_stream(events(answer))
    else:
        num_calls = read_stream(named_events(answer.text))
    # The tiny model calls nothing of its own accord, unless it must call or give JSON.
    is_asked = recorded.body.get("tool_choice", "none") != "none"
    if is_asked or "typed answer" not in recorded.client:
        assert (num_calls > 0) == is_asked
