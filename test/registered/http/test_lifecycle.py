"""How a server starts and ends: signals, a dead scheduler, a dead front, bad flags."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Server, greedy

from sglang.bench_utils.crash_dumps import read_crash_dump
from sglang.srt.entrypoints.exit_codes import ExitCode
from sglang.srt.environ import envs
from sglang.test import forked_process
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import POOL_TOKENS, is_full

register_cpu_ci(est_time=16, suite="cpu")

LONG = 2000
WHILE_DRAINING = {"/health": 503, "/readyz": 503, "/livez": 200, "/metrics": 200}


def body(text: str, length: int, *, stream: bool = False) -> dict[str, Any]:
    params = greedy(max_new_tokens=length)
    return {"text": text, "sampling_params": params, "stream": stream}


@pytest.fixture(scope="module")
def start_server(start_server: Callable[..., Server]) -> Callable[..., Server]:
    """Every process with a Python of its own, as users start it; in CI for the tests
    alone that ask for it."""
    return partial(start_server, is_forked=not is_full())


class Stream:
    """A stream that is read in a thread; `wait_first` returns at its first event."""

    def __init__(self, server: Server, text: str, length: int) -> None:
        self._content = body(text, length, stream=True)
        self._server = server
        self._first = threading.Event()
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def wait_first(self) -> None:
        assert self._first.wait(20)

    def last_event(self) -> dict[str, Any]:
        """The event before `[DONE]`, once the stream has ended."""
        self._thread.join(30)
        *_, last, done = self._lines
        assert done == "data: [DONE]"
        event: dict[str, Any] = json.loads(last.removeprefix("data: "))
        return event

    def _read(self) -> None:
        with (
            self._server.client() as client,
            client.stream("POST", "/generate", json=self._content) as response,
        ):
            for line in filter(None, response.iter_lines()):
                self._lines.append(line)
                self._first.set()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state != "Z"


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def owns_socket(pid: int, line: str) -> bool:
    """Whether process `pid` has the socket of this line of /proc/net/unix open."""
    inode = f"socket:[{line.split()[6]}]"
    links = Path(f"/proc/{pid}/fd").iterdir()
    return inode in {os.readlink(link) for link in links}


def test_sigterm_during_load(start_server: Callable[..., Server]) -> None:
    """Short requests finish unchanged, long ones get 503; the exit code says so."""
    flags = ("--drain-timeout", "3", "--enable-metrics")
    server = start_server(*flags).wait_ready()
    scheduler = server.scheduler_pid()
    expected = server.generate("short", max_new_tokens=200)["output_ids"]
    # Longer than the server drains.
    many = {"text": ["long"] * 128, "sampling_params": greedy(max_new_tokens=LONG)}
    with ThreadPoolExecutor(1) as pool:
        streamed = Stream(server, "long", LONG)
        short = Stream(server, "short", 200)
        streamed.wait_first()
        short.wait_first()
        long = pool.submit(server.post, "/generate", many)
        server.wait_running(128)
        server.signal(signal.SIGTERM)
        while server.get("/health").status_code == 200:
            time.sleep(0.005)
        refused = server.post("/generate", body("new", 1))
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "shutting down" in refused.json()["error"]["message"]
        for path, status in WHILE_DRAINING.items():
            assert server.get(path).status_code == status, path
        assert short.last_event()["output_ids"] == expected
        assert long.result(30).status_code == 503
        last = streamed.last_event()
        assert last["error"]["code"] == 503, last
    assert server.wait_exit() == ExitCode.DRAIN_TIMED_OUT
    assert server.lines[-1] == "shut down", server.log()
    assert "--drain-timeout 3 has passed: " in server.log()
    assert not is_alive(scheduler)
    assert "Traceback" not in server.log()


def test_sigint_lets_running_requests_finish(
    start_server: Callable[..., Server],
) -> None:
    server = start_server().wait_ready()
    expected = server.generate("finish me", max_new_tokens=LONG)["output_ids"]
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.generate, "finish me", max_new_tokens=LONG)
        streamed = Stream(server, "finish me", LONG)
        streamed.wait_first()
        server.wait_running(2)
        server.signal(signal.SIGINT)
        assert whole.result(30)["output_ids"] == expected
        assert streamed.last_event()["output_ids"] == expected
    assert server.wait_exit() == ExitCode.DRAINED
    first, second, *_ = server.lines
    assert first.startswith("sglang-canary ") and " loads " in first
    canary = "raise (real data all)" if envs.SGLANG_TEST_KV_CANARY.get() else "off"
    assert second == f"no speculative decoding; KV canary {canary}"
    assert any("INFO Loading MockForCausalLM from" in line for line in server.lines)
    assert server.lines[-1] == "shut down"


def test_a_second_signal_does_not_wait(start_server: Callable[..., Server]) -> None:
    server = start_server().wait_ready()
    streamed = Stream(server, "long", LONG)
    streamed.wait_first()
    began = time.monotonic()
    server.signal()
    server.signal(signal.SIGINT)
    assert streamed.last_event()["error"]["code"] == 503
    assert server.wait_exit() == ExitCode.DRAIN_CUT_SHORT
    assert time.monotonic() - began < 19, "as long as --drain-timeout"


def test_a_dead_scheduler(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """Everything pending gets 500 with an id from the log; the server exits with 1, and
    leaves the requests in a file."""
    folder, key = tmp_path / "dumps", "a-key-of-an-operator"
    flags = ("--crash-dump-folder", str(folder), "--admin-api-key", key)
    server = start_server(*flags).wait_ready()
    server.generate("ended", max_new_tokens=3)
    streamed = Stream(server, "s", LONG)
    streamed.wait_first()
    with ThreadPoolExecutor(8) as pool:
        wholes = [
            pool.submit(server.post, "/generate", body(f"w{i}", LONG)) for i in range(5)
        ]
        server.wait_running(6)
        os.kill(server.scheduler_pid(), signal.SIGKILL)
        answers = [whole.result(20) for whole in wholes]
    last = streamed.last_event()
    assert server.wait_exit() == ExitCode.FAILURE
    # The thread that writes the dump may have the last word.
    assert any("the scheduler process died" in line for line in server.lines[-2:])
    ids = set()
    for answer in answers:
        assert answer.status_code == 500
        message = answer.json()["error"]["message"]
        assert "scheduler process died (signal 9)" in message
        ids.add(re.findall(r"error id (\w+)", message)[0])
    ids.add(re.findall(r"error id (\w+)", last["error"]["message"])[0])
    assert len(ids) == 1
    assert f"error id {ids.pop()}" in server.log()
    (dump,) = folder.iterdir()
    assert stat.S_IMODE(dump.stat().st_mode) == 0o600
    assert key not in dump.read_text()
    assert str(dump) in server.log()
    head = json.loads(dump.read_text().splitlines()[0])
    assert (head["requests"], head["in_flight"]) == (7, 6)
    assert "signal 9" in head["reason"]
    requests = read_crash_dump(dump).requests
    assert sorted({request.output_len for request in requests}) == [3, LONG]


def test_a_front_that_is_killed_takes_the_scheduler_along(
    start_server: Callable[..., Server],
) -> None:
    server = start_server().wait_ready()
    scheduler = server.scheduler_pid()
    (folder,) = {
        Path(line.split()[-1]).parent
        for line in Path("/proc/net/unix").read_text().splitlines()
        if line.endswith("/responses") and owns_socket(server.process.pid, line)
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    server.process.kill()
    wait_gone(scheduler)
    assert not folder.exists()


def test_a_signal_while_the_model_loads(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder that no other test's engine uses, with a name short enough for sockets.
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as own:
        monkeypatch.setenv("TMPDIR", own)
        signal_while_loading(start_server(is_forked=False))
        assert not list(Path(own).glob("sglang-*"))


def signal_while_loading(server: Server) -> None:
    deadline = time.monotonic() + 20
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    while not children.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    scheduler = int(children.read_text().split()[0])
    server.signal(signal.SIGTERM)
    assert server.wait_exit() in (0, -signal.SIGTERM), server.log()
    wait_gone(scheduler)
    assert "Traceback" not in server.log()


def test_requests_before_the_server_is_ready_get_503(
    start_server: Callable[..., Server],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # A forked server may be ready before the first question.
    server = start_server("--port", str(port), is_forked=False)
    url = f"http://127.0.0.1:{port}"
    seen: list[int] = []
    deadline = time.monotonic() + 30
    with httpx.Client(base_url=url, trust_env=False, timeout=5) as client:
        while not seen or seen[-1] != 200:
            assert time.monotonic() < deadline, server.log()
            try:
                if seen[-1:] == [503]:
                    early = client.post("/generate", json=body("x", 1))
                    assert early.status_code in (200, 503)
                seen.append(client.get("/health").status_code)
            except httpx.ConnectError:
                pass
            time.sleep(0.005)
    assert seen[0] == 503 and set(seen) == {200, 503}


def test_a_log_that_cannot_be_written_stops_nothing(mock_model: Path) -> None:
    """A full disk for stdout and a full pipe for stderr, from the first line on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    reader, sender = os.pipe()
    os.set_blocking(sender, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(sender, bytes(4096))
    os.set_blocking(sender, True)
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port)]
    command += ["--model-path", str(mock_model), "--log-requests"]
    command += ["--max-total-tokens", str(POOL_TOKENS)]
    with open("/dev/full", "wb") as full:
        process = forked_process.start_process(
            command, stdout=full.fileno(), stderr=sender, env=os.environ
        )
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
            wait_until_healthy(client)
            for _ in range(20):
                assert client.post("/generate", json=body("x", 3)).status_code == 200
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(sender)


def wait_until_healthy(client: httpx.Client) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.ConnectError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.02)
    raise AssertionError("not healthy")


def test_a_configuration_error_ends_with_one_line_and_code_2() -> None:
    """Of the scheduler, which the front passes on; more are in `test_mistakes.py`."""
    command = [sys.executable, "-m", "sglang.launch_server", "--port", "0"]
    result = forked_process.run([*command, "--tp-size", "4"], timeout=60)
    assert result.returncode == ExitCode.CONFIGURATION_ERROR, result.stderr
    told = [line for line in result.stderr.splitlines() if " INFO Loading" not in line]
    (line,) = told
    assert line.startswith("error: --tp-size 4 "), result.stderr


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
