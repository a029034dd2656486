"""The listening socket: one owner of an address, and only what the system admits."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from sglang.srt.entrypoints.listener import RESERVED_FILES, listen, max_connections
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")

ROUNDS = 30


def test_of_two_that_start_at_once_one_listens() -> None:
    """Both may bind: the one that comes second finds out when it listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        args = ServerArgs(port=free.getsockname()[1])
    for _ in range(ROUNDS):
        listening: list[socket.socket] = []
        refused: list[ValueError] = []
        line = threading.Barrier(2)

        def start() -> None:
            line.wait()  # noqa: B023
            try:
                listening.append(listen(args))  # noqa: B023
            except ValueError as error:
                refused.append(error)  # noqa: B023

        both = [threading.Thread(target=start) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert len(listening) == 1 and len(refused) == 1
        assert str(refused[0]).startswith("--host 127.0.0.1 --port")
        with socket.create_connection(listening[0].getsockname()):
            pass
        listening[0].close()


@pytest.fixture
def limit_of_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_connections_stay_below_the_limit_of_files(limit_of_files: None) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    wanted = 700
    assert max_connections(ServerArgs(max_connections=wanted)) == wanted
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert soft >= wanted + RESERVED_FILES
    assert max_connections(ServerArgs()) <= soft - RESERVED_FILES
    with pytest.raises(ValueError, match=r"--max-connections 999999999: .*use at most"):
        max_connections(ServerArgs(max_connections=999_999_999))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
