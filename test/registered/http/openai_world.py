"""A server for the tests of OpenAI's endpoints, and requests that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from live_server import Server, greedy

from sglang.test.tiny_models import CHAT_TEMPLATE

MESSAGES: list[Any] = [{"role": "user", "content": "write a function"}]
PROMPT = "user: write a function\nassistant: "
FIXED: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
KEY = "secret-key"
TEMPLATE = (
    "{% if reasoning_effort %}think: {{ reasoning_effort }}\n{% endif %}"
) + CHAT_TEMPLATE


def start_openai_server(start_server: Callable[..., Server]) -> Server:
    """A ready server that asks for `KEY` and has the chat template `TEMPLATE`."""
    flags = ("--api-key", KEY, "--enable-cache-report", "--chat-template", TEMPLATE)
    pages = ("--cors-allow-origins", "*")
    hidden = "--enable-return-hidden-states"
    return start_server(*flags, *pages, hidden).wait_ready()


def native(server: Server, prompt: str, **params: Any) -> str:
    """The text that `/generate` gives."""
    body = {"text": prompt, "sampling_params": greedy(**params)}
    headers = {"Authorization": f"Bearer {KEY}"}
    text: str = server.post("/generate", body, headers=headers).json()["text"]
    return text
