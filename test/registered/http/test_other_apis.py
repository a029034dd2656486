"""`/v1/responses` and `/v1/messages` of a running server, beside `/generate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from live_server import CONTEXT, Server
from openai_world import KEY, MESSAGES, PROMPT, native, start_openai_server

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="cpu")

FIXED: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
HEADERS = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
# The tiny model says nothing of its own accord: every value is one of few.
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["km", "mile"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
INPUT = MESSAGES[0]["content"]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_openai_server(start_server)


def message(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"max_tokens": 20, "messages": MESSAGES} | FIXED | fields
    answer = server.post("/v1/messages", body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def test_responses(client: openai.OpenAI, server: Server) -> None:
    expected = native(server, PROMPT, max_new_tokens=20)
    asked: dict[str, Any] = {
        "model": "mock",
        "input": INPUT,
        "max_output_tokens": 20,
        "extra_body": FIXED,
    }
    answer = client.responses.create(**asked)
    assert answer.output_text == expected
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(PROMPT), 20)
    assert answer.usage.input_tokens_details.cached_tokens > 0
    text, last = "", None
    for event in client.responses.create(**asked, stream=True):
        text += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    assert text == expected
    assert last is not None and last.type == "response.incomplete"
    assert last.response.usage == answer.usage


def test_a_call_of_a_response(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}
    with client.responses.stream(
        model="mock",
        input=INPUT,
        tools=[tool],
        tool_choice={"type": "function", "name": "f"},
        max_output_tokens=1500,
        temperature=0,
    ) as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["unit"] in ("km", "mile")


def test_messages(server: Server) -> None:
    expected = native(server, PROMPT, max_new_tokens=20)
    answer = message(server)
    assert answer["content"] == [{"type": "text", "text": expected}]
    assert answer["stop_reason"] == "max_tokens"
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(PROMPT)
    assert usage["output_tokens"] == 20
    body = {"messages": MESSAGES}
    counted = server.post("/v1/messages/count_tokens", body, headers=HEADERS)
    assert counted.json() == {"input_tokens": len(PROMPT)}
    # The last message goes on, and stops where it is told to.
    begun = {"role": "assistant", "content": "the"}
    rest = native(server, PROMPT + "the", max_new_tokens=20)
    stop = next(char for char in rest[3:] if char != "\ufffd")
    more = message(server, messages=[*MESSAGES, begun], stop_sequences=[stop])
    assert more["content"] == [{"type": "text", "text": rest[: rest.index(stop)]}]
    assert (more["stop_reason"], more["stop_sequence"]) == ("stop_sequence", stop)


def test_a_stream_of_messages(server: Server) -> None:
    # A reader that is late gets many tokens in one event.
    whole = message(server, max_tokens=1000)
    long = [{"role": "user", "content": "x" * (CONTEXT - 50)}]
    full = message(server, messages=long, max_tokens=9000)
    assert full["stop_reason"] == "model_context_window_exceeded"
    body = {"max_tokens": 1000, "messages": MESSAGES, "stream": True} | FIXED
    with (
        server.client() as client,
        client.stream("POST", "/v1/messages", json=body, headers=HEADERS) as answer,
    ):
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    text = "".join(delta["text"] for delta in deltas)
    assert text == whole["content"][0]["text"] and len(deltas) > 1


def test_a_key_is_asked_for_in_either_header(server: Server) -> None:
    body = {"max_tokens": 1, "messages": MESSAGES}
    bearer = {"Authorization": f"Bearer {KEY}"}
    assert server.post("/v1/messages", body, headers=bearer).status_code == 200
    denied = server.post("/v1/messages", body, headers={"x-api-key": "no"})
    assert denied.status_code == 401
    assert denied.json()["error"]["type"] == "authentication_error"
    large = b'{"messages": "' + b"x" * (33 << 20)
    with server.client(headers=HEADERS) as client:
        refused = client.post("/v1/messages", content=large)
    assert (refused.status_code, refused.json()["type"]) == (413, "error")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
