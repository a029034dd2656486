"""KV events of a server: found by a router, followed over TCP, counted in metrics."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from event_world import example, wait_until

import sglang
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kv_blocks import block_hash
from sglang.test.scale import is_full
from sglang.test.server_process import ServerProcess
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=6, suite="cpu")

PAGE = 16
GREEDY = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mock_model(
        tmp_path_factory.mktemp("model") / "mock",
        vocab_size=257,
        max_position_embeddings=512,
    )


def free_ports(number: int) -> list[int]:
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def config_of(*ports: int) -> str:
    endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
    return json.dumps(
        {
            "publisher": "zmq",
            "endpoint": endpoints[0],
            "replay_endpoint": endpoints[1],
            "topic": "kv-events",
        }
    )


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    started = ServerProcess(
        [
            *("--model-path", str(model), "--page-size", str(PAGE), "--enable-metrics"),
            *("--skip-tokenizer-init", "--max-total-tokens", "1024"),
            *("--kv-events-config", config_of(*free_ports(2))),
        ]
    )
    yield started.wait_ready()
    started.stop()


def ask(server: ServerProcess, prompt: list[int], **more: Any) -> list[int]:
    answer = httpx.post(
        server.url + "/generate",
        json={
            "input_ids": prompt,
            "sampling_params": GREEDY,
            **more,
        },
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    return [*prompt, *answer.json()["output_ids"]]


def blocks_of(tokens: list[int]) -> dict[int, list[int]]:
    """Whole pages of a finished request: its last token was never in the cache."""
    blocks, before = {}, None
    for begin in range(0, (len(tokens) - 1) // PAGE * PAGE, PAGE):
        own = tokens[begin : begin + PAGE]
        before = block_hash(before, own, None)
        blocks[before] = own
    return blocks


def test_a_router_finds_follows_and_counts(server: ServerProcess) -> None:
    found = httpx.get(server.url + "/server_info").json()["kv_events"]
    assert found["block_size"] == PAGE and found["topic"] == "kv-events"
    assert found["endpoint"].endswith(f":{found['endpoint_port_base']}")
    cached = example()(found["endpoint"], found["replay_endpoint"], found["topic"])

    def follows(blocks: dict[int, list[int]]) -> bool:
        while cached.read(timeout_ms=10):
            pass
        return cached.blocks == blocks

    first = ask(server, list(range(40)))
    # The subscription may be later than the first request: a second one shows the gap.
    both = blocks_of(first) | blocks_of(ask(server, [*range(33), *range(100, 120)]))
    wait_until(lambda: follows(both), "the blocks of both requests")
    salted = ask(server, list(range(40)), extra_key="tenant")
    wait_until(
        lambda: follows(cached.blocks) and len(cached.blocks) == len(both) + 3,
        "blocks of a namespace beside them",
    )
    assert salted == first
    metrics = httpx.get(server.url + "/metrics").text
    published = re.search(r"sglang:kv_events_published_total\{.*\} (\S+)", metrics)
    assert published is not None and float(published[1]) >= 4
    assert re.search(r"sglang:kv_events_dropped_total\{.*\} 0.0", metrics)
    assert httpx.post(server.url + "/flush_cache").status_code == 200
    wait_until(lambda: follows({}), "nothing is cached")
    cached.events.close(linger=0)
    cached.replays.close(linger=0)


@pytest.mark.skipif(not is_full(), reason="of the whole counts: another process")
def test_a_second_server_on_the_endpoint_is_refused(
    server: ServerProcess, model: Path
) -> None:
    taken = httpx.get(server.url + "/server_info").json()["kv_events_config"]
    second = ServerProcess(
        [
            *("--model-path", str(model), "--skip-tokenizer-init"),
            *("--kv-events-config", taken),
        ]
    )
    assert second.wait_exit(60) == 2
    endpoint = json.loads(taken)["endpoint"]
    (line,) = [line for line in second.lines if "--kv-events-config" in line]
    assert f"endpoint {endpoint} is in use; stop who uses it" in line


@pytest.mark.skipif(not is_full(), reason="of the whole counts: two more processes")
def test_of_two_ranks_one_publishes(model: Path) -> None:
    ports = free_ports(2)
    with sglang.Engine(
        model_path=str(model),
        skip_tokenizer_init=True,
        page_size=PAGE,
        tp_size=2,
        kv_events_config=config_of(*ports),
    ) as engine:
        cached = example()(*(f"tcp://127.0.0.1:{port}" for port in ports))
        answer = engine.generate(
            input_ids=list(range(40)),
            sampling_params=GREEDY,
        )
        expected = blocks_of([*range(40), *answer["output_ids"]])

        def has_replayed() -> bool:
            cached.replay()
            return cached.blocks == expected

        # The answer may be here before its blocks are published.
        wait_until(has_replayed, "the blocks of the request")
        # A second publisher would have told of it all, too, with the same numbers.
        numbers = []
        while cached.events.poll(200):
            numbers.append(int.from_bytes(cached.events.recv_multipart()[1], "big"))
        assert numbers == sorted(set(numbers))
        assert engine.get_server_info()["kv_events"]["block_size"] == PAGE


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
