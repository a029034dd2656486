"""Engines with KV in several tiers, and traffic whose prefixes do not fit a device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang.srt.mem_cache.common import check_busy
from sglang.test.harness import EngineHarness, Finished
from sglang.test.mock_oracle import NO_WINDOWS, Windows
from sglang.test.mock_traffic import Traffic, check
from sglang.test.spec_canary_traffic import speculating, write_mock_models
from sglang.test.tiny_models import MOCK_STATE, write_mock_model

if TYPE_CHECKING:
    from sglang.srt.kv_tiers.tiers import KVTiers

VOCAB = 1000
CONTEXT = 512
WINDOW = 40
KINDS = ("plain", "window", "state", "draft")
"""Kinds of slots: full attention, with sliding layers, with a recurrent state, with a
draft's pool."""
WINDOWS: dict[str, Windows] = {"window": [None, WINDOW]}


def tiered(
    folder: Path, kind: str, *, overlap: bool = False, **server_args: Any
) -> EngineHarness:
    """Start an engine on a mock model of one of `KINDS`, with host memory for four
    times the device's KV."""
    arguments: dict[str, Any] = {
        "max_total_tokens": 640,
        "chunked_prefill_size": 128,
        "max_running_requests": 8,
        "schedule_conservativeness": 0.3,
        "skip_tokenizer_init": True,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "kv_canary": "raise",
        "disable_overlap_schedule": not overlap,
        **server_args,
    }
    if kind == "draft":
        models = write_mock_models(folder, kind="EAGLE", source="hidden")
        return speculating(
            models["model"],
            models["draft"],
            speculative_algorithm="EAGLE",
            tree=(1, 3, 4),
            overlap=overlap,
            **arguments,
        )
    config: dict[str, Any] = {}
    if kind == "window":
        config = {
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"],
        }
    elif kind == "state":
        config = MOCK_STATE
        arguments.setdefault("max_mamba_cache_size", 14)
        arguments.setdefault("mamba_track_interval", 64)
    model = write_mock_model(
        folder, vocab_size=VOCAB, max_position_embeddings=CONTEXT, **config
    )
    return EngineHarness(model, overlap=overlap, **arguments)


def tiers_of(harness: EngineHarness) -> KVTiers:
    """Return the tiers of an engine that has some."""
    loads = harness.scheduler.tiers
    assert loads is not None
    return loads.tiers


def windows_of(kind: str) -> Windows:
    """Return the windows of a kind's layers, for the oracle."""
    return WINDOWS.get(kind, NO_WINDOWS)


def serve(harness: EngineHarness, kind: str, *, total: int, seed: int) -> None:
    """Serve random requests that share more prefixes than the device holds, and check
    every answer, the leaks and the records on the way."""
    scheduler, tiers = harness.scheduler, tiers_of(harness)
    traffic = Traffic(harness, random.Random(seed), total, longest_output=24)
    rng = random.Random(seed + 1)
    traffic.stems = [
        [rng.randrange(VOCAB) for _ in range(rng.randrange(100, 300))]
        for _ in range(10)
    ]
    page_size = scheduler.cache.page_size

    def on_step(step: int) -> None:
        traffic.on_step(step)
        if step % 25 == 0:
            scheduler.cache.check()
            live = [req for req in scheduler.unfinished if req.req_pool_idx]
            aside = np.unique(tiers.loads.slots // page_size)
            check_busy(scheduler.cache, live, aside=aside)

    answers: dict[str, Finished] = {}
    while traffic.left:
        answers |= harness.run(on_step=on_step)
    check(traffic.expected, answers, vocab_size=VOCAB, windows=windows_of(kind))
