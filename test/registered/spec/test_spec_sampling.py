"""Sampled requests with speculation: distributed as the target says, and the same for
the same seed whatever else is in the batch."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count
from sglang.test.spec_accept import AcceptRecorder
from sglang.test.spec_adaptive import InTurn
from sglang.test.spec_matrix import SpecConfig
from sglang.test.spec_world import (
    ModelFolders,
    device,
    plain_engine,
    spec_engine,
    write_noisy_copy,
)
from sglang.test.tiny_models import write_tiny_eagle, write_tiny_model

register_cpu_ci(est_time=12, suite="cpu", full_time=110)
register_cuda_ci(est_time=60, suite="cuda")

VOCAB = 7
SMALL = {
    "vocab_size": VOCAB,
    "eos_token_id": VOCAB - 1,
    "max_position_embeddings": 32,
}
PROMPT = [3, 1, 4, 1, 5]
# Requests that wait at a time: fewer than `--max-queued-requests`.
QUEUED = 1000
# (request, how the target's own distribution follows from its logits' probabilities)
SETTINGS = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 0.9, "top_k": 3},
    "top-p": {"temperature": 0.9, "top_p": 0.75},
    "min-p": {"temperature": 0.9, "min_p": 0.3},
    "penalty": {"temperature": 0.8, "frequency_penalty": 0.5},
}


def filtered(probs, setting):
    """The rest of a distribution, by the definitions of the parameters."""
    order = sorted(range(VOCAB), key=lambda t: -probs[t])
    kept = set(order[: setting.get("top_k", VOCAB)])
    mass = 0.0
    total = sum(probs[t] for t in kept)
    for token in order:
        if mass >= setting.get("top_p", 1.0) * total:
            kept.discard(token)
        mass += probs[token] if token in kept else 0.0
    floor = setting.get("min_p", 0.0) * probs[order[0]]
    kept = {t for t in kept if probs[t] >= floor}
    total = sum(probs[t] for t in kept)
    return [probs[t] / total if t in kept else 0.0 for t in range(VOCAB)]


class Target:
    """Exact probabilities of the next token, from the engine without speculation."""

    def __init__(self, engine, setting):
        self._engine, self._setting = engine, setting
        self._known = {}

    def after(self, output):
        """Of the token that follows PROMPT and `output`, a tuple."""
        if output not in self._known:
            answer = self._engine.generate(
                PROMPT + list(output),
                max_new_tokens=1,
                ignore_eos=True,
                return_logprob=True,
                top_logprobs_num=VOCAB,
            )
            logits = [0.0] * VOCAB
            for logprob, token in answer.logprobs[0].output_top[0]:
                logits[token] = logprob
            penalty = self._setting.get("frequency_penalty", 0.0)
            for token in output:
                logits[token] -= penalty
            scaled = [math.exp(x / self._setting["temperature"]) for x in logits]
            probs = [x / sum(scaled) for x in scaled]
            self._known[output] = filtered(probs, self._setting)
        return self._known[output]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = write_tiny_model(root / "target", "LlamaForCausalLM", seed=3, **SMALL)
    write_noisy_copy(target, root / "STANDALONE", "LlamaForCausalLM", noise=0.05)
    write_tiny_eagle(root / "EAGLE", target, algorithm="EAGLE")
    plain = plain_engine(target, context_length=32)
    return root, plain


def speculative(root, algorithm, topk, **options):
    usual = {
        "device": device(),
        "dtype": "float32",
        "max_total_tokens": 8192,
        "max_running_requests": 128,
        "skip_tokenizer_init": True,
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(root / algorithm),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": 4 if topk == 1 else 12,
    }
    return EngineHarness(root / "target", **usual | options)


def chi_square(found: Counter, expected: dict) -> tuple[float, int]:
    """Statistic and degrees of freedom; cells that expect less than five are one."""
    total = sum(found.values())
    assert all(expected[cell] > 0 for cell in found)
    statistic, cells, rest_found, rest_expected = 0.0, 0, 0, 0.0
    for cell, probability in expected.items():
        wanted = probability * total
        if wanted < 5:
            rest_found, rest_expected = rest_found + found[cell], rest_expected + wanted
            continue
        statistic += (found[cell] - wanted) ** 2 / wanted
        cells += 1
    if rest_expected > 0:
        statistic += (rest_found - rest_expected) ** 2 / max(rest_expected, 1.0)
        cells += 1
    return statistic, cells - 1


def limit(freedom: int) -> float:
    """About the 99.99 % quantile of chi-square (Wilson and Hilferty)."""
    spread = 2 / (9 * max(freedom, 1))
    return max(freedom, 1) * (1 - spread + 3.72 * spread**0.5) ** 3


@pytest.mark.parametrize(
    ("algorithm", "topk", "name"),
    [
        *(("STANDALONE", topk, name) for topk in (1, 4) for name in SETTINGS),
        ("EAGLE", 4, "temperature"),
    ],
)
def test_tokens_are_distributed_as_the_target(world, algorithm, topk, name):
    """The first three tokens of many requests that differ in their seed. The prefill
    samples the first one; the others are drafts accepted, or what replaced them."""
    root, plain = world
    setting = SETTINGS[name]
    share = 1 if name == "temperature" else 4
    samples = count(ci=1500, full=20000) // share
    engine = speculative(root, algorithm, topk)
    recorder = AcceptRecorder(engine.scheduler)
    found: Counter[tuple[int, ...]] = Counter()
    for begin in range(0, samples, QUEUED):
        for seed in range(begin, min(begin + QUEUED, samples)):
            engine.submit(
                PROMPT, max_new_tokens=3, ignore_eos=True, sampling_seed=seed, **setting
            )
        found.update(tuple(a.output_ids) for a in engine.run().values())
    assert found.total() == samples and {len(output) for output in found} == {3}
    target = Target(plain, setting)
    one = target.after(())
    two, three = {}, {}
    for a, first in enumerate(one):
        for b, second in enumerate(target.after((a,)) if first else ()):
            two[a, b] = first * second
            if first * second:
                for c, third in enumerate(target.after((a, b))):
                    three[a, b, c] = first * second * third
    second_tokens = Counter(
        {
            (a, b): sum(n for (x, y, _), n in found.items() if (x, y) == (a, b))
            for a, b in two
        }
    )
    for counts, expected in ((+second_tokens, two), (found, three)):
        statistic, freedom = chi_square(counts, expected)
        assert statistic < limit(freedom), (statistic, freedom)
    lens = recorder.lens()
    assert lens[1] > 0 and sum(lens[n] for n in lens if n > 1) > samples / 20


def config_of(algorithm, topk):
    return SpecConfig(
        algorithm=algorithm,
        topk=topk,
        page_size=4,
        num_steps=4,
        nodes="middle" if topk > 1 else None,
        backend="cpu_native",
        overlap=True,
        model="llama",
        variant=None,
    )


@pytest.mark.parametrize(("topk", "in_turn"), [(1, False), (4, False), (4, True)])
def test_a_seed_gives_the_output_of_plain_decoding_in_any_company(
    tmp_path, topk, in_turn
):
    folders = ModelFolders(tmp_path)
    engine = spec_engine(
        folders,
        config_of("STANDALONE", topk),
        max_total_tokens=8192,
        disable_radix_cache=True,
        speculative_adaptive=in_turn,
        skip_server_warmup=in_turn,
    )
    if in_turn:
        engine.scheduler.shapes.policy = InTurn(engine.scheduler.shapes, 3)
    rng = random.Random(1)
    prompt = [rng.randrange(250) for _ in range(30)]
    seeded = [
        {"temperature": 1.0, "sampling_seed": 7},
        {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 8},
        {"temperature": 1.2, "top_k": 40, "sampling_seed": 9},
        {"temperature": 0.9, "min_p": 0.02, "sampling_seed": 10},
        {"temperature": 0.9, "presence_penalty": 0.5, "sampling_seed": 11},
    ]
    options = {"max_new_tokens": 40, "ignore_eos": True}
    alone = [engine.generate(prompt, **options, **s).output_ids for s in seeded]
    again = [engine.generate(prompt, **options, **s).output_ids for s in seeded]
    assert alone == again
    plain = plain_engine(folders.target("llama"))
    assert alone == [plain.generate(prompt, **options, **s).output_ids for s in seeded]
    assert len({tuple(output) for output in alone}) == len(seeded)
    rids = []
    for i, sampling in enumerate(seeded):
        for _ in range(3):
            other = [rng.randrange(250) for _ in range(rng.randrange(1, 60))]
            engine.submit(
                other, max_new_tokens=rng.randrange(1, 50), temperature=i % 2 * 0.9
            )
        rids.append(engine.submit(prompt, **options, **sampling))
    answers = engine.run()
    assert [answers[rid].output_ids for rid in rids] == alone


@pytest.mark.parametrize("topk", [1, 4])
def test_greedy_rows_of_a_sampled_batch_stay_greedy(tmp_path, topk):
    folders = ModelFolders(tmp_path)
    config = config_of("STANDALONE", topk)
    engine = spec_engine(folders, config, max_total_tokens=8192)
    plain = plain_engine(folders.target("llama"))
    rng = random.Random(2)
    expected = {}
    for i in range(8):
        prompt = [rng.randrange(250) for _ in range(rng.randrange(5, 60))]
        answer = plain.generate(prompt, max_new_tokens=30, ignore_eos=True)
        rid = engine.submit(prompt, max_new_tokens=30, ignore_eos=True)
        expected[rid] = answer.output_ids
        engine.submit(prompt, max_new_tokens=30, temperature=1.0, sampling_seed=i)
    answers = engine.run()
    for rid, output in expected.items():
        assert answers[rid].output_ids == output


def test_low_thresholds_accept_more(world):
    """The effect of --speculative-accept-threshold-single and -acc."""
    root, _ = world
    means = []
    for threshold in (1.0, 0.1):
        engine = speculative(
            root,
            "STANDALONE",
            4,
            speculative_accept_threshold_single=threshold,
            speculative_accept_threshold_acc=threshold,
        )
        recorder = AcceptRecorder(engine.scheduler)
        for seed in range(64):
            engine.submit(
                PROMPT,
                max_new_tokens=16,
                ignore_eos=True,
                temperature=1.0,
                sampling_seed=seed,
            )
        engine.run()
        means.append(recorder.mean())
    assert means[1] > means[0] + 0.3, means


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
