"""Gemma 3 270M: tokens and log probabilities equal transformers', past its window."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.model_loader.weight_utils import iterate_weights
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.real_prompts import Reference, real_prompts

register_cpu_ci(est_time=240, suite="real")

WINDOW = 512
NEW_TOKENS = 24
GREEDY = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
# Of one log probability in float32.
TOLERANCE = 5e-4
OPTIONS = {
    "context_length": 2048,
    "chunked_prefill_size": 384,
    "max_total_tokens": 8192,
    # Fewer window slots than tokens of the prompts: some have to leave.
    "swa_full_tokens_ratio": 0.25,
    "kv_canary": "none",
}
DRAFTS_FOR_ITSELF = {
    "speculative_algorithm": "STANDALONE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 8,
}


@pytest.fixture(scope="module")
def prompts(gemma3):
    """Some: the vocabulary of 262,144 makes logits expensive."""
    whole = real_prompts(load_tokenizer(str(gemma3)))
    return [*whole[::3], whole[-1]]


@pytest.fixture(scope="module")
def reference(gemma3):
    return Reference(gemma3)


@pytest.fixture(scope="module")
def outputs():
    """Greedy tokens by prompt, once they are known to be right."""
    return {}


def assert_greedy(prompt, tokens, reference, outputs):
    """Compare with the known tokens, or else with the reference."""
    key = tuple(prompt)
    if key not in outputs:
        assert len(tokens) == NEW_TOKENS
        assert tokens == reference.greedy(prompt, tokens)
        outputs[key] = tokens
    assert tokens == outputs[key]


@pytest.fixture(scope="module", params=[1, 64])
def engine(gemma3, request):
    return EngineHarness(gemma3, page_size=request.param, **OPTIONS)


def window_slots(engine):
    swa = engine.scheduler.cache.allocator.swa
    assert swa is not None and swa.window == WINDOW
    return swa


def test_prompts_begin_with_bos_and_pass_the_window(gemma3, prompts):
    bos = load_tokenizer(str(gemma3)).bos_token_id
    assert all(prompt[0] == bos and bos not in prompt[1:] for prompt in prompts)
    assert sum(len(prompt) + NEW_TOKENS > WINDOW for prompt in prompts) == 3


def test_greedy_tokens_and_logprobs_cold(engine, prompts, reference, outputs):
    for prompt in prompts:
        answer = engine.generate(
            prompt, **GREEDY, return_logprob=True, logprob_start_len=0
        )
        known = tuple(prompt) in outputs
        assert_greedy(prompt, answer.output_ids, reference, outputs)
        if known:
            continue
        given = [logprob for logprob, *_ in answer.logprobs[0].input_token[1:]]
        torch.testing.assert_close(
            torch.tensor(given),
            reference.prompt_logprobs(prompt, answer.output_ids),
            atol=TOLERANCE,
            rtol=0,
        )
    swa, cached = window_slots(engine), engine.scheduler.cache.total_size()
    assert swa.size - swa.available_size() < cached, "no token left a window"


def test_greedy_tokens_cached_and_batched(engine, prompts, reference, outputs):
    # A prompt beside its copies: window slots of others are soon taken.
    copies = [prompt for prompt in prompts for _ in range(3)]
    rids = [engine.submit(prompt, **GREEDY) for prompt in copies]
    answers = engine.run()
    for rid, prompt in zip(rids, copies, strict=True):
        assert_greedy(prompt, answers[rid].output_ids, reference, outputs)
    assert sum(answer.cached_tokens for answer in answers.values()) > 0


def test_drafting_for_itself_changes_no_token(gemma3, prompts, reference, outputs):
    engine = EngineHarness(
        gemma3,
        page_size=4,
        speculative_draft_model_path=str(gemma3),
        **OPTIONS,
        **DRAFTS_FOR_ITSELF,
    )
    assert window_slots(engine)
    some = prompts[1::2]
    assert max(map(len, some)) > WINDOW
    rids = [engine.submit(prompt, **GREEDY) for prompt in some]
    answers = engine.run()
    for rid, prompt in zip(rids, some, strict=True):
        assert_greedy(prompt, answers[rid].output_ids, reference, outputs)


def test_the_gguf_file_is_read_as_transformers_reads_it(gemma3):
    """Two readers of one file; and the folder is that file in bfloat16."""
    pytest.importorskip("accelerate")
    from transformers import GgufConfig

    theirs = Reference(
        gemma3,
        gguf_file="model.gguf",
        quantization_config=GgufConfig(dequantize=True),
    ).model.state_dict()
    folder = dict(iterate_weights(gemma3))
    names = set()
    for name, tensor in iterate_weights(gemma3 / "model.gguf"):
        names.add(name)
        assert torch.equal(tensor, theirs[name]), name
        assert torch.equal(tensor.bfloat16(), folder[name]), name
    assert names == set(folder) == set(theirs) - {"lm_head.weight"}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
