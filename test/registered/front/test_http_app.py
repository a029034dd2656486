"""Errors that nobody foresaw: 500 with an id that is also in the log."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence

import httpx
import pytest

from sglang.srt.entrypoints.front import Front
from sglang.srt.entrypoints.http_server import create_app
from sglang.srt.managers.io_struct import SchedulerReady, SchedulerRequest
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")


def broken_send(messages: Sequence[SchedulerRequest]) -> None:
    raise OSError("the wire is cut")


def test_an_unforeseen_error_is_a_500_with_a_logged_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = str(bundled_demo_model_path())
    args = ServerArgs(model_path=folder)
    manager = TokenizerManager(
        server_args=args, tokenizer=load_tokenizer(folder), send=broken_send
    )
    manager.set_ready(
        SchedulerReady(
            context_len=99,
            max_req_input_len=98,
            max_total_num_tokens=99,
            vocab_size=4096,
        )
    )
    app = create_app(Front(server_args=args, manager=manager, model_name="m"))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
            return await http.post("/generate", json=body)

    logging.getLogger("sglang").propagate = True
    with caplog.at_level(logging.ERROR, logger="sglang"):
        response = asyncio.run(ask())
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "internal_error" and "wire" not in error["message"]
    error_id = re.findall(r"error id (\w+)", error["message"])[0]
    assert error_id in caplog.text and "the wire is cut" in caplog.text


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
