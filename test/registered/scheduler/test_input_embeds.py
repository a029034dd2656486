"""Prompts of embeddings: the embeddings of tokens mean those tokens, and such a prompt
shares no prefix with anybody."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from safetensors.torch import load_file

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.tiny_models import write_mock_model, write_tiny_model

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


def test_prefixes_are_neither_shared_nor_kept(llama, embed):
    """Two prompts of embeddings have the same placeholder ids and other contents."""
    first, second = prompts_of(random.Random(1), [48, 48])
    harness = engine(llama, kv_canary="raise", kv_canary_real_data="all")
    expected = harness.generate(second, max_new_tokens=4, ignore_eos=True).output_ids
    cached = harness.scheduler.cache.total_size()
    for prompt in (first, second):
        rid = submit(harness, prompt, embed, max_new_tokens=4)
        answer = harness.run()[rid]
        assert answer.cached_tokens == 0
    assert answer.output_ids == expected
    assert harness.scheduler.cache.total_size() == cached
    zeros = harness.generate([0] * 48, max_new_tokens=1)
    assert zeros.cached_tokens == 0


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
