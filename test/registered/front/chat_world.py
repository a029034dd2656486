"""`/v1/chat/completions` in this process; the test plays the scheduler."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unittest.mock import patch

import httpx
import openai
from manager_world import FOLDER, TOKENIZER, Wire, ready_for

from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_server import create_app
from sglang.srt.managers.front import tokenizer_manager
from sglang.srt.managers.front.side_work import SideWork
from sglang.srt.managers.messages.io_struct import (
    FinishReason,
    LogprobDelta,
    SchedulerReady,
)
from sglang.srt.utils.hf_tokenizer import load_tokenizer

READY = SchedulerReady(
    context_len=4096,
    max_req_input_len=4095,
    max_total_num_tokens=8192,
    vocab_size=4096,
)
STOP = FinishReason(type="stop")
# Qwen's shape: tools in the system message, reasoning opened by the template on demand.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif enable_thinking %}<think>\n{% endif %}{% endif %}"
)
CHAT_TOKENIZER = load_tokenizer(FOLDER, chat_template=TEMPLATE)
# For all worlds: its process, which renders the template, takes longer to start than
# most tests do.
side_work = functools.cache(SideWork)


class ChatWorld:
    """A front with `flags`, whose outputs are `outputs`, one for each choice.

    Each arrives `step` tokens at a time, each token with a logprob where asked.

    Attributes:
        break_after: messages after which the engine fails; None: it does not.
    """

    def __init__(
        self, *outputs: str, step: int = 1, finish: FinishReason = STOP, **flags: Any
    ) -> None:
        self.break_after: int | None = None
        with patch.object(tokenizer_manager, "SideWork", side_work):
            self.wire = Wire(tokenizer=CHAT_TOKENIZER, **flags)
        manager = self.wire.manager
        manager.set_ready(ready_for(manager.server_args, READY))
        self._outputs = outputs
        self._step = step
        self._finish = finish
        front = Front(
            server_args=self.wire.manager.server_args,
            manager=self.wire.manager,
            model_name="m",
        )
        self._app = create_app(front)

    @property
    def prompt(self) -> str:
        """The prompt of the first request."""
        ids = self.wire.generated()[0].input_ids
        return TOKENIZER.decode(ids, skip_special_tokens=False)

    def ask(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
        """The answer to a plain request."""

        async def post(http: httpx.AsyncClient) -> httpx.Response:
            return await http.post(path, json=body)

        return self._run(post)

    def openai(self, call: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
        """The result of `call` with OpenAI's client."""

        async def work(http: httpx.AsyncClient) -> Any:
            client = openai.AsyncOpenAI(
                base_url="http://x/v1", api_key="k", http_client=http, max_retries=0
            )
            return await call(client)

        return self._run(work)

    def _run(self, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://x"
            ) as http:
                playing = asyncio.create_task(self._play())
                try:
                    return await work(http)
                finally:
                    playing.cancel()

        return asyncio.run(asyncio.wait_for(run(), 20))

    async def _play(self) -> None:
        while len(self.wire.generated()) < len(self._outputs):
            await asyncio.sleep(0.001)  # a process renders the prompt
        for request, text in zip(self.wire.generated(), self._outputs, strict=True):
            ids = TOKENIZER.encode(text)
            for number, at in enumerate(range(0, len(ids), self._step)):
                if number == self.break_after:
                    self.wire.manager.set_dead("the engine ended")
                    return
                part = ids[at : at + self._step]
                is_last = at + self._step >= len(ids)
                logprobs = None
                if request.return_logprob:
                    logprobs = LogprobDelta(
                        input_token=None,
                        input_top=None,
                        output_token=[(-1.0, token) for token in part],
                        output_top=[],
                    )
                self.wire.answer(
                    request.rid,
                    part,
                    self._finish if is_last else None,
                    logprobs=logprobs,
                )
                await asyncio.sleep(0)


def function(name: str, **fields: Any) -> dict[str, Any]:
    """A tool as clients send it."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {
        "type": "function",
        "function": {"name": name, "parameters": schema} | fields,
    }


def body(*tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A request; with tools where there are some."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    if tools:
        asked["tools"] = list(tools)
    return asked | fields


def content_of(chunks: Sequence[Any]) -> str:
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    return "".join(delta.content or "" for delta in deltas)
