"""A real server on a tiny model, as a process of its own, for the tests of the wire."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from sglang.test.harness import SHARED_GPU_CHUNK, SHARED_GPU_TOKENS
from sglang.test.server_process import ServerProcess

CONTEXT = 2048
# As in `EngineHarness`: a server that is free to choose takes most of the GPU.
SHARE_OF_GPU = {
    "--max-total-tokens": str(SHARED_GPU_TOKENS),
    "--chunked-prefill-size": str(SHARED_GPU_CHUNK),
}


class Server(ServerProcess):
    """A server on `model` (None: the demo model) and short ways to ask it.

    Attributes:
        headers: sent with every request, such as a key.
    """

    def __init__(
        self, model: Path | None, flags: Sequence[str], *, is_forked: bool = True
    ) -> None:
        command = list(flags)
        if model is not None:
            command += ["--model-path", str(model), "--served-model-name", "mock"]
        if torch.cuda.is_available():
            for flag, value in SHARE_OF_GPU.items():
                command += [] if flag in flags else [flag, value]
        self.headers: dict[str, str] = {}
        super().__init__(command, is_forked=is_forked)

    def wait_ready(self) -> Server:
        super().wait_ready()
        return self

    def client(self, **options: Any) -> httpx.Client:
        # A client that may meet TLS loads all certificates first: 40 ms of CPU.
        defaults = {
            "timeout": 60,
            "trust_env": False,
            "verify": False,
            "headers": self.headers,
        }
        return httpx.Client(base_url=self.url, **(defaults | options))

    def post(self, path: str, content: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=content, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)

    def generate(self, prompt: str | list[int], **params: Any) -> dict[str, Any]:
        """One greedy answer of `/generate`."""
        key = "text" if isinstance(prompt, str) else "input_ids"
        body = {key: prompt, "sampling_params": greedy(**params)}
        response = self.post("/generate", body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.get("/get_server_info").json()["internal_states"][
            0
        ]
        return stats

    def wait_running(self, count: int) -> None:
        """Until `count` requests are in flight; each must be long enough to be seen."""
        deadline = time.monotonic() + 20
        while self.get("/get_server_info").json()["num_in_flight"] < count:
            assert time.monotonic() < deadline, self.stats()
            time.sleep(0.005)

    def wait_idle(self, seconds: float = 20.0) -> None:
        """Until nothing is in flight; then no KV slot may be held by a request."""
        deadline = time.monotonic() + seconds
        while self.get("/get_server_info").json()["num_in_flight"]:
            assert time.monotonic() < deadline, self.stats()
            time.sleep(0.02)
        while self.stats()["num_running_reqs"] or self.stats()["num_queue_reqs"]:
            assert time.monotonic() < deadline, self.stats()
        assert self.stats()["num_used_tokens"] == 0


def greedy(**params: Any) -> dict[str, Any]:
    """Sampling parameters of a repeatable answer that only its length ends."""
    return {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 16} | params


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, without the closing `[DONE]`, which must be there."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines), lines
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
