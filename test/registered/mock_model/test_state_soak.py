"""Random traffic on the mock model with a recurrent state: every output equals the
oracle, requests do go on from checkpoints, and no state slot is lost."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from sglang.srt.mem_cache.common import check_busy
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.mock_traffic import Expected, Traffic, check
from sglang.test.scale import count, sampled
from sglang.test.spec_adaptive import InTurn
from sglang.test.spec_canary_traffic import VOCAB as SPEC_VOCAB
from sglang.test.spec_canary_traffic import speculating, write_mock_models
from sglang.test.tiny_models import MOCK_STATE, write_mock_model

register_cpu_ci(est_time=12, suite="cpu", full_time=900)
register_cuda_ci(est_time=200, suite="cuda")

VOCAB = 1000
CONTEXT = 512
ON_GPU = torch.cuda.is_available()
SHORT_AFTER = 100
# (page size, KV slots, states, track interval, chunk, policy, strategy, radix cache):
# pools small enough to retract, and too few checkpoints for all.
CONFIGURATIONS = [
    (1, 900, 40, 16, 64, "fcfs", "auto", True),
    (1, 700, 34, 1, 100, "lpm", "auto", True),
    (1, 1200, 64, None, -1, "fcfs", "no_buffer", True),
    (4, 800, 36, 32, 16, "lpm", "auto", True),
    (4, 1000, 32, None, 128, "fcfs", "auto", False),
    (16, 800, 48, 16, 64, "fcfs", "extra_buffer", True),
    (16, 1600, 40, 128, 32, "lpm", "auto", True),
    (64, 1280, 60, 64, 64, "fcfs", "auto", True),
    (64, 2048, 33, 128, 192, "lpm", "auto", True),
]


def accepted_drafts(harness: EngineHarness) -> list[int]:
    """Return a list that gets the number of accepted tokens of every verified draft."""
    accepted: list[int] = []
    results = harness.scheduler._results
    note = results._on_verified

    def on_verified(tokens: int, drafts: int) -> None:
        accepted.append(drafts)
        note(tokens, drafts)

    results._on_verified = on_verified
    return accepted


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
    page_size, slots, states, interval, chunk, policy, strategy, radix = configuration
    harness = EngineHarness(
        write_mock_model(
            tmp_path_factory.mktemp("mock"),
            vocab_size=VOCAB,
            max_position_embeddings=CONTEXT,
            **MOCK_STATE,
        ),
        overlap=overlap,
        disable_overlap_schedule=not overlap,
        page_size=page_size,
        max_total_tokens=slots,
        max_mamba_cache_size=states,
        mamba_track_interval=interval,
        mamba_radix_cache_strategy=strategy,
        chunked_prefill_size=chunk,
        schedule_policy=policy,
        disable_radix_cache=not radix,
        max_running_requests=32,
        schedule_conservativeness=0.3,
        skip_tokenizer_init=True,
        kv_canary="raise",
    )
    seed = CONFIGURATIONS.index(configuration)
    total = count(ci=200 if ON_GPU else 12, full=2000)
    traffic = Traffic(harness, random.Random(seed), total, short_after=SHORT_AFTER)
    scheduler = harness.scheduler
    answers = {}

    def on_step(step: int) -> None:
        traffic.on_step(step)
        if step % 50 == 0:
            scheduler.cache.check()
            check_busy(scheduler.cache, live_requests(scheduler))

    while traffic.left:
        answers |= harness.run(on_step=on_step)
    check(traffic.expected, answers, vocab_size=VOCAB)
    assert (replays(scheduler) > 0) == ON_GPU
    if radix:
        scheduler.cache.check()
        # Few requests do not meet whole pages of each other, checkpoints at the ends of
        # prompts are only of use to what follows on, and a single one is rarely right.
        is_likely = (total >= 100 or page_size < 16) and states - 32 > 1
        if strategy != "no_buffer" and is_likely:
            assert scheduler.stats_snapshot().cached_tokens_total > 0
        scheduler.cache.reset()
        checkpoints = scheduler.cache.checkpoints.slots
        assert checkpoints.available_size() == checkpoints.size == states - 32
    assert scheduler.cache.allocator.available_size() == slots


def replays(scheduler) -> int:
    runner = scheduler.worker.model_runner.graph_runner
    return 0 if runner is None else runner.num_replays


def live_requests(scheduler):
    return [req for req in scheduler.unfinished if req.req_pool_idx]


# (algorithm, (top-k, steps, nodes), page size, overlap): chains and trees.
DRAFTED = [
    ("EAGLE", (1, 3, 4), 1, True),
    ("EAGLE", (4, 4, 16), 16, False),
    ("EAGLE3", (8, 3, 24), 1, True),
    ("EAGLE3", (1, 5, 6), 4, True),
    ("STANDALONE", (3, 3, 10), 64, True),
    ("STANDALONE", (1, 4, 5), 1, False),
]


@pytest.mark.parametrize(
    ("algorithm", "tree", "page_size", "overlap"),
    sampled(DRAFTED, key=lambda case: case[1][0] > 1, ci=6 if ON_GPU else 1),
    ids=str,
)
def test_drafts_are_verified_from_one_state(
    tmp_path, algorithm, tree, page_size, overlap
):
    """Whatever is accepted, outputs are those of plain decoding: the state takes the
    accepted path alone."""
    source = None if algorithm == "STANDALONE" else "hidden"
    models = write_mock_models(tmp_path, kind=algorithm, source=source, **MOCK_STATE)
    harness = speculating(
        models["model"],
        models["draft"],
        tree=tree,
        speculative_algorithm=algorithm,
        overlap=overlap,
        disable_overlap_schedule=not overlap,
        page_size=page_size,
        max_mamba_cache_size=20,
        mamba_track_interval=max(page_size, 16),
        schedule_conservativeness=0.3,
        kv_canary_real_data="all",
    )
    accepted = accepted_drafts(harness)
    total = count(ci=100 if ON_GPU else 8, full=2000)
    traffic = Traffic(harness, random.Random(1), total, short_after=SHORT_AFTER)
    answers = {}
    while traffic.left:
        answers |= harness.run(on_step=traffic.on_step)
    check(traffic.expected, answers, vocab_size=SPEC_VOCAB)
    assert sum(accepted) > 0
    harness.scheduler.cache.check()


def test_the_next_turn_goes_on_from_the_last_checkpoint(tmp_path) -> None:
    """Each turn repeats the conversation, with the answers."""
    harness = EngineHarness(
        write_mock_model(tmp_path, vocab_size=VOCAB, **MOCK_STATE),
        mamba_track_interval=32,
        max_running_requests=4,
    )
    tokens = [(7 * i) % VOCAB for i in range(100)]
    cached = []
    for turn in range(3):
        rid = harness.submit(tokens, max_new_tokens=50, ignore_eos=True)
        answer = harness.run()[rid]
        check({rid: Expected(tokens, 50)}, {rid: answer}, vocab_size=VOCAB)
        cached.append(answer.cached_tokens)
        tokens = [*tokens, *answer.output_ids, turn, turn]
    # 150 tokens have KV at the end of the first turn, and 128 a checkpoint.
    assert cached == [0, 128, 192]


@pytest.mark.parametrize(
    ("tree", "page_size", "overlap", "iterations"),
    sampled(
        itertools.product([(1, 3, 4), (4, 4, 16)], (1, 4, 16), (True, False), (0, 2)),
        key=lambda case: (case[0], case[-1]),
        ci=2 if ON_GPU else 1,
    ),
    ids=str,
)
def test_drafts_take_the_checkpoints_of_plain_decoding(
    tmp_path, tree, page_size, overlap, iterations
):
    """At the same positions, wherever verifications end, also if the shape of drafts
    changes and some steps are plain."""
    models = write_mock_models(tmp_path, kind="EAGLE", source="hidden", **MOCK_STATE)
    harness = speculating(
        models["model"],
        models["draft"],
        tree=tree,
        overlap=overlap,
        disable_overlap_schedule=not overlap,
        page_size=page_size,
        mamba_track_interval=32,
        max_running_requests=4,
        kv_canary_real_data="all",
        speculative_adaptive=iterations > 0,
        skip_server_warmup=True,
    )
    accepted = accepted_drafts(harness)
    if iterations:
        shapes = harness.scheduler.shapes
        shapes.policy = InTurn(shapes, iterations)
    tokens = [(7 * i) % SPEC_VOCAB for i in range(100)]
    cached = []
    for turn in range(5):
        rid = harness.submit(tokens, max_new_tokens=50, ignore_eos=True)
        answer = harness.run()[rid]
        check({rid: Expected(tokens, 50)}, {rid: answer}, vocab_size=SPEC_VOCAB)
        cached.append(answer.cached_tokens)
        tokens = [*tokens, *answer.output_ids, turn, turn]
    assert cached == [0, 128, 192, 224, 288]
    assert sum(accepted) > 0
    harness.scheduler.cache.check()


def test_an_interval_shorter_than_two_verifications_is_refused(tmp_path):
    models = write_mock_models(tmp_path, kind="EAGLE", source="hidden", **MOCK_STATE)
    options = {"tree": (4, 4, 16), "page_size": 4}
    message = r"--mamba-track-interval 8: .* accept 10 tokens.* use at least 12, "
    with pytest.raises(ValueError, match=message):
        speculating(models["model"], models["draft"], mamba_track_interval=8, **options)
    for more in (
        {"mamba_track_interval": 12},
        {"mamba_track_interval": 8, "disable_overlap_schedule": True},
        {"mamba_radix_cache_strategy": "no_buffer"},
    ):
        speculating(models["model"], models["draft"], **options, **more)


def test_a_branch_is_found_by_the_second_request_that_takes_it(tmp_path) -> None:
    harness = EngineHarness(
        write_mock_model(tmp_path, vocab_size=VOCAB, **MOCK_STATE),
        max_running_requests=4,
    )
    stem = [(7 * i) % VOCAB for i in range(400)]
    cached = []
    for prompt in (stem, stem, *(stem[:300] + [500 + i] * 90 for i in range(3))):
        rid = harness.submit(prompt, max_new_tokens=3, ignore_eos=True)
        answer = harness.run()[rid]
        check({rid: Expected(prompt, 3)}, {rid: answer}, vocab_size=VOCAB)
        cached.append(answer.cached_tokens)
    # Ends are rounded down to 64 tokens; 300 positions of the third are cached.
    assert cached == [0, 384, 0, 256, 256]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
