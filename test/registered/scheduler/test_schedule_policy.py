"""Policies of the scheduler: the share of new tokens that is expected, the order of the
waiting queue, and who gives up memory first."""

from __future__ import annotations

import random
from collections import Counter as CountsOf
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path

import pytest
from scheduler_world import Shortage, check_answer, engine, prompt_of, write_models
from test_admission import make_adder, make_cache, make_req, store

from sglang.srt.managers.batch.req import Req
from sglang.srt.managers.scheduler.retraction import retract_for_decode
from sglang.srt.managers.scheduler.schedule_policy import (
    LPM_MAX_QUEUE,
    MIN_SHARED_TOKENS,
    Admission,
    NewTokenRatio,
    order_by_longest_match,
)
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness

register_cpu_ci(est_time=10, suite="cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


def running(prompt: int, *, output: int, new: int) -> Req:
    """A request that has sampled `output` of its `new` tokens."""
    req = make_req(prompt_of(prompt), new=new)
    req.append(range(output))
    return req


# -- the ratio of new tokens -------------------------------------------------------


@pytest.mark.parametrize(("conservativeness", "first"), [(1.0, 0.7), (0.5, 0.35)])
def test_the_ratio_decays_to_a_seventh_in_600_steps(
    conservativeness: float, first: float
) -> None:
    ratio = NewTokenRatio(conservativeness)
    assert ratio.value == pytest.approx(first)
    ratio.on_decode()
    assert ratio.value == pytest.approx(first - first * 0.86 / 600)
    for _ in range(598):
        ratio.on_decode()
    assert ratio.value > first * 0.14 + 1e-6
    for _ in range(5):
        ratio.on_decode()
    assert ratio.value == pytest.approx(first * 0.14)


def test_the_ratio_is_at_most_one() -> None:
    assert NewTokenRatio(3.0).value == 1.0


def test_a_retraction_sets_the_ratio_from_what_was_generated() -> None:
    """With a margin of 20 steps for each request that still runs."""
    ratio = NewTokenRatio(1.0)
    ratio.on_retract([running(9, output=30, new=100), running(9, output=10, new=100)])
    assert ratio.value == pytest.approx((30 + 20 + 10 + 20) / (100 + 100 + 1))
    ratio.on_retract([running(9, output=95, new=100)])
    assert ratio.value == 1.0


def test_an_idle_engine_is_careful_again() -> None:
    ratio = NewTokenRatio(1.0)
    ratio.on_retract([running(9, output=1, new=1000)])
    assert ratio.value < 0.1
    ratio.on_idle()
    assert ratio.value == pytest.approx(0.7)


def test_an_engine_steps_decays_and_resets_its_ratio(models: Path) -> None:
    harness = engine(models, "plain", max_total_tokens=512)
    ratio = harness.scheduler.batches._new_token_ratio
    harness.submit(prompt_of(8), rid="a", max_new_tokens=30, ignore_eos=True)
    for _ in range(12):
        harness.scheduler.step()
    assert ratio.value < 0.7
    harness.run()
    harness.scheduler.step()
    assert ratio.value == pytest.approx(0.7)


# -- the waiting queue -------------------------------------------------------------


def test_the_longest_cached_prefix_goes_first() -> None:
    cache = make_cache(64, 4)
    stem = prompt_of(24)
    store(cache, stem)
    reqs = [
        make_req(prompt_of(30, start=500)),
        make_req([*stem[:8], *prompt_of(9, start=700)]),
        make_req([*stem, 1, 2]),
        make_req([*stem[:8], *prompt_of(30, start=800)]),
    ]
    ordered = order_by_longest_match(reqs, cache)
    assert [reqs.index(req) for req in ordered] == [2, 1, 3, 0]
    # Whoever was healed has waited already.
    reqs[3].heals.count = 1
    ordered = order_by_longest_match(reqs, cache)
    assert [reqs.index(req) for req in ordered] == [3, 2, 1, 0]


def test_one_token_more_in_the_cache_decides() -> None:
    """All but the last token of a prompt count, which is computed in any case."""
    cache = make_cache(64, 1)
    stem = prompt_of(24)
    store(cache, stem)
    longer = [*stem[:12], *prompt_of(9, start=700)]
    for length, order in ((13, [0, 1]), (12, [1, 0])):
        reqs = [make_req(stem[:length]), make_req(longer)]
        ordered = order_by_longest_match(reqs, cache)
        assert [reqs.index(req) for req in ordered] == order


PRIORITIES = {"enable_priority_scheduling": True}


@pytest.mark.parametrize("kind", ["plain", "overlap", "spec"])
@pytest.mark.parametrize(
    ("flags", "order"),
    [
        ({}, "abcdef"),
        (PRIORITIES, "dcfaeb"),
        (PRIORITIES | {"schedule_low_priority_values_first": True}, "eacfdb"),
    ],
)
def test_priorities_decide_who_goes_first(
    models: Path, kind: str, flags: dict[str, bool], order: str
) -> None:
    """Of equals who came first; who has none comes last."""
    harness = engine(models, kind, max_running_requests=1, **flags)
    asked = {"a": 0, "b": None, "c": 2, "d": 9, "e": -3, "f": 2}
    for name, priority in asked.items():
        harness.submit([5, 6], rid=name, max_new_tokens=2, priority=priority)
    ended: list[str] = []
    while len(ended) < len(asked):
        harness.scheduler.step()
        ended += harness.collect()
    assert "".join(ended) == order
    harness.run()


def test_a_retracted_request_waits_for_those_above_it(models: Path) -> None:
    harness = engine(
        models,
        "plain",
        max_total_tokens=64,
        schedule_conservativeness=0.1,
        **PRIORITIES,
    )
    for i, name in enumerate("abc"):
        harness.submit([5 + i] * 8, rid=name, max_new_tokens=30, priority=1)
    queues: list[list[str]] = []

    def look(step: int) -> None:
        queue = harness.scheduler.waiting
        if queues or any(req.was_admitted for req in queue):
            if not queues:
                harness.submit([9] * 8, rid="d", max_new_tokens=30, priority=7)
            queues.append([req.rid for req in queue])

    harness.run(on_step=look)
    left = [now for then, now in pairwise(queues) if "d" in then and "d" not in now]
    assert left and left[0], "d went last, or nobody was retracted"


def test_the_flag_for_low_values_needs_the_other() -> None:
    with pytest.raises(ValueError, match="--enable-priority-scheduling"):
        ServerArgs(device="cpu", schedule_low_priority_values_first=True)


def test_a_long_queue_stays_in_order() -> None:
    cache = make_cache(64, 4)
    store(cache, prompt_of(24))
    late = make_req([*prompt_of(24), 1])
    others = [make_req([3, 4, 5]) for _ in range(LPM_MAX_QUEUE - 1)]
    assert order_by_longest_match([*others, late], cache)[0] is late
    longer = [*others, make_req([3]), late]
    assert order_by_longest_match(longer, cache) == longer


@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_who_waits_for_the_prefix_of_another(page_size: int, bigram: bool) -> None:
    """Whoever would find 32 tokens more than now, by a comparison of all pairs."""
    rng, outcomes = random.Random(page_size), CountsOf[Admission]()
    for _ in range(30):
        cache = make_cache(4096, page_size, bigram=bigram)
        adder = make_adder(cache, reqs=64)
        stems = [prompt_of(100, start=start) for start in (0, 1000)]
        store(cache, stems[0][: rng.choice((0, 8, 40))])
        for _ in range(12):
            stem = rng.choice(stems)[: rng.randrange(1, 100)]
            start = rng.randrange(2000, 9000)
            req = make_req([*stem, *prompt_of(rng.randrange(1, 60), start=start)])
            req.namespace = rng.choice((None, None, "other"))
            mine = req.tokens.tolist()[: req.cacheable_prefix_len()]
            matched = cache.match_length(cache.key(mine, namespace=req.namespace))
            gains = [
                cache.shared_len(len(commonprefix([mine, other.tokens.tolist()])))
                for other in adder.reqs
                if other.namespace == req.namespace
            ]
            is_better = max(gains, default=0) >= matched + MIN_SHARED_TOKENS
            outcome = adder.add(req)
            assert (outcome is Admission.DEFERRED) == is_better
            outcomes[outcome] += 1
    assert outcomes[Admission.DEFERRED] > 20 < outcomes[Admission.ADDED]


# -- who gives up memory -----------------------------------------------------------


def retracted(harness: EngineHarness) -> list[str]:
    """Serve a shortage of slots; ids of those that wait, in order."""
    shortage = Shortage(harness)
    shortage.leave(0)
    for _ in range(8):
        harness.scheduler.step()
        if harness.scheduler.waiting:
            break
    waiting = [req.rid for req in harness.scheduler.waiting]
    shortage.end()
    return waiting


ASKED = {"a": (20, 60), "b": (90, 60), "c": (50, 60)}


def test_the_last_request_never_gives_way(models: Path) -> None:
    """Nobody is left to whom its memory would be of use."""
    harness = engine(models, "plain", max_total_tokens=512)
    harness.submit(prompt_of(20), rid="a", max_new_tokens=60, ignore_eos=True)
    for _ in range(4):
        harness.scheduler.step()
    harness.scheduler.resolve_all()
    batch = harness.scheduler.running
    assert batch is not None
    shortage = Shortage(harness)
    shortage.leave(0)
    with pytest.raises(RuntimeError, match=r"one request of \d+ tokens does not fit"):
        retract_for_decode(batch, chunked=None)
    assert len(batch) == 1
    shortage.end()
    harness.run()


@pytest.mark.parametrize("order", ["abc", "bca", "cab"])
def test_of_equals_the_longest_prompt_gives_way(models: Path, order: str) -> None:
    """All have sampled as many tokens."""
    harness = engine(models, "plain", max_total_tokens=512)
    for rid in order:
        length, new = ASKED[rid]
        start = 100 * ord(rid)
        harness.submit(
            prompt_of(length, start=start), rid=rid, max_new_tokens=new, ignore_eos=True
        )
    for _ in range(6):
        harness.scheduler.step()
    assert retracted(harness) == ["b"]
    answers = harness.run()
    for rid, (length, new) in ASKED.items():
        prompt = prompt_of(length, start=100 * ord(rid))
        check_answer(prompt, answers[rid].output_ids, new)


def test_the_fewest_tokens_give_way_whatever_the_prompt(models: Path) -> None:
    harness = engine(models, "plain", max_total_tokens=512)
    for rid, (length, new) in ASKED.items():
        harness.submit(
            prompt_of(length, start=100 * ord(rid)),
            rid=rid,
            max_new_tokens=new,
            ignore_eos=True,
        )
        for _ in range(3):
            harness.scheduler.step()
    assert retracted(harness) == ["c"]
    harness.run()
