"""A server that heals itself, as its clients and its operator see it."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_server import CONTEXT, Server, greedy

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import count, sampled
from sglang.test.tiny_models import write_mock_draft

register_cpu_ci(est_time=6, suite="cpu", full_time=130)

SECONDS = count(ci=2, full=60)
VOCAB = 257
CLIENTS = 4
FAULTS = (
    *("REQ_TO_TOKEN", "REAL_KV_USED", "REAL_KV_POST_FORWARD"),
    "REAL_KV_UNUSED_CACHE",
)


def metric(server: Server, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = server.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    assert found, name
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def client(server: Server, seed: int, until: float, wrong: list[Any]) -> None:
    """Ask for random continuations, streamed or not, and compare them."""
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB) for _ in range(40)]
    while time.monotonic() < until:
        ids = stem[: rng.randrange(40)] + [rng.randrange(VOCAB) for _ in range(9)]
        body = {
            "input_ids": ids,
            "sampling_params": greedy(max_new_tokens=rng.randrange(1, 60)),
            "stream": rng.random() < 0.5,
        }
        try:
            output = ask(server, body)
        except Exception as error:
            wrong.append(error)
            return
        due = next_tokens(ids + output, vocab_size=VOCAB)[len(ids) - 1 : -1]
        if output != due:
            wrong.append((ids, output))


def ask(server: Server, body: dict[str, Any]) -> list[int]:
    """The tokens of one answer.

    Raises:
        AssertionError: it is an error.
    """
    with server.client() as http:
        response = http.post("/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        return list(response.json()["output_ids"])
    lines = [line[6:] for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-1]
    return list(json.loads(lines[-2])["output_ids"])


@pytest.mark.parametrize("is_speculative", sampled([True, False], key=type, ci=1))
def test_no_client_notices(
    start_server: Callable[..., Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_speculative: bool,
) -> None:
    """Every kind of fault in one forward of fifty."""
    for fault in FAULTS:
        monkeypatch.setenv(f"SGLANG_KV_CANARY_PERTURB_{fault}_PROB", "0.02")
    monkeypatch.setenv("SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS", "5")
    flags: list[str] = []
    if is_speculative:
        draft = write_mock_draft(
            tmp_path / "draft",
            kind="EAGLE",
            source="hidden",
            vocab_size=VOCAB,
            max_position_embeddings=CONTEXT,
        )
        flags = [
            *("--speculative-algorithm", "EAGLE"),
            *("--speculative-draft-model-path", str(draft)),
            *("--speculative-num-steps", "4", "--speculative-eagle-topk", "4"),
            *("--speculative-num-draft-tokens", "12"),
        ]
    server = start_server(
        *("--kv-canary", "heal", "--kv-canary-heal-limit", "0", "--page-size", "4"),
        *("--kv-canary-sweep-interval", "4", "--enable-metrics", *flags),
    ).wait_ready()
    assert metric(server, "sglang:kv_canary_heals_total") == 0
    assert server.get("/health_generate").json()["status"] == "ok"
    wrong: list[Any] = []
    until = time.monotonic() + SECONDS
    clients = [
        threading.Thread(target=client, args=(server, seed, until, wrong))
        for seed in range(CLIENTS)
    ]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert not wrong, wrong[:3]
    server.wait_idle()
    assert server.process.poll() is None
    # Health is asked at most once a second.
    time.sleep(1.1)
    assert server.get("/health_generate").json()["status"] == "degraded"
    heals = metric(server, "sglang:kv_canary_heals_total")
    assert heals > SECONDS
    assert metric(server, "sglang:kv_canary_degraded") == 1
    assert metric(server, "sglang:kv_canary_quarantined_pages") == 0
    assert metric(server, "sglang:kv_canary_healed_tokens_total") > heals
    recovered = metric(server, "sglang:kv_canary_recovery_seconds_count")
    assert recovered > 0
    assert metric(server, "sglang:kv_canary_recovery_seconds_sum") > 0
    incidents = server.get("/canary/incidents").json()["incidents"]
    assert incidents and all("healing" in incident for incident in incidents)
    server.wait_for_lines("kv_canary healed: diagnosis=")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
