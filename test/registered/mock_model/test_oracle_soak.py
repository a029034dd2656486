"""Random traffic on the mock model: every output equals the oracle, nothing leaks."""

from __future__ import annotations

import random

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.mock_traffic import Expected, Traffic, check
from sglang.test.scale import count, sampled
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=15, suite="cpu", full_time=75)

VOCAB = 1000
CONTEXT = 512
# (page size, slots, chunk, policy, radix cache, backend): pools small enough to
# retract.
CONFIGURATIONS = [
    (1, 900, 64, "fcfs", True, "cpu_native"),
    (1, 700, 32, "lpm", True, "cpu_native"),
    (1, 1200, -1, "fcfs", True, "torch_native"),
    (4, 800, 16, "lpm", True, "cpu_native"),
    (4, 1000, 128, "fcfs", False, "cpu_native"),
    (16, 800, 64, "fcfs", True, "cpu_native"),
    (16, 1600, 32, "lpm", True, "torch_native"),
    (64, 1024, 64, "fcfs", True, "cpu_native"),
    (64, 2048, 128, "lpm", True, "cpu_native"),
    (1, 600, 48, "fcfs", False, "cpu_native"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_mock_model(
        tmp_path_factory.mktemp("mock"),
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
    )


@pytest.mark.parametrize(
    ("configuration", "overlap"),
    sampled(
        [
            (c, (n + turn) % 2 == 1)
            for n, c in enumerate(CONFIGURATIONS)
            for turn in (0, 1)
        ],
        key=lambda case: case[0],
        ci=1,
    ),
    ids=str,
)
def test_random_requests(folder, configuration, overlap):
    page_size, slots, chunk, policy, radix, backend = configuration
    seed = CONFIGURATIONS.index(configuration)
    harness = EngineHarness(
        folder,
        overlap=overlap,
        page_size=page_size,
        max_total_tokens=slots,
        chunked_prefill_size=chunk,
        schedule_policy=policy,
        disable_radix_cache=not radix,
        attention_backend=backend,
        max_running_requests=24,
        schedule_conservativeness=0.3,
        skip_tokenizer_init=True,
    )
    traffic = Traffic(harness, random.Random(seed), count(ci=10, full=100))
    answers = {}
    while traffic.left:
        answers |= harness.run(on_step=traffic.on_step)
    check(traffic.expected, answers, vocab_size=VOCAB)
    stats = harness.scheduler.stats_snapshot()
    assert stats.num_requests_total == len(traffic.expected)
    assert stats.num_used_tokens == 0
    if radix:
        assert stats.cached_tokens_total > 0
        harness.scheduler.cache.check()
        harness.scheduler.cache.reset()
    assert harness.scheduler.cache.allocator.available_size() == slots


@pytest.mark.parametrize("overlap", [False, True], ids=["in-order", "overlap"])
def test_retraction_is_exercised_and_harmless(folder, overlap):
    """More decode tokens than slots: requests are retracted, and all come out right."""
    harness = EngineHarness(
        folder,
        overlap=overlap,
        max_total_tokens=400,
        chunked_prefill_size=64,
        schedule_conservativeness=0.1,
        skip_tokenizer_init=True,
    )
    expected = {}
    for i in range(12):
        prompt = [(31 * i + j) % VOCAB for j in range(20)]
        rid = harness.submit(prompt, max_new_tokens=150, ignore_eos=True, stream=True)
        expected[rid] = Expected(prompt, 150)
    check(expected, harness.run(), vocab_size=VOCAB)
    assert harness.scheduler.stats_snapshot().num_retracted_reqs > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
