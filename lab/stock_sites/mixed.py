"""Mixed requests for a stock engine, and the counters of the canary in it."""

from __future__ import annotations

import os
import random
import urllib.request

VOCABULARY = 512
METRICS = "KV_CANARY_METRICS_PORT"


def wave_of_prompts(rng: random.Random) -> list[list[int]]:
    """Return the prompts of 24 requests, half of them with a prefix shared by all
    waves.
    """
    shared = _tokens(random.Random(1), 200)
    sizes = [rng.randrange(1, 250) for _ in range(24)]
    return [
        (shared[: rng.randrange(201)] if number % 2 else []) + _tokens(rng, size)
        for number, size in enumerate(sizes)
    ]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def canary_counters() -> dict[str, float]:
    """Return the canary's counters, if there is a canary that provides them."""
    port = os.environ.get(METRICS, "0")
    if os.environ.get("KV_CANARY", "off") == "off" or port == "0":
        return {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        lines = page.read().decode().splitlines()
    values = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.removeprefix("kv_canary_"): float(value) for name, value in values}
