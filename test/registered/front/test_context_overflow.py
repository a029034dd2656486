"""Prompts and lengths beyond the context, as each API tells its clients."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from chat_world import READY, ChatWorld
from manager_world import TOKENIZER

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")

ROOM = READY.max_req_input_len
IDS = TOKENIZER.encode("def f(x):\n    return x\n") * 1000
LONG = TOKENIZER.decode(IDS)
TURNS = [{"role": "user", "content": LONG}]
PHRASE = "is longer than the model's context length"
# Path -> a body whose prompt does not fit, and the field that holds it.
OPENAI: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": TURNS}, "messages"),
    "/v1/completions": ({"prompt": LONG}, "prompt"),
    "/v1/responses": ({"input": LONG}, "input"),
    "/generate": ({"text": LONG}, "text"),
}
MESSAGES = "/v1/messages"


def refusal(path: str, body: dict[str, Any], **flags: Any) -> dict[str, Any]:
    response: httpx.Response = ChatWorld(**flags).ask(body, path)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", OPENAI)
def test_openais_clients_know_the_error(path: str, stream: bool) -> None:
    body, field = OPENAI[path]
    error = refusal(path, body | {"stream": stream})
    assert error["code"] == "context_length_exceeded" and PHRASE in error["message"]
    assert error["type"] == "invalid_request_error" and error["param"] == field
    assert error["code"] in error["message"], "OpenAI's client shows langchain the text"


@pytest.mark.parametrize(
    "body",
    [{"input_ids": [1] * (ROOM + 1)}, {"text": "x" * 5_000_000}],
    ids=["ids", "characters"],
)
def test_sizes_that_are_seen_before_tokenization(body: dict[str, Any]) -> None:
    error = refusal("/generate", body)
    assert error["code"] == "context_length_exceeded" and PHRASE in error["message"]


@pytest.mark.parametrize("text", [LONG, "x" * 5_000_000], ids=["tokens", "characters"])
@pytest.mark.parametrize("path", [MESSAGES, MESSAGES + "/count_tokens"])
def test_anthropics_clients_know_the_error(path: str, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}]}
    if path == MESSAGES:
        body["max_tokens"] = 5  # type: ignore[assignment]
    elif text == LONG:
        # Tokens can be counted beyond the context.
        return
    error = refusal(path, body)
    words = error["message"].split()
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: ")
    assert (words[5:7], words[7:]) == (["tokens", ">"], [str(ROOM), "maximum"])
    assert int(words[4]) > ROOM


LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "hi"}]},
        "max_completion_tokens",
    ),
    "/v1/completions": ({"prompt": "x"}, "max_tokens"),
    "/v1/responses": ({"input": "x"}, "max_output_tokens"),
}


@pytest.mark.parametrize("path", LIMITS)
def test_an_output_ends_where_the_context_ends(path: str) -> None:
    body, field = LIMITS[path]
    body = body | {field: ROOM * 2}
    world = ChatWorld("Yes.")
    assert world.ask(body, path).status_code == 200
    error = refusal(path, body, strict_max_tokens=True)
    assert error["code"] == "context_length_exceeded" and error["param"] == field
    assert f"{field} is {ROOM * 2}" in error["message"]
    phrase = "requested token count exceeds the model's maximum context length"
    assert phrase in error["message"] and error["code"] in error["message"]


def test_a_prompt_is_cut_where_the_operator_says_so() -> None:
    asked = {
        "/v1/completions": {"prompt": LONG},
        "/v1/messages": {"messages": TURNS, "max_tokens": 5},
        "/generate": {"text": LONG},
    }
    for path, body in asked.items():
        world = ChatWorld("Yes.", allow_auto_truncate=True)
        response = world.ask(body, path)
        assert response.status_code == 200, response.text
        (sent,) = world.wire.generated()
        assert len(sent.input_ids) == ROOM
        if path != "/v1/messages":
            assert sent.input_ids == TOKENIZER.encode(LONG)[:ROOM]


@pytest.mark.parametrize(
    "body",
    [{"input_ids": IDS}, {"text": "x" * 5_000_000}, {"text": [LONG]}],
    ids=["ids", "characters", "list"],
)
def test_every_prompt_of_generate_is_cut(body: dict[str, Any]) -> None:
    world = ChatWorld("Yes.", allow_auto_truncate=True)
    assert world.ask(body, "/generate").status_code == 200
    (sent,) = world.wire.generated()
    assert len(sent.input_ids) == ROOM


def test_keys_and_models_have_their_codes() -> None:
    world = ChatWorld(api_key="k", strict_model_name=True)
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
    error = world.ask(body).json()["error"]
    assert error["code"] == "invalid_api_key"
    world = ChatWorld(strict_model_name=True)
    response = world.ask(body)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    # Other errors bear their status.
    assert ChatWorld().ask({"messages": 1}).json()["error"]["code"] == 400


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
