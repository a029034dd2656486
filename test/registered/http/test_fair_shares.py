"""Streams with large events cost themselves: they get fewer events, and nobody else."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from live_server import Server, greedy

from sglang.srt.models.mock_oracle import next_tokens
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="cpu")

VOCAB = 257
HOSTILE, LONG, SHORT = 8, 220, 100


def events_of(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; each holds the whole answer so far, and `at`, when it
    came."""
    found = []
    with (
        server.client() as http,
        http.stream(
            "POST", "/generate", json=body | {"stream": True}, timeout=120
        ) as r,
    ):
        assert r.status_code == 200
        for line in r.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line[6:]) | {"at": time.monotonic()})
    return found


def test_large_events_are_merged_and_small_ones_are_not(
    start_server: Callable[..., Server],
) -> None:
    """Eleven kilobytes asked for hundreds of megabytes: a cumulative stream repeats 20
    alternatives of every token in each event."""
    server = start_server().wait_ready()
    hostile: list[list[dict[str, Any]]] = []
    prompt = [7 * i % VOCAB for i in range(20)]
    greedy_body = {
        "input_ids": prompt,
        "sampling_params": greedy(max_new_tokens=LONG),
        "return_logprob": True,
        "top_logprobs_num": 20,
    }

    def attack() -> None:
        hostile.append(events_of(server, greedy_body))

    attacks = [threading.Thread(target=attack) for _ in range(HOSTILE)]
    for thread in attacks:
        thread.start()
    honest = events_of(
        server,
        {"input_ids": prompt, "sampling_params": greedy(max_new_tokens=SHORT)},
    )
    for thread in attacks:
        thread.join()
    due = next_tokens(prompt + honest[-1]["output_ids"], vocab_size=VOCAB)
    assert honest[-1]["output_ids"] == due[len(prompt) - 1 : -1]
    assert len(honest[-1]["output_ids"]) == SHORT
    assert len(hostile) == HOSTILE
    for events in hostile:
        assert len(events[-1]["meta_info"]["output_token_logprobs"]) == LONG
    assert sum(map(len, hostile)) < LONG * HOSTILE
    # However busy the machine: while it lasts, the honest stream hears of its tokens
    # no less often. (It heard of 11 at once where the others heard of 4.)
    begin, end = honest[0]["at"], honest[-1]["at"]
    others = [event for events in hostile for event in events]
    assert sum(begin < e["at"] < end for e in others) <= len(honest) * HOSTILE
    assert server.get("/health").status_code == 200
    server.wait_idle()
