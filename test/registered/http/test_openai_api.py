"""OpenAI's endpoints through OpenAI's own client: models, refusals, keys, origins."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import openai
import pytest
from live_server import Server, greedy
from openai_world import KEY, MESSAGES, start_openai_server

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=9, suite="cpu")


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_openai_server(start_server)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "mock"
    assert client.models.retrieve("mock").id == "mock"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.models.retrieve("other")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom"}]}, r"tools\[0\].type is 'custom'"),
    ({"functions": [{"name": "f"}]}, "functions is not supported"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21, but at most 20"),
    ({"messages": []}, "messages must not be empty"),
    ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
    ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "text parts only",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": ["text"]}]}]},
        "text parts only",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]},
        r"messages\[0\].tool_calls\[0\] must be",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type is 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"chat_template_kwargs": {"messages": []}}, "not a free variable"),
    ({"max_tokens": -1}, "max_tokens must be at least 0"),
    ({"temperature": 9e29, "top_p": 2}, "top_p must be in"),
    ({"n": 0}, "n must be between 1 and 65536"),
    ({"n": 2000}, "n is 2000, but at most 1024 are served \\(--max-n\\)"),
    ({"logit_bias": {"999": 1}}, "logit_bias holds token id 999"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_chat_refuses_by_name(
    client: openai.OpenAI, change: dict[str, Any], message: str
) -> None:
    body = {"messages": MESSAGES, **change}
    messages = body.pop("messages")
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(model="mock", messages=messages, extra_body=body)
    error = caught.value.body
    assert isinstance(error, dict)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"suffix": "x"}, "suffix is not supported"),
        ({"best_of": 3}, "best_of must equal n"),
        ({"logprobs": 99}, "logprobs is 99, but at most 20"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": [1, "a"]}, "prompt must be"),
        ({"prompt": [1, [2]]}, "prompt must be"),
        ({"prompt": [True]}, r"prompt\[0\]: expected"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [257]}, "outside the vocabulary of 257"),
    ],
)
def test_completion_refuses_by_name(
    client: openai.OpenAI, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(model="mock", prompt="x", extra_body=change)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "message", "param"),
    [
        ({"max_tokens": -1}, "max_tokens must be", "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens \(9\) must", "min_tokens"),
        ({"seed": 2**63}, "seed must be between", "seed"),
        ({"seed": -(2**63) - 1}, "seed must be between", "seed"),
        ({"logit_bias": {"999": 1}}, "logit_bias holds token id 999", "logit_bias"),
        ({"top_k": 2**70}, "top_k must be", "top_k"),
        ({"regex": "(["}, "regex", "regex"),
    ],
)
def test_refusals_name_the_clients_field(
    client: openai.OpenAI,
    change: dict[str, Any],
    message: str,
    param: str,
    stream: bool,
) -> None:
    for ask in (
        partial(client.completions.create, prompt="x"),
        partial(client.chat.completions.create, messages=MESSAGES),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(model="mock", extra_body=change, stream=stream)
        error = caught.value.body
        assert isinstance(error, dict)
        assert re.search(message, error["message"]), error
        assert error["param"] == param
        assert "_new_tokens" not in error["message"]


def test_refusals_name_the_prompt_and_the_newer_fields(client: openai.OpenAI) -> None:
    def refusal(ask: Callable[..., Any], **fields: Any) -> tuple[str, str]:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(model="mock", **fields)
        error = caught.value.body
        assert isinstance(error, dict)
        return error["message"], error["param"]

    complete, chat = client.completions.create, client.chat.completions.create
    for prompt in ("", "x" * 20_000, [], [257], [1] * 5000):
        message, param = refusal(complete, prompt=prompt)
        assert param == "prompt" and "input_ids" not in message, message
    long: list[Any] = [{"role": "user", "content": "x" * 20_000}]
    assert refusal(chat, messages=long)[1] == "messages"
    message, param = refusal(chat, messages=MESSAGES, max_completion_tokens=-1)
    assert param == "max_completion_tokens" and param in message
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}
    message, param = refusal(chat, messages=MESSAGES, response_format=schema)
    assert param == "response_format" and param in message


def test_a_model_of_another_name_is_served_under_it(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="gpt-9", messages=MESSAGES, max_tokens=2
    )
    assert chat.model == "gpt-9"
    answer = client.completions.create(model="gpt-9", prompt="x", max_tokens=2)
    assert answer.model == "gpt-9"


def test_strict_model_names(start_server: Callable[..., Server]) -> None:
    server = start_server("--strict-model-name").wait_ready()
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x", stream=True)
    assert client.completions.create(model="mock", prompt="x").model == "mock"
    body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    assert server.post("/generate", body).status_code == 200
    assert server.post("/generate", body | {"model": "gpt-9"}).status_code == 404


# As SGLang's own router sends them, and fields beside them.
NEUTRAL: dict[str, Any] = {
    "lora_path": None,
    "session_params": None,
    "custom_logit_processor": None,
    "return_hidden_states": False,
    "priority": 0,
    "bootstrap_room": None,
    "data_parallel_rank": None,
    "return_routed_experts": False,
    "structural_tag": None,
    "custom_params": {},
    "user": "u",
    "metadata": {"a": [[], [1]]},
}
NEUTRAL_CHAT: dict[str, Any] = NEUTRAL | {
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
}


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_ask_for_nothing_are_accepted(
    client: openai.OpenAI, stream: bool
) -> None:
    for ask in (
        partial(client.completions.create, prompt="x", extra_body=NEUTRAL),
        partial(
            client.chat.completions.create, messages=MESSAGES, extra_body=NEUTRAL_CHAT
        ),
    ):
        answer = ask(model="mock", max_tokens=2, stream=stream)
        assert not stream or list(answer)


@pytest.mark.parametrize(
    "change",
    [
        {"use_beam_search": True},
        {"data_parallel_rank": 3},
        {"custom_params": {"a": 1}},
        {"session_params": {"id": "x" * 100}},
        {"structural_tag": "{}"},
    ],
)
def test_fields_that_ask_for_more_are_refused_by_name(
    client: openai.OpenAI, change: dict[str, Any]
) -> None:
    (name,) = change
    with pytest.raises(openai.BadRequestError, match=f"{name} is not supported") as at:
        client.completions.create(model="mock", prompt="x", extra_body=change)
    assert isinstance(at.value.body, dict) and at.value.body["param"] == name
    with pytest.raises(openai.BadRequestError, match=f"{name} is not supported"):
        client.chat.completions.create(
            model="mock", messages=MESSAGES, extra_body=change
        )


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    six = {"ignore_eos": True}  # whatever is drawn
    for stream in (
        client.completions.create(
            model="mock",
            prompt="x",
            max_tokens=6,
            stream=True,
            stream_options=options,
            extra_body=six,
        ),
        client.chat.completions.create(
            model="mock",
            messages=MESSAGES,
            max_tokens=6,
            stream=True,
            stream_options=options,
            extra_body=six,
        ),
    ):
        counts = [chunk.usage.completion_tokens for chunk in stream]
        assert counts == sorted(counts) and counts[-1] == 6


def test_a_salt_keeps_prefixes_apart(client: openai.OpenAI) -> None:
    prompt = "the same prompt, long enough to be kept in the prefix cache " * 3

    def cached(**fields: str) -> int:
        answer = client.completions.create(
            model="mock", prompt=prompt, max_tokens=1, extra_body=fields
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") > 0
    assert cached(cache_salt="b") == 0
    assert cached(cache_salt="a", extra_key="x") == 0
    assert cached(extra_key="ax") == 0, "salt and key are told apart"
    assert cached(cache_salt="a", extra_key="x") > 0


def test_the_key_is_asked_for_except_by_probes_and_scrapers(server: Server) -> None:
    for path, status in (
        ("/health", 200),
        ("/health_generate", 200),
        ("/metrics", 404),  # open, but this server has none
    ):
        assert server.get(path).status_code == status, path
    for path in (
        "/v1/models",
        "/get_server_info",
        "/metrics/x",
        "/health/",
        "/nothing",
    ):
        response = server.get(path)
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"] == "Bearer"
        assert "API key" in response.json()["error"]["message"]
    wrong = server.get("/v1/models", headers={"Authorization": b"Bearer \xc3\xa9"})
    assert wrong.status_code == 401


def test_browsers_may_ask_from_any_page(server: Server) -> None:
    """A preflight brings no key; answers, streams and errors carry the permission."""
    origin = {"Origin": "http://page.example"}
    preflight = {
        **origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with server.client() as client:
        path = "/v1/chat/completions"
        response = client.request("OPTIONS", path, headers=preflight)
    assert response.status_code == 200
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"]
    with_key = {**origin, "Authorization": f"Bearer {KEY}"}
    body = {"text": "x", "stream": True, "sampling_params": greedy(max_new_tokens=2)}
    for headers, status in ((with_key, 200), (origin, 401)):
        answer = server.post("/generate", body, headers=headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "*"
    plain = server.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    assert "access-control-allow-origin" not in plain.headers


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
