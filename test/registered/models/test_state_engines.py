"""Hybrid models as engines: chunks, overlap and prefixes that go on from checkpoints
change no answer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.hybrid_models import write_hybrid_model
from sglang.test.scale import count
from sglang.test.spec_parity import (
    CONTEXT,
    Traffic,
    answer_all,
    assert_parity,
    check_no_leak,
    make_asks,
)
from sglang.test.spec_world import device, plain_engine

register_cpu_ci(est_time=20, suite="cpu", full_time=300)
register_cuda_ci(est_time=60, suite="cuda")

# Architecture, page size, tokens between two checkpoints, tokens of a chunk.
ENGINES = [
    ("Lfm2ForCausalLM", 1, 16, 48),
    ("Lfm2ForCausalLM", 16, 32, 64),
    ("Qwen3NextForCausalLM", 1, 32, 100),
    ("Qwen3_5ForCausalLM", 4, 16, 80),
]
ROWS, STATES = 16, 40


@pytest.mark.parametrize(("architecture", "page_size", "interval", "chunk"), ENGINES)
def test_random_requests(
    tmp_path: Path, architecture: str, page_size: int, interval: int, chunk: int
) -> None:
    """In a pool so small that requests are retracted, with checkpoints for few, beside
    an engine that answers each request from its start and whole."""
    folder = write_hybrid_model(tmp_path, architecture)
    asks = make_asks(
        random.Random(architecture),
        total=count(ci=30, full=400),
        vocab_size=264,
        new_tokens=40,
    )
    reference = plain_engine(folder)
    expected = answer_all(reference, asks)
    engine = EngineHarness(
        folder,
        device=device(),
        dtype="float32",
        overlap=True,
        page_size=page_size,
        context_length=CONTEXT,
        max_total_tokens=1024,
        max_running_requests=ROWS,
        max_mamba_cache_size=STATES,
        mamba_track_interval=interval,
        chunked_prefill_size=chunk,
        schedule_conservativeness=0.3,
        skip_tokenizer_init=True,
        kv_canary="raise",
    )
    traffic = Traffic(engine, asks, random.Random(page_size))
    found = traffic.run()
    assert_parity(asks, expected, found, aborted=traffic.aborted, reference=reference)
    assert engine.scheduler.stats_snapshot().cached_tokens_total > 0
    check_no_leak(engine)
    checkpoints = engine.scheduler.cache.checkpoints
    assert checkpoints.slots.available_size() == STATES - ROWS


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
