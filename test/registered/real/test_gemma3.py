"""Gemma 3 270M: tokens and log probabilities equal transformers', past its window."""

from __future__ import annotations

import pytest

from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.real_prompts import (
    DRAFTS_FOR_ITSELF,
    NEW_TOKENS,
    GreedyOutputs,
    Reference,
    check_gguf,
    real_prompts,
)

register_cpu_ci(est_time=240, suite="real")

WINDOW = 512
OPTIONS = {
    "context_length": 2048,
    "chunked_prefill_size": 384,
    "max_total_tokens": 8192,
    # Fewer window slots than tokens of the prompts: some have to leave.
    "swa_full_tokens_ratio": 0.25,
    "kv_canary": "none",
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
def outputs(reference):
    return GreedyOutputs(reference)


@pytest.fixture(scope="module", params=[1, 64])
def engine(gemma3, request):
    return EngineHarness(gemma3, page_size=request.param, **OPTIONS)


def window_slots(engine):
    (swa,) = engine.scheduler.cache.allocator.secondary
    assert swa.window == WINDOW
    return swa


def test_prompts_begin_with_bos_and_pass_the_window(gemma3, prompts):
    bos = load_tokenizer(str(gemma3)).bos_token_id
    assert all(prompt[0] == bos and bos not in prompt[1:] for prompt in prompts)
    assert sum(len(prompt) + NEW_TOKENS > WINDOW for prompt in prompts) == 3


def test_greedy_tokens_and_logprobs_cold(engine, prompts, outputs):
    outputs.check_cold(engine, prompts)
    swa, cached = window_slots(engine), engine.scheduler.cache.total_size()
    assert swa.size - swa.available_size() < cached, "no token left a window"


def test_greedy_tokens_cached_and_batched(engine, prompts, outputs):
    # A prompt beside its copies: window slots of others are soon taken.
    copies = [prompt for prompt in prompts for _ in range(3)]
    assert outputs.check_batched(engine, copies) > 0


def test_drafting_for_itself_changes_no_token(gemma3, prompts, outputs):
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
    outputs.check_batched(engine, some)


def test_the_gguf_file_is_read_as_transformers_reads_it(gemma3):
    check_gguf(gemma3)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
