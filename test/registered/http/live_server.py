"""A real server on a tiny model, as a process of its own, for the tests of the wire."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from sglang.srt.environ import envs
from sglang.test.harness import SHARED_GPU_CHUNK, SHARED_GPU_TOKENS

READY_SECONDS = 60.0
CONTEXT = 2048
# As in `EngineHarness`: a server that is free to choose takes most of the GPU.
SHARE_OF_GPU = {
    "--max-total-tokens": str(SHARED_GPU_TOKENS),
    "--chunked-prefill-size": str(SHARED_GPU_CHUNK),
}


class Server:
    """`python -m sglang.launch_server` with `flags`; has a `url` once it is ready."""

    def __init__(self, model: Path | None, flags: Sequence[str]) -> None:
        command = [sys.executable, "-m", "sglang.launch_server", "--port", "0"]
        if model is not None:
            command += ["--model-path", str(model), "--served-model-name", "mock"]
        command += flags
        if torch.cuda.is_available():
            for flag, value in SHARE_OF_GPU.items():
                command += [] if flag in flags else [flag, value]
        if envs.SGLANG_TEST_KV_CANARY.get() and "--kv-canary" not in flags:
            command += ["--kv-canary", "raise", "--kv-canary-real-data", "all"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> Server:
        assert self._ready.wait(READY_SECONDS) and self.url, self.log()
        return self

    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_for_lines(self, text: str, count: int = 1) -> list[str]:
        """The lines of the log that contain `text`, once there are `count`: they come
        through a pipe, later than the answers they are about."""
        deadline = time.monotonic() + 10
        while len(found := [line for line in self.lines if text in line]) < count:
            assert time.monotonic() < deadline, f"{text!r} in the log:\n{self.log()}"
            time.sleep(0.02)
        return found

    def scheduler_pid(self) -> int:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)

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

    def wait_idle(self, seconds: float = 20.0) -> None:
        """Until nothing is in flight; then no KV slot may be held by a request."""
        deadline = time.monotonic() + seconds
        while self.get("/get_server_info").json()["num_in_flight"]:
            assert time.monotonic() < deadline, self.stats()
            time.sleep(0.02)
        while self.stats()["num_running_reqs"] or self.stats()["num_queue_reqs"]:
            assert time.monotonic() < deadline, self.stats()
        assert self.stats()["num_used_tokens"] == 0

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait_exit(self, seconds: float = 30.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("ready on "):
                self.url = line.split()[-1]
                self._ready.set()
        self._ready.set()


def greedy(**params: Any) -> dict[str, Any]:
    """Sampling parameters of a repeatable answer that only its length ends."""
    return {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 16} | params


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, without the closing `[DONE]`, which must be there."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines), lines
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
