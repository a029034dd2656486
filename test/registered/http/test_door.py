"""The door of a running server: hostile clients, a stopped scheduler, new keys.

In each test an honest client gets the answer that it always gets.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from live_server import Server, greedy

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="cpu")

CLIENT, ADMIN = "client-key", "admin-key"
MAX_CONNECTIONS = 40
PATIENCE = 15.0


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(CLIENT)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], key_file: Path) -> Server:
    return start_server(
        *("--api-key-file", str(key_file), "--admin-api-key", ADMIN),
        *("--header-timeout", "2", "--body-timeout", "2"),
        *("--health-timeout", "2", "--max-connections", str(MAX_CONNECTIONS)),
    ).wait_ready()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def bystander(server: Server) -> Iterator[httpx.Client]:
    """An honest client; its greedy answer must be the same before and after."""
    body = {"text": "bystander", "sampling_params": greedy(max_new_tokens=30)}
    with server.client(headers=bearer(CLIENT)) as client:
        before = client.post("/generate", json=body).json()["output_ids"]
        yield client
        after = client.post("/generate", json=body).json()["output_ids"]
    assert before == after and len(before) == 30
    status_becomes(server, "/health", 200)
    assert "Traceback" not in server.log()


def status_becomes(server: Server, path: str, status: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while server.get(path).status_code != status:
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.05)


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def test_silent_and_slow_clients_take_nobodys_place(server: Server) -> None:
    """Twice as many as connections are admitted."""
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
    head += f"Authorization: Bearer {CLIENT}\r\n\r\n".encode()
    starts = (b"", head[:20], head)
    with bystander(server) as client:
        slow = [connect(server) for _ in range(2 * MAX_CONNECTIONS)]
        for i, one in enumerate(slow):
            one.sendall(starts[i % len(starts)])
        assert client.get("/v1/models").status_code == 200
        for i, one in enumerate(slow):
            answer = one.recv(4096)
            # There is no place for those that have come last with a request.
            legal = {0: (b"",), 1: (b"408",), 2: (b"408", b"503")}[i % len(starts)]
            assert answer.startswith(tuple(b"HTTP/1.1 " * bool(c) + c for c in legal))
            one.close()
    assert len(server.wait_for_lines("--max-connections admits")) <= 2


def test_a_stopped_scheduler_is_not_healthy(server: Server) -> None:
    with bystander(server):
        os.kill(server.scheduler_pid(), signal.SIGSTOP)
        try:
            for path in ("/health", "/readyz", "/livez"):
                status_becomes(server, path, 503)
            error = server.get("/health").json()["error"]
            assert "--health-timeout" in error["message"]
        finally:
            os.kill(server.scheduler_pid(), signal.SIGCONT)
        for path in ("/health", "/readyz", "/livez"):
            status_becomes(server, path, 200)


def test_a_hangup_has_the_keys_read_again(server: Server, key_file: Path) -> None:
    with bystander(server):
        key_file.write_text(f"{CLIENT}\nnew-key\n")
        assert server.get("/v1/models", headers=bearer("new-key")).status_code == 401
        server.signal(signal.SIGHUP)
        server.wait_for_lines("2 key(s)")
        assert server.get("/v1/models", headers=bearer("new-key")).status_code == 200
        key_file.write_text("")
        server.signal(signal.SIGHUP)
        server.wait_for_lines("the keys stay as they were")
        assert server.get("/v1/models", headers=bearer("new-key")).status_code == 200


def test_only_the_administrator_aborts_all(server: Server) -> None:
    with bystander(server) as client:
        content = {"abort_all": True}
        assert client.post("/abort_request", json=content).status_code == 403
        assert client.post("/flush_cache").status_code == 403
        admin = {"headers": bearer(ADMIN)}
        assert server.post("/abort_request", content, **admin).status_code == 200
        assert server.post("/flush_cache", {}, **admin).status_code == 200


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_ends_its_side(server: Server, version: str) -> None:
    body = b'{"text": "half", "sampling_params": {"max_new_tokens": 8}}'
    head = (
        f"POST /generate HTTP/{version}\r\nHost: x\r\n"
        f"Authorization: Bearer {CLIENT}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with bystander(server), connect(server) as one:
        one.sendall(head.encode() + body)
        one.shutdown(socket.SHUT_WR)
        answer = b""
        while part := one.recv(65536):
            answer += part
        assert b"200 OK" in answer and b'"output_ids"' in answer


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
