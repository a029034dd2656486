"""The server without `--model-path`: the bundled demo model writes Python."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from live_server import Server

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=12, suite="cpu")

READY_SECONDS = 15
GRAMMAR_ROUNDS = count(ci=2, full=30)


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Iterator[Server]:
    began = time.monotonic()
    running = start_server(model=None).wait_ready()
    assert time.monotonic() - began < READY_SECONDS
    yield running
    running.wait_idle()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as made:
        yield made


def test_completion_is_python(client: openai.OpenAI) -> None:
    prompt = "import os\n\n\ndef read_file(path):\n    with open(path"
    answer = client.completions.create(
        model="demo", prompt=prompt, max_tokens=60, temperature=0
    )
    text = answer.choices[0].text
    line = text.splitlines()[0]
    assert line.count(")") > line.count("("), text
    compile(f"{prompt}{line}\n        pass\n", "answer", "exec")


def test_chat_stream_equals_the_whole_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Add two numbers."}],
        temperature=0,
        max_tokens=80,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    whole = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Add two numbers."}],
        temperature=0,
        max_tokens=80,
    )
    assert whole.choices[0].message.content == text
    assert "\ufffd" not in text and text.strip()


def generate(server: Server, **params: object) -> Any:
    body = {"text": "x", "sampling_params": params}
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_grammar_is_never_too_old(server: Server) -> None:
    """After some 190 outputs all requests for it failed, for good."""
    plain = generate(server, temperature=0.0, max_new_tokens=8)
    regex = r"(\w+ ?){1,300}"
    for seed in range(GRAMMAR_ROUNDS):
        answers = generate(
            server,
            regex=regex,
            temperature=1.0,
            sampling_seed=seed,
            max_new_tokens=200,
            n=8,
        )
        for answer in answers:
            assert answer["meta_info"]["finish_reason"]["type"] in ("stop", "length")
            assert re.fullmatch(regex, answer["text"])
    after = generate(server, temperature=0.0, max_new_tokens=8)
    assert after["output_ids"] == plain["output_ids"]


def test_slow_schemas_of_a_client_that_left_keep_nobody_waiting(server: Server) -> None:
    """They held the compilers for minutes, and others got a 400 after 30 s."""
    patterns = [f"[a-z]*{chr(97 + i % 26)}[a-z]{{{i}}}" for i in range(50)]
    parts = [{"type": "string", "pattern": pattern} for pattern in patterns]
    with server.client() as client:
        for i in range(16):
            schema = json.dumps({"title": str(i), "allOf": parts})
            body = {"text": "x", "sampling_params": {"json_schema": schema}}
            with suppress(httpx.TimeoutException):
                client.post("/generate", json=body, timeout=0.2)
    assert generate(server, regex="[ab]{4}", max_new_tokens=8)["text"]
    assert generate(server, temperature=0.0, max_new_tokens=8)["text"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
