"""Errors of the engine as HTTP answers, and the tag that tells clients apart."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_server import create_app
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.messages.io_struct import (
    BatchOutput,
    FinishReason,
    GenerateBatch,
    GenerateReq,
    RequestOutput,
    SchedulerReady,
    SchedulerRequest,
    decode_request,
    encode,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")


def manager_of(
    send: Callable[[Sequence[SchedulerRequest]], None], **options: Any
) -> TokenizerManager:
    folder = str(bundled_demo_model_path())
    args = ServerArgs(model_path=folder, **options)
    manager = TokenizerManager(
        server_args=args, tokenizer=load_tokenizer(folder), send=send
    )
    manager.set_ready(
        SchedulerReady(
            context_len=99,
            max_req_input_len=98,
            max_total_num_tokens=99,
            max_running_requests=64,
            vocab_size=4096,
        )
    )
    return manager


def post(
    manager: TokenizerManager,
    body: dict[str, Any],
    *,
    peer: str = "10.0.0.1",
    key: str | None = None,
) -> httpx.Response:
    """The answer of `/generate`, once the engine has answered."""
    args = manager.server_args
    app = create_app(Front(server_args=args, manager=manager, model_name="m"))
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await http.post("/generate", json=body, headers=headers)

    return asyncio.run(ask())


BODY: dict[str, Any] = {"text": "x", "sampling_params": {"max_new_tokens": 4}}


def broken_send(messages: Sequence[SchedulerRequest]) -> None:
    raise OSError("the wire is cut")


class Ending:
    """An engine that ends each request with an abort, after a token or two."""

    def __init__(self, status_code: int) -> None:
        self.reason = FinishReason(
            type="abort", message="no grammar today", status_code=status_code
        )
        self.manager = manager_of(self.send)
        self.requests: list[GenerateReq] = []

    def send(self, messages: Sequence[SchedulerRequest]) -> None:
        for message in messages:
            received = decode_request(encode(message))
            if isinstance(received, GenerateBatch):
                (received,) = received.unpack()
            assert isinstance(received, GenerateReq)
            self.requests.append(received)
            loop = asyncio.get_running_loop()
            loop.call_soon(self._answer, received.rid, [40], None)
            loop.call_soon(self._answer, received.rid, [41], self.reason)

    def _answer(
        self, rid: str, output_ids: list[int], reason: FinishReason | None
    ) -> None:
        output = RequestOutput(
            rid=rid,
            output_ids=output_ids,
            prompt_tokens=1,
            completion_tokens=output_ids[0] - 39,
            cached_tokens=0,
            finish_reason=reason,
        )
        self.manager.receive(BatchOutput(outputs=[output]))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("status", [500, 503, 400, 429])
def test_a_request_that_the_engine_ends_is_an_error(
    status: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("sglang").propagate = True
    with caplog.at_level(logging.ERROR, logger="sglang"):
        response = post(Ending(status).manager, BODY | {"stream": stream})
    if response.status_code == 200:
        assert stream
        events = [line for line in response.text.split("\n\n") if line]
        answer = json.loads(events[-2].removeprefix("data: "))
        assert events[-1] == "data: [DONE]" and len(events) >= 3
    else:
        assert response.status_code == status
        answer = response.json()
        assert ("retry-after" in response.headers) == (status in (429, 503))
    error = answer["error"]
    assert error["code"] == status and "no grammar today" in error["message"]
    ids = re.findall(r"error id (\w+)", error["message"])
    assert len(ids) == (status == 500)
    assert all(error_id in caplog.text for error_id in ids)


def test_clients_are_told_apart_by_address_and_key() -> None:
    def tags(asked: list[tuple[str, str | None]], **options: Any) -> list[str]:
        found = []
        for peer, key in asked:
            engine = Ending(499)
            engine.manager = manager_of(engine.send, **options)
            post(engine.manager, BODY, peer=peer, key=key)
            found += [request.client for request in engine.requests]
        return found

    first, same, other = tags([("1.1.1.1", None), ("1.1.1.1", "x"), ("1.1.1.2", "x")])
    # Nobody checks this key: a client may write what it likes.
    assert first == same != other and first
    keyed = tags([("1.1.1.1", "k"), ("1.1.1.2", "k")], api_key="k")
    assert len({*keyed, first, other}) == 4


def test_an_unforeseen_error_is_a_500_with_a_logged_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("sglang").propagate = True
    with caplog.at_level(logging.ERROR, logger="sglang"):
        response = post(manager_of(broken_send), BODY)
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "internal_error" and "wire" not in error["message"]
    error_id = re.findall(r"error id (\w+)", error["message"])[0]
    assert error_id in caplog.text and "the wire is cut" in caplog.text


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
