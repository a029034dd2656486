"""OpenAI's endpoints through OpenAI's own client."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import CONTEXT, Server, greedy

from sglang.srt.entrypoints.openai.logprobs import CompletionLogprobs
from sglang.srt.managers.io_struct import LogprobDelta
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count
from sglang.test.tiny_models import CHAT_TEMPLATE

register_cpu_ci(est_time=15, suite="cpu")

MESSAGES: list[Any] = [{"role": "user", "content": "write a function"}]
PROMPT = "user: write a function\nassistant: "
FIXED: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
KEY = "secret-key"
TEMPLATE = (
    "{% if reasoning_effort %}think: {{ reasoning_effort }}\n{% endif %}"
) + CHAT_TEMPLATE


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Iterator[Server]:
    flags = ("--api-key", KEY, "--enable-cache-report", "--chat-template", TEMPLATE)
    yield start_server(*flags).wait_ready()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


def native(server: Server, prompt: str, **params: Any) -> str:
    """The text that `/generate` gives."""
    body = {"text": prompt, "sampling_params": greedy(**params)}
    headers = {"Authorization": f"Bearer {KEY}"}
    text: str = server.post("/generate", body, headers=headers).json()["text"]
    return text


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "mock"
    assert client.models.retrieve("mock").id == "mock"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.models.retrieve("other")


def test_completion(client: openai.OpenAI, server: Server) -> None:
    answer = client.completions.create(model="mock", prompt="abc", **FIXED)
    (choice,) = answer.choices
    assert choice.text == native(server, "abc", max_new_tokens=16)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 16)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")


@pytest.mark.parametrize("prompt", [["a", "b"], [[97], [98]]])
def test_several_prompts_times_n(
    client: openai.OpenAI, server: Server, prompt: Any
) -> None:
    answer = client.completions.create(model="mock", prompt=prompt, n=2, **FIXED)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [native(server, text, max_new_tokens=16) for text in "aabb"]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 64)


def test_completion_stream_with_usage(client: openai.OpenAI, server: Server) -> None:
    stream = client.completions.create(
        model="mock",
        prompt="abc",
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
        **FIXED,
    )
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == native(server, "abc", max_new_tokens=30)
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert not last.choices and last.usage is not None
    assert last.usage.completion_tokens == 30
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.completions.create(
        model="mock",
        prompt="ab",
        max_tokens=3,
        echo=True,
        logprobs=2,
        stream=stream,
        **FIXED,
    )
    choices = [c.choices[0] for c in answer] if stream else answer.choices
    assert choices[0].text.startswith("ab")
    shown = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for part in shown for token in part.tokens]
    assert tokens[:2] == ["a", "b"] and len(tokens) == 5
    logprobs = [value for part in shown for value in part.token_logprobs]
    assert logprobs[0] is None and all(value <= 0 for value in logprobs[1:])
    offsets = [value for part in shown for value in part.text_offset]
    assert offsets[:3] == [0, 1, 2] and offsets == sorted(offsets)
    assert shown[-1].top_logprobs[-1] is not None


DEMO = load_tokenizer(str(bundled_demo_model_path()))


@given(
    prompt=st.text("aé日 \n", max_size=8),
    markers=st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>"]), max_size=2),
    output=st.text("bü🎉 ", max_size=8),
    begins_special=st.booleans(),
    cut=st.integers(0, 40),
)
@settings(max_examples=count(ci=200, full=5000), derandomize=True, deadline=None)
def test_offsets_point_at_the_tokens_in_the_shown_text(
    prompt: str, markers: list[str], output: str, begins_special: bool, cut: int
) -> None:
    """The tokenizer may put a BOS in front, a client writes special tokens as text, an
    output may hold some that are not shown."""
    prompt = "".join([*markers, prompt])
    bos = [0] if begins_special else []
    inputs = bos + DEMO.encode(prompt, add_special_tokens=False)
    outputs = DEMO.encode(output, add_special_tokens=False)
    outputs[cut % (len(outputs) + 1) : 0] = [2]
    logprobs = CompletionLogprobs(DEMO, top=1, prompt_text=prompt)
    first = LogprobDelta(
        input_token=[(None, token) for token in inputs],
        output_token=[(-1.0, token) for token in outputs[:cut]],
    )
    rest = LogprobDelta(output_token=[(-1.0, token) for token in outputs[cut:]])
    parts = [logprobs.add(delta, with_input=True) for delta in (first, rest)]
    names = [name for part in parts for name in part["tokens"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert offsets == sorted(offsets)
    assert len(names) == len(inputs) + len(outputs)
    text = prompt + output
    for i, token in enumerate(inputs + outputs):
        is_shown = token not in DEMO.special_ids or (len(bos) <= i < len(inputs))
        if is_shown and not names[i].startswith("bytes:"):
            assert text.startswith(names[i], offsets[i])


def test_parts_of_a_character_have_names_of_their_own() -> None:
    """One name for all of them would leave one entry of `top_logprobs`."""
    parts = DEMO.encode("日", add_special_tokens=False)
    assert len(parts) == 3
    delta = LogprobDelta(
        output_token=[(-1.0, parts[0])],
        output_top=[[(-1.0 - i, token) for i, token in enumerate(parts)]],
    )
    shown = CompletionLogprobs(DEMO, top=3).add(delta, with_input=False)
    assert shown["tokens"] == [r"bytes:\xe6"]
    assert shown["top_logprobs"] == [
        {r"bytes:\xe6": -1.0, r"bytes:\x97": -2.0, r"bytes:\xa5": -3.0}
    ]


def test_max_tokens_zero_with_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="mock", prompt="abcd", max_tokens=0, echo=True, logprobs=0
    )
    (choice,) = answer.choices
    assert choice.text == "abcd"
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert choice.logprobs.tokens == ["a", "b", "c", "d"]


def test_chat(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(
        model="mock", messages=MESSAGES, max_tokens=20, **FIXED
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == native(server, PROMPT, max_new_tokens=20)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.prompt_tokens_details is not None


def test_chat_content_parts_and_developer_role(
    client: openai.OpenAI, server: Server
) -> None:
    parts = [{"type": "text", "text": "write "}, {"type": "text", "text": "a"}]
    messages: list[Any] = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": parts},
    ]
    answer = client.chat.completions.create(
        model="mock", messages=messages, max_completion_tokens=8, **FIXED
    )
    prompt = "system: short\nuser: write a\nassistant: "
    expected = native(server, prompt, max_new_tokens=8)
    assert answer.choices[0].message.content == expected


def test_a_message_without_tool_calls_may_say_so(
    client: openai.OpenAI, server: Server
) -> None:
    messages: list[Any] = [
        {"role": "assistant", "content": "hi", "tool_calls": []},
        {"role": "user", "content": "on", "tool_calls": None},
    ]
    answer = client.chat.completions.create(
        model="mock", messages=messages, max_tokens=4, **FIXED
    )
    expected = native(server, "assistant: hi\nuser: on\nassistant: ", max_new_tokens=4)
    assert answer.choices[0].message.content == expected


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"reasoning_effort": "low", "verbosity": "low"}, "think: low\n"),
        (
            {
                "reasoning_effort": "low",
                "chat_template_kwargs": {"reasoning_effort": "max"},
            },
            "think: max\n",
        ),
    ],
)
def test_the_template_sees_the_reasoning_effort(
    client: openai.OpenAI, server: Server, fields: dict[str, Any], effort: str
) -> None:
    extra = {"ignore_eos": True, **fields}
    answer = client.chat.completions.create(
        model="mock", messages=MESSAGES, max_tokens=8, temperature=0, extra_body=extra
    )
    expected = native(server, effort + PROMPT, max_new_tokens=8)
    assert answer.choices[0].message.content == expected


def test_chat_stream(client: openai.OpenAI, server: Server) -> None:
    stream = client.chat.completions.create(
        model="mock",
        messages=MESSAGES,
        max_tokens=25,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        **FIXED,
    )
    chunks = list(stream)
    roles = [c.choices[0].delta.role for c in chunks[:2]]
    assert roles == ["assistant", "assistant"]
    texts, reasons = {0: "", 1: ""}, {}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    expected = native(server, PROMPT, max_new_tokens=25)
    assert texts == {0: expected, 1: expected}
    assert reasons == {0: "length", 1: "length"}
    usage = chunks[-1].usage
    assert usage is not None and not chunks[-1].choices
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 50)


def test_chat_without_a_limit_runs_to_the_end_of_the_context(
    client: openai.OpenAI,
) -> None:
    messages: list[Any] = [{"role": "user", "content": "x" * (CONTEXT - 40)}]
    answer = client.chat.completions.create(model="mock", messages=messages, **FIXED)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.total_tokens == CONTEXT


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="mock",
        messages=MESSAGES,
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
        **FIXED,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 5
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode(errors="replace") == entry.token


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def test_json_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="mock",
        messages=MESSAGES,
        temperature=0,
        max_tokens=400,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        },
        extra_body={"regex": None},
    )
    content = answer.choices[0].message.content
    assert content is not None
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content)["ok"], bool)
    else:  # white space is allowed between tokens of JSON, and nothing stops this model
        assert content.lstrip().startswith("{")


def test_extensions_and_seeds(client: openai.OpenAI) -> None:
    def sample(seed: int, **extra: Any) -> str:
        answer = client.completions.create(
            model="mock",
            prompt="x",
            seed=seed,
            extra_body={"ignore_eos": True, "min_p": 0.01, "top_k": 50, **extra},
        )
        return answer.choices[0].text

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    answer = client.completions.create(
        model="mock", prompt="x", extra_body={"regex": "[0-9]{4}"}
    )
    assert answer.choices[0].text.isdigit()


def test_stop_is_reported(client: openai.OpenAI, server: Server) -> None:
    text = native(server, "abc", max_new_tokens=100)
    stop = next(c for c in text[5:] if c.isascii() and c.isprintable())
    answer = client.completions.create(
        model="mock", prompt="abc", max_tokens=100, stop=stop, **FIXED
    )
    (choice,) = answer.choices
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra == {"matched_stop": stop}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "between 0 and 20"),
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
        "tool_calls is not supported",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type is 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"chat_template_kwargs": {"messages": []}}, "not a free variable"),
    ({"stream_options": {"include_usage": True}}, "needs stream: true"),
    ({"max_tokens": -1}, "max_tokens must be at least 0"),
    ({"temperature": 9e29, "top_p": 2}, "top_p must be in"),
    ({"nonsense": 1}, "unknown field 'nonsense'"),
    ({"n": 0}, "n must be between 1 and 128"),
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
        ({"logprobs": 99}, "logprobs must be between 0 and 20"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": [1, "a"]}, "prompt must be"),
        ({"prompt": [1, [2]]}, "mixes"),
        ({"prompt": [True]}, "prompt must be"),
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
        ({"max_tokens": 9999}, "max_tokens is 9999, but behind", "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens \(9\) must", "min_tokens"),
        ({"seed": 2**63}, "seed must be between", "seed"),
        ({"seed": -(2**63) - 1}, "seed must be between", "seed"),
        ({"logit_bias": {"999": 1}}, "logit_bias holds token id 999", "logit_bias"),
        ({"stop_token_ids": [999]}, "stop_token_ids holds", "stop_token_ids"),
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
    message, param = refusal(chat, messages=MESSAGES, max_completion_tokens=9999)
    assert param == "max_completion_tokens" and param in message
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}
    message, param = refusal(chat, messages=MESSAGES, response_format=schema)
    assert param == "response_format" and param in message


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_seeds_have_a_sign(client: openai.OpenAI, seed: int) -> None:
    texts = {
        client.completions.create(model="mock", prompt="x", seed=seed).choices[0].text
        for _ in range(2)
    }
    assert len(texts) == 1


def test_unknown_models_are_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x", stream=True)


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
