"""Prompts of embeddings: the embeddings of tokens mean those tokens, and prompts share
KV exactly as far as their embeddings are equal."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.replay_traffic import (
    check_same,
    record_of,
    recorded_engine,
    replayed,
)
from sglang.test.scale import count
from sglang.test.tiny_models import (
    write_mock_model,
    write_tiny_eagle,
    write_tiny_model,
)

register_cpu_ci(est_time=8, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")

HIDDEN, VOCAB = 64, 256


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def embed(llama):
    table = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    return lambda prompt: table[prompt].numpy().astype(np.float32).tobytes()


def engine(model, **args):
    return EngineHarness(
        model, **{"skip_tokenizer_init": True, "dtype": "float32"} | args
    )


def prompts_of(rng, lengths):
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def submit(harness, prompt, embed, **params):
    return harness.submit(
        [0] * len(prompt), input_embeds=embed(prompt), ignore_eos=True, **params
    )


@pytest.mark.parametrize("chunk", [512, 16])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_embeddings_of_tokens_mean_the_tokens(llama, embed, page_size, chunk, overlap):
    """In a batch with requests of tokens, whole and in chunks."""
    prompts = prompts_of(random.Random(0), [5, 40, 1, 33])
    options = {"page_size": page_size, "chunked_prefill_size": chunk}
    harness = engine(llama, overlap=overlap, **options)
    expected = [
        harness.generate(p, max_new_tokens=8, ignore_eos=True).output_ids
        for p in prompts
    ]
    rids = []
    for prompt in prompts:
        rids.append(submit(harness, prompt, embed, max_new_tokens=8))
        rids.append(harness.submit(prompt, max_new_tokens=8, ignore_eos=True))
    answers = harness.run()
    found = [answers[rid].output_ids for rid in rids]
    assert found == [ids for ids in expected for _ in range(2)]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_prefixes_are_shared_as_far_as_the_contents_are_equal(
    llama, embed, page_size, overlap
):
    """Mixed with the same prompts as tokens, over tenants, in a small pool."""
    rng = random.Random(1)
    (stem,) = prompts_of(rng, [40])
    prompts = [
        stem[: rng.choice((20, 33, 40))] + tail
        for tail in prompts_of(rng, [rng.randrange(1, 20) for _ in range(12)])
    ]
    options = {"max_new_tokens": 4, "ignore_eos": True}
    plain = engine(llama, disable_radix_cache=True)
    expected = [plain.generate(p, **options).output_ids for p in prompts]
    harness = engine(
        llama,
        overlap=overlap,
        page_size=page_size,
        kv_canary="raise",
        kv_canary_real_data="all",
        kv_canary_sweep_interval=1,
        max_total_tokens=512,
    )
    rids = []
    for i in rng.choices(range(len(prompts)), k=count(ci=36, full=500)):
        form = {"input_embeds": embed(prompts[i])} if rng.random() < 0.7 else {}
        tenant = rng.choice((None, None, "tenant"))
        rids.append(
            (i, harness.submit(prompts[i], extra_key=tenant, **form, **options))
        )
        if rng.random() < 0.3:
            rids.append((i, submit(harness, prompts[i], embed, max_new_tokens=4)))
    answers = harness.run()
    assert all(answers[rid].output_ids == expected[i] for i, rid in rids)


def test_ngrams_are_drafted_from_tokens_alone(llama, embed):
    """Also where the same embeddings come again."""
    (part,) = prompts_of(random.Random(2), [6])
    options = {"max_new_tokens": 24, "ignore_eos": True}
    expected = engine(llama).generate(part * 5, **options).output_ids
    harness = engine(
        llama,
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=6,
        kv_canary="raise",
        kv_canary_real_data="all",
    )
    for form in ({}, {"input_embeds": embed(part * 5)}, {}):
        for _ in range(2):
            assert harness.generate(part * 5, **form, **options).output_ids == expected


@pytest.fixture(scope="module")
def drafts(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    heads = {
        name: write_tiny_eagle(folder / name, llama, algorithm=name)
        for name in ("EAGLE", "EAGLE3")
    }
    narrow = write_tiny_model(folder / "narrow", "LlamaForCausalLM", hidden_size=32)
    return heads | {"STANDALONE": llama, "narrow": narrow}


@pytest.mark.parametrize("draft", ["EAGLE", "EAGLE3", "STANDALONE", "narrow"])
@pytest.mark.parametrize(("chunk", "overlap"), [(512, True), (16, False)])
def test_a_draft_reads_them(llama, embed, drafts, draft, chunk, overlap):
    """What a draft computes from the embeddings of tokens is what it computes from the
    tokens: all slots of its pool are the same afterwards but the scratch slot, which
    has the K of padding. A draft of another width has nothing to read, and the answers
    are the same."""
    prompts = prompts_of(random.Random(5), [40, 7, 33])
    is_narrow = draft == "narrow"
    options = {"max_new_tokens": 12, "ignore_eos": True}

    def served(submit_one):
        harness = engine(
            llama,
            overlap=overlap,
            chunked_prefill_size=chunk,
            speculative_algorithm="STANDALONE" if is_narrow else draft,
            speculative_draft_model_path=str(drafts[draft]),
            speculative_num_steps=3,
            speculative_eagle_topk=2,
            speculative_num_draft_tokens=6,
            kv_canary="raise",
        )
        rids = [submit_one(harness, prompt, **options) for prompt in prompts]
        answers = harness.run()
        pool = harness.scheduler.worker.draft_worker.draft_runner.token_to_kv_pool
        return [answers[rid].output_ids for rid in rids], pool.k_buffer[:, 1:]

    expected, keys = served(lambda h, p, **o: h.submit(p, **o))
    found, embedded_keys = served(
        lambda h, p, **o: h.submit([0] * len(p), input_embeds=embed(p), **o)
    )
    assert found == expected
    assert is_narrow or torch.equal(keys, embedded_keys)


def test_only_equal_embeddings_are_cached(llama, embed):
    first, second = prompts_of(random.Random(1), [48, 48])
    second[:20] = first[:20]
    harness = engine(llama, kv_canary="raise", kv_canary_real_data="all")

    def cached(prompt, **form):
        return harness.generate(
            prompt, max_new_tokens=4, ignore_eos=True, **form
        ).cached_tokens

    assert cached(first) == 0
    assert cached(first, input_embeds=embed(first)) == 0, "of tokens, not of contents"
    assert cached(first, input_embeds=embed(first)) == 47
    assert cached(second, input_embeds=embed(second)) == 20
    assert cached(first) == 47
    # One bit of one embedding, and a sign that no product shows.
    flipped = np.frombuffer(embed(first), np.float32).copy()
    flipped[30 * HIDDEN] = np.nextafter(flipped[30 * HIDDEN], np.float32(9))
    assert cached(first, input_embeds=flipped.tobytes()) == 30


@pytest.mark.parametrize("has_tokens", [True, False])
def test_recorded_decisions_replay(llama, embed, tmp_path, has_tokens):
    """From a checkpoint whose cache holds embeddings, with and without contents."""
    rng = random.Random(3)
    (stem,) = prompts_of(rng, [30])
    prompts = [stem[:20] + tail for tail in prompts_of(rng, [5, 12, 12])]
    harness = recorded_engine(
        llama,
        tmp_path,
        dtype="float32",
        page_size=4,
        kv_canary_record=8,
        kv_canary_report_tokens=has_tokens,
    )
    for prompt in rng.choices(prompts, k=12):
        submit(harness, prompt, embed, max_new_tokens=4)
        harness.submit(prompt, max_new_tokens=3, ignore_eos=True)
        harness.run()
    record = record_of(harness)
    assert record.checkpoint is not None
    check_same(replayed(record), record)


def test_a_penalty_beside_a_prompt_of_embeddings(llama, embed):
    """Ids of contents are beyond the vocabulary, and no penalty counts them."""
    (prompt,) = prompts_of(random.Random(4), [30])
    harness = engine(llama, kv_canary="raise")
    options = {"max_new_tokens": 12, "frequency_penalty": 1.5, "ignore_eos": True}
    due = harness.generate(prompt, **options).output_ids
    rids = [
        harness.submit(prompt, input_embeds=embed(prompt), **options),
        harness.submit(prompt, repetition_penalty=1.3, **options),
    ]
    assert harness.run()[rids[0]].output_ids == due


def test_a_retracted_request_is_embedded_again(llama, embed):
    prompts = prompts_of(random.Random(2), [30, 30, 30])
    roomy = engine(llama)
    expected = [
        roomy.generate(p, max_new_tokens=60, ignore_eos=True).output_ids
        for p in prompts
    ]
    tight = engine(llama, max_total_tokens=150, schedule_conservativeness=0.0)
    rids = [submit(tight, p, embed, max_new_tokens=60) for p in prompts]
    answers = tight.run()
    assert [answers[rid].output_ids for rid in rids] == expected
    assert tight.scheduler.stats_snapshot().num_retracted_reqs > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"input_embeds": b"\0" * 4 * 3},
            "rows of 1 numbers, but .* hidden_size is 64",
        ),
        (
            {"input_embeds": np.full(3 * HIDDEN, np.inf, np.float32).tobytes()},
            "beyond float32",
        ),
        ({"repetition_penalty": 1.5}, "repetition_penalty needs the tokens"),
        ({"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len needs"),
    ],
)
def test_refusals(llama, change, message):
    harness = engine(llama)
    embeds = np.zeros(3 * HIDDEN, np.float32).tobytes()
    answer = harness.generate([0] * 3, **{"input_embeds": embeds} | change)
    assert answer.finish_reason.status_code == 400
    assert re.search(message, answer.finish_reason.message)


def test_a_model_of_tokens_refuses(tmp_path):
    harness = EngineHarness(write_mock_model(tmp_path), skip_tokenizer_init=True)
    answer = harness.generate([0], input_embeds=b"\0" * 4)
    assert answer.finish_reason.status_code == 400
    assert "MockForCausalLM takes tokens only" in answer.finish_reason.message


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
