"""Random traffic with speculation on the mock model: outputs and accept lengths equal
the oracles', and every slot comes back."""

from __future__ import annotations

import dataclasses
import random

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.mock_traffic import Expected, Traffic, check
from sglang.test.scale import count
from sglang.test.spec_accept import AcceptRecorder, predicted_acceptance
from sglang.test.spec_matrix import SpecConfig
from sglang.test.spec_parity import check_accounting, check_no_leak
from sglang.test.spec_world import VOCAB_SIZES, ModelFolders, slots_for, spec_engine

register_cpu_ci(est_time=20, suite="cpu", full_time=90)
register_cuda_ci(est_time=60, suite="cuda")

# Two thousand requests in all under `make test-full`.
REQUESTS = {"ci": 40, "full": 400}


def config_of(algorithm, topk, steps, nodes, page_size, overlap, *, hidden=False):
    return SpecConfig(
        algorithm=algorithm,
        topk=topk,
        page_size=page_size,
        num_steps=steps,
        nodes=nodes,
        backend="cpu_native",
        overlap=overlap,
        model="mock",
        variant=hidden,
    ).canonical()


CONFIGURATIONS = [
    config_of("EAGLE", 1, 3, None, 1, False),
    config_of("EAGLE3", 4, 4, "middle", 4, True, hidden=True),
    config_of("EAGLE", 8, 3, "middle", 16, True),
    config_of("STANDALONE", 1, 4, None, 64, True),
    config_of("EAGLE3", 2, 3, "max", 64, False),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("config", CONFIGURATIONS[:: count(ci=2, full=1)], ids=str)
def test_random_requests(folders, config):
    # With a region and pages of 64, requests here seldom grow by a page.
    has_region = config.topk > 1 and config.page_size < 64
    layout = "region" if has_region else "paged"
    slots = slots_for(config, rows=2, contexts=2 - has_region, layout=layout)
    engine = spec_engine(
        folders, config, max_total_tokens=slots, speculative_draft_layout=layout
    )
    scheduler = engine.scheduler
    recorder = AcceptRecorder(scheduler)
    traffic = Traffic(engine, random.Random(str(config)), count(**REQUESTS))

    def on_step(step):
        traffic.on_step(step)
        if step % 8 == 0:
            check_accounting(scheduler)

    answers = {}
    while traffic.left:
        # Checks at its end, when nothing runs, that the pools balance.
        answers |= engine.run(on_step=on_step)
        assert scheduler.stats_snapshot().num_used_tokens == 0
    check(traffic.expected, answers, vocab_size=VOCAB_SIZES["mock"])
    found = predicted_acceptance(recorder, engine, list(traffic.expected))
    assert not found.differing, found
    assert set(found.lens) == set(range(1, config.num_steps + 2)), found.lens
    assert (found.off_first_branch > 0) == (config.topk > 1), found
    recorder.check_counters()
    stats = scheduler.stats_snapshot()
    assert stats.num_requests_total == len(traffic.expected)
    assert stats.num_aborted_requests_total > 0
    if config.topk > 1:
        assert stats.num_retracted_reqs > 0
    check_no_leak(engine)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-order", "overlap"])
def test_retraction_of_chains_is_harmless(folders, overlap):
    """More tokens than slots: requests are retracted, prefilled again in chunks, and
    drafted for as before."""
    config = dataclasses.replace(CONFIGURATIONS[0], overlap=overlap)
    engine = spec_engine(
        folders, config, max_total_tokens=300, schedule_conservativeness=0.1
    )
    recorder = AcceptRecorder(engine.scheduler)
    expected = {}
    for i in range(12):
        prompt = [(31 * i + j) % VOCAB_SIZES["mock"] for j in range(20)]
        rid = engine.submit(prompt, max_new_tokens=80, ignore_eos=True, stream=True)
        expected[rid] = Expected(prompt, 80)
    check(expected, engine.run(), vocab_size=VOCAB_SIZES["mock"])
    assert engine.scheduler.stats_snapshot().num_retracted_reqs > 0
    assert not predicted_acceptance(recorder, engine, list(expected)).differing
    check_no_leak(engine)


def test_prefixes_are_found_and_draft_slots_with_them(folders):
    """A second run of the same prompts prefills little, and drafts as well as before:
    the draft's slots of a prefix are as good as new."""
    config = CONFIGURATIONS[0]
    engine = spec_engine(folders, config, max_total_tokens=4096)
    recorder = AcceptRecorder(engine.scheduler)
    rng = random.Random(1)
    vocab = VOCAB_SIZES["mock"]
    prompts = [[rng.randrange(vocab) for _ in range(90)] for _ in range(6)]
    first = {}
    for wave in range(2):
        rids = [
            engine.submit(prompt, rid=f"{wave}-{i}", max_new_tokens=40, ignore_eos=True)
            for i, prompt in enumerate(prompts)
        ]
        answers = engine.run()
        for i, rid in enumerate(rids):
            if wave:
                # All but the last pair of tokens.
                assert answers[rid].cached_tokens >= len(prompts[i]) - 2
                assert answers[rid].output_ids == first[i].output_ids
            else:
                first[i] = answers[rid]
        assert not predicted_acceptance(recorder, engine, rids).differing
    check_no_leak(engine)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
