"""Mixed requests for a stock engine, and the counters of the canary in it.

Prompts share prefixes, are longer than a chunk, and exceed the pool together. The
digest of the greedy tokens must equal a run without the canary, or one of them is
wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 512
METRICS = "KV_CANARY_METRICS_PORT"


Waves = Sequence[list[list[int]]]
"""Prompts of requests that are sent together, several times."""
Serve = Callable[[str, Waves, dict[str, Any]], dict[str, Any]]
"""Serves waves to a model with options of the engine; returns the outcome."""


def main(description: str, serve: Serve) -> None:
    """Serve what the arguments say, and print the outcome as JSON."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine")
    parser.add_argument("--text", type=Path, help="of prompts; else they are random")
    args = parser.parse_args()
    draw = _tokens if args.text is None else _excerpts(args.model, args.text)
    rng = random.Random(0)
    waves = [wave_of_prompts(rng, draw) for _ in range(args.waves)]
    print(json.dumps(serve(args.model, waves, args.options)), flush=True)


def serve_waves(
    generate: Callable[[list[list[int]]], Sequence[list[int]]], waves: Waves
) -> dict[str, Any]:
    """Return tokens, time and counters of several waves of requests."""
    digest, count = hashlib.sha256(), 0
    begin = time.monotonic()
    for prompts in waves:
        for tokens in generate(prompts):
            count += len(tokens)
            digest.update(json.dumps(tokens).encode())
    return {
        "tokens": count,
        "digest": digest.hexdigest()[:16],
        "seconds": round(time.monotonic() - begin, 2),
        "canary": canary_counters(),
    }


Draw = Callable[[random.Random, int], list[int]]
"""Returns so many tokens."""


def wave_of_prompts(rng: random.Random, draw: Draw) -> list[list[int]]:
    """Return the prompts of 24 requests, half of them with a prefix shared by all
    waves.
    """
    shared = draw(random.Random(1), 200)
    sizes = [rng.randrange(1, 250) for _ in range(24)]
    return [
        (shared[: rng.randrange(201)] if number % 2 else []) + draw(rng, size)
        for number, size in enumerate(sizes)
    ]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def _excerpts(model: str, text: Path) -> Draw:
    """Return a function that cuts excerpts out of a text, in the model's tokens."""
    tokenizer = importlib.import_module("transformers").AutoTokenizer
    tokens = tokenizer.from_pretrained(model)(text.read_text(encoding="utf-8"))
    of_text: list[int] = tokens["input_ids"]

    def excerpt(rng: random.Random, count: int) -> list[int]:
        begin = rng.randrange(len(of_text) - count)
        return of_text[begin : begin + count]

    return excerpt


def canary_counters() -> dict[str, float]:
    """Return the canary's counters, if there is a canary that provides them."""
    port = os.environ.get(METRICS, "0")
    if os.environ.get("KV_CANARY", "off") == "off" or port == "0":
        return {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        lines = page.read().decode().splitlines()
    values = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.removeprefix("kv_canary_"): float(value) for name, value in values}
