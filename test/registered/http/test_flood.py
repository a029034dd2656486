"""Thousands of requests at once: each gets an answer, and nothing leaks."""

from __future__ import annotations

import asyncio
import json
import resource
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from live_server import Server, greedy

from sglang.bench_utils.memory import resident_mib
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=9, suite="cpu")

REQUESTS = count(ci=2_000, full=10_000)
QUEUE = 1000


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Iterator[Server]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = REQUESTS + 500
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} open files, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield start_server("--max-queued-requests", str(QUEUE)).wait_ready()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def ask(address: tuple[str, str], content: bytes, all_open: asyncio.Event) -> str:
    """One request on a connection of its own; the status of its answer."""
    reader, writer = await asyncio.open_connection(*address)
    all_open.set()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + content)
    answer = await reader.read()
    writer.close()
    status = answer[9:12].decode()
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    if status == "503":
        assert b"retry-after: 1" in answer.lower()
        assert "try again later" in body["error"]["message"]
    else:
        assert len(body["output_ids"]) == 2, answer
    return status


async def flood(server: Server) -> Counter[str]:
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps({"text": "x", "sampling_params": greedy(max_new_tokens=2)})
    event = asyncio.Event()
    asks = (ask((host, port), content.encode(), event) for _ in range(REQUESTS))
    return Counter(await asyncio.wait_for(asyncio.gather(*asks), 120))


def test_every_request_of_a_flood_gets_an_answer(server: Server) -> None:
    expected = server.generate("before", max_new_tokens=20)["output_ids"]
    before = resident_mib(server.process.pid)
    answers = asyncio.run(flood(server))
    assert sum(answers.values()) == REQUESTS
    assert set(answers) <= {"200", "503"}
    assert answers["200"] > QUEUE
    assert resident_mib(server.process.pid) - before < 600
    server.wait_idle()
    assert server.generate("before", max_new_tokens=20)["output_ids"] == expected
    assert "Traceback" not in server.log()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
