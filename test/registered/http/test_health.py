"""Probes for health cost nobody anything."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from live_server import Server, greedy

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=3, suite="cpu")

KEY = "secret-key"
SECONDS = count(ci=1, full=3)


def test_a_flood_of_probes_without_a_key_refuses_nobody(
    start_server: Callable[..., Server],
) -> None:
    """As a probe of its own each would fill the queue of two."""
    server = start_server(
        *("--api-key", KEY, "--log-requests"),
        *("--max-running-requests", "1", "--max-queued-requests", "2"),
    ).wait_ready()
    stop, statuses = threading.Event(), Counter[int]()

    def probe() -> None:
        with server.client() as client:
            while not stop.is_set():
                statuses[client.get("/health_generate").status_code] += 1

    probes = [threading.Thread(target=probe) for _ in range(16)]
    begun = time.monotonic()
    for thread in probes:
        thread.start()
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"text": "x", "sampling_params": greedy(max_new_tokens=4)}
    asked = 0
    while time.monotonic() < begun + SECONDS:
        assert server.post("/generate", body, headers=headers).status_code == 200
        asked += 1
    stop.set()
    for thread in probes:
        thread.join()
    assert set(statuses) == {200} and statuses[200] > 16
    server.wait_for_lines("received rid=", asked)
    tokens_for_probes = len(server.wait_for_lines("received rid=")) - asked
    assert tokens_for_probes <= time.monotonic() - begun + 1
