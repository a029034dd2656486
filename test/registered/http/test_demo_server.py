"""The server without `--model-path`: the bundled demo model writes Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import openai
import pytest
from live_server import Server

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="cpu")

READY_SECONDS = 15


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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
