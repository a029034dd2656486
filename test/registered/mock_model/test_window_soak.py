"""Random traffic on the mock model with sliding layers: every output equals the oracle,
no window slot is lost, and tokens do leave the windows."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from sglang.srt.mem_cache.common import check_busy
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.mock_traffic import Expected, Traffic, check
from sglang.test.scale import count, sampled
from sglang.test.spec_canary_traffic import speculating, write_mock_models
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=10, suite="cpu", full_time=760)
register_cuda_ci(est_time=200, suite="cuda")

VOCAB = 1000
CONTEXT = 512
FULL, SLIDING = "full_attention", "sliding_attention"
# (layers, window, page size, slots, window slots per slot, chunk, policy, radix cache,
# backend): windows below, at and above a page and a chunk, pools small enough to
# retract.
CONFIGURATIONS = [
    ("fs", 24, 1, 900, 0.4, 64, "fcfs", True, "cpu_native"),
    ("sf", 7, 1, 700, 0.3, 32, "lpm", True, "cpu_native"),
    ("fs", 1, 1, 900, 0.5, 100, "fcfs", True, "torch_native"),
    ("sf", 64, 4, 800, 0.5, 16, "lpm", True, "cpu_native"),
    ("fs", 30, 4, 1000, 0.8, 128, "fcfs", False, "cpu_native"),
    ("sf", 100, 16, 1120, 0.5, 64, "fcfs", True, "cpu_native"),
    ("fs", 16, 16, 1600, 0.2, 32, "lpm", True, "torch_native"),
    ("sf", 10, 64, 1280, 0.7, 64, "fcfs", True, "cpu_native"),
    ("fs", 40, 64, 2048, 0.2, 128, "lpm", True, "cpu_native"),
    ("sf", 33, 1, 600, 0.6, 48, "fcfs", False, "cpu_native"),
    ("fs", 20, 1, 1200, 1.0, -1, "fcfs", True, "cpu_native"),
]


# Requests of all sizes; most that follow are short.
SHORT_AFTER = 100
ON_GPU = torch.cuda.is_available()


def layer_types(letters: str) -> list[str]:
    return [{"f": FULL, "s": SLIDING}[letter] for letter in letters]


def windows_of(letters: str, window: int) -> list[int | None]:
    return [window if letter == "s" else None for letter in letters]


def folder_of(tmp_path_factory, letters: str, window: int):
    return write_mock_model(
        tmp_path_factory.mktemp("mock"),
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        sliding_window=window,
        layer_types=layer_types(letters),
    )


def watch(harness: EngineHarness) -> list[int]:
    """Window pages that are freed while their tokens' slots are kept, by call."""
    (swa,) = harness.scheduler.cache.allocator.secondary
    freed: list[int] = []
    drop = swa.drop

    def counted(pages):
        owned = harness.scheduler.cache.allocator.owns(pages)
        freed.append(drop(pages) if owned.all() else drop(pages) * 0)
        return freed[-1]

    swa.drop = counted
    return freed


@pytest.mark.parametrize(
    ("configuration", "overlap"),
    sampled(
        itertools.product(CONFIGURATIONS, (True, False)),
        key=lambda variant: CONFIGURATIONS.index(variant[0]),
        ci=2 if ON_GPU else 1,
    ),
    ids=lambda value: (
        str(value) if isinstance(value, bool) else "-".join(map(str, value))
    ),
)
def test_random_requests(tmp_path_factory, configuration, overlap):
    letters, window, page_size, slots, ratio, chunk, policy, radix, backend = (
        configuration
    )
    harness = EngineHarness(
        folder_of(tmp_path_factory, letters, window),
        overlap=overlap,
        disable_overlap_schedule=not overlap,
        page_size=page_size,
        max_total_tokens=slots,
        swa_full_tokens_ratio=ratio,
        chunked_prefill_size=chunk,
        schedule_policy=policy,
        disable_radix_cache=not radix,
        attention_backend=None if ON_GPU else backend,
        max_running_requests=32,
        schedule_conservativeness=0.3,
        skip_tokenizer_init=True,
        kv_canary="raise",
    )
    left_windows = watch(harness)
    seed = CONFIGURATIONS.index(configuration)
    total = count(ci=200 if ON_GPU else 10, full=2000)
    traffic = Traffic(harness, random.Random(seed), total, short_after=SHORT_AFTER)
    scheduler = harness.scheduler
    answers = {}

    def on_step(step: int) -> None:
        traffic.on_step(step)
        if step % 50 == 0:
            if radix:
                scheduler.cache.check()
            check_busy(scheduler.cache, live_requests(scheduler))

    while traffic.left:
        answers |= harness.run(on_step=on_step)
    check(
        traffic.expected,
        answers,
        vocab_size=VOCAB,
        windows=windows_of(letters, window),
    )
    assert sum(left_windows) > 0, "no token left a window: the test is vacuous"
    assert (replays(scheduler) > 0) == ON_GPU
    if radix:
        assert scheduler.stats_snapshot().cached_tokens_total > 0
        scheduler.cache.check()
        scheduler.cache.reset()
    allocator = scheduler.cache.allocator
    assert allocator.available_size() == slots
    (swa,) = allocator.secondary
    assert swa.available_size() == swa.size


def replays(scheduler) -> int:
    runner = scheduler.worker.model_runner.graph_runner
    return 0 if runner is None else runner.num_replays


def live_requests(scheduler):
    return [req for req in scheduler._unfinished.values() if req.req_pool_idx]


@pytest.mark.parametrize("overlap", [False, True], ids=["in-order", "overlap"])
def test_retraction_is_exercised_and_harmless(tmp_path_factory, overlap):
    """More decode tokens than window slots: requests are retracted for those alone."""
    harness = EngineHarness(
        folder_of(tmp_path_factory, "fs", 60),
        overlap=overlap,
        disable_overlap_schedule=not overlap,
        max_total_tokens=3000,
        swa_full_tokens_ratio=0.15,
        chunked_prefill_size=64,
        schedule_conservativeness=0.1,
        skip_tokenizer_init=True,
        kv_canary="raise",
    )
    expected = {}
    for i in range(12):
        prompt = [(31 * i + j) % VOCAB for j in range(20)]
        rid = harness.submit(prompt, max_new_tokens=150, ignore_eos=True, stream=True)
        expected[rid] = Expected(prompt, 150)
    check(expected, harness.run(), vocab_size=VOCAB, windows=windows_of("fs", 60))
    assert harness.scheduler.stats_snapshot().num_retracted_reqs > 0


@pytest.mark.parametrize("tree", [(1, 3, 4), (4, 4, 12)], ids=["chain", "tree"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_drafts_over_windows(tmp_path_factory, tree, page_size):
    """Prompts are longer than the window, so that the rows of a verification begin
    after the first token. No canary compares them. (The drafts are rejected: a mock
    draft knows no windows.)"""
    window = 12
    models = write_mock_models(
        tmp_path_factory.mktemp("mock"),
        sliding_window=window,
        layer_types=layer_types("fs"),
    )
    harness = speculating(
        **models, tree=tree, page_size=page_size, overlap=True, kv_canary="none"
    )
    expected = {}
    for i in range(6):
        prompt = [(31 * i + 7 * j) % VOCAB for j in range(30 + 9 * i)]
        rid = harness.submit(prompt, max_new_tokens=40, ignore_eos=True)
        expected[rid] = Expected(prompt, 40)
    answers = harness.run()
    check(expected, answers, vocab_size=VOCAB, windows=windows_of("fs", window))


@pytest.mark.parametrize("letters", ["fs", "sf", "ss"])
def test_without_window_slots_every_token_is_kept(tmp_path_factory, letters):
    harness = EngineHarness(
        folder_of(tmp_path_factory, letters, 24),
        max_total_tokens=900,
        disable_hybrid_swa_memory=True,
        skip_tokenizer_init=True,
    )
    assert not harness.scheduler.cache.allocator.secondary
    traffic = Traffic(harness, random.Random(3), 6)
    answers = {}
    while traffic.left:
        answers |= harness.run(on_step=traffic.on_step)
    windows = windows_of(letters, 24)
    check(traffic.expected, answers, vocab_size=VOCAB, windows=windows)


def test_a_ratio_that_leaves_too_few_window_slots_is_refused(tmp_path_factory):
    with pytest.raises(ValueError) as caught:
        EngineHarness(
            folder_of(tmp_path_factory, "fs", 24),
            max_total_tokens=1000,
            swa_full_tokens_ratio=0.05,
            chunked_prefill_size=64,
            skip_tokenizer_init=True,
        )
    # 64 tokens of a prefill, the window, a page and 4 in flight, 16 until the next
    # frees, two pages.
    for words in (
        "--swa-full-tokens-ratio 0.05 of 1000 KV slots leaves 50 window slots",
        "a prefill of 64 tokens beside a window of 24 needs 111",
        "--disable-hybrid-swa-memory",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.5])
def test_a_ratio_is_a_share(ratio):
    with pytest.raises(ValueError, match="--swa-full-tokens-ratio"):
        ServerArgs(swa_full_tokens_ratio=ratio)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
