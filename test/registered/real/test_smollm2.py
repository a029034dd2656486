"""SmolLM2-135M: tokens, log probabilities and texts equal transformers'."""

from __future__ import annotations

import httpx
import openai
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
from sglang.test.server_process import ServerProcess

register_cpu_ci(est_time=120, suite="real")


@pytest.fixture(scope="module")
def prompts(smollm2):
    return real_prompts(load_tokenizer(str(smollm2)))


@pytest.fixture(scope="module")
def reference(smollm2):
    return Reference(smollm2)


@pytest.fixture(scope="module")
def outputs(reference):
    return GreedyOutputs(reference)


@pytest.fixture(scope="module", params=[1, 64])
def engine(smollm2, request):
    return EngineHarness(
        smollm2,
        page_size=request.param,
        chunked_prefill_size=512,
        context_length=2048,
        kv_canary="raise",
    )


def test_prompts_are_of_5_to_1500_tokens(prompts):
    assert len(prompts) == 20
    assert min(map(len, prompts)) <= 5 and max(map(len, prompts)) == 1500


def test_greedy_tokens_and_logprobs_cold(engine, prompts, outputs):
    outputs.check_cold(engine, prompts)


def test_greedy_tokens_cached_and_batched(engine, prompts, outputs):
    assert outputs.check_batched(engine, prompts * 3) > 0


def test_drafting_for_itself_changes_no_token(smollm2, prompts, outputs):
    engine = EngineHarness(
        smollm2,
        page_size=4,
        context_length=2048,
        kv_canary="raise",
        speculative_draft_model_path=str(smollm2),
        **DRAFTS_FOR_ITSELF,
    )
    outputs.check_batched(engine, prompts)


def test_the_gguf_file_is_read_as_transformers_reads_it(smollm2):
    check_gguf(smollm2)


@pytest.fixture(scope="module")
def server(smollm2):
    server = ServerProcess(
        ["--load-format", "gguf", "--model-path", str(smollm2), "--kv-canary", "heal"]
    ).wait_ready()
    yield server
    server.stop()


MESSAGES = [{"role": "user", "content": "Répète après moi : 🎉 你好, größer! Encore."}]


def test_chat_of_the_gguf_file_equals_transformers(smollm2, reference, server):
    tokenizer = load_tokenizer(str(smollm2))
    text = tokenizer.apply_chat_template(MESSAGES)
    assert text.startswith("<|im_start|>system") and text.endswith("assistant\n")
    prompt = tokenizer.encode(text, add_special_tokens=False)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-") as client:
        answer = client.chat.completions.create(
            model="-", messages=MESSAGES, max_tokens=NEW_TOKENS, temperature=0
        )
    assert answer.usage.prompt_tokens == len(prompt)
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": NEW_TOKENS}}
    body["sampling_params"]["temperature"] = 0
    same = httpx.post(server.url + "/generate", json=body, timeout=60).json()
    assert same["output_ids"] == reference.greedy(prompt, same["output_ids"])
    assert answer.choices[0].message.content == same["text"]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_streamed_text_never_breaks_a_character(server, temperature):
    """Emoji and Chinese take several tokens each; a stream sends whole characters."""
    options = {
        "model": "-",
        "prompt": "🎉🎊🥳🎈 你好世界 🎉🎊🥳🎈 你好世界 🎉🎊",
        "max_tokens": 60,
        "temperature": temperature,
        "seed": 7,
    }
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-") as client:
        whole = client.completions.create(**options).choices[0].text
        parts = [
            chunk.choices[0].text
            for chunk in client.completions.create(**options, stream=True)
            if chunk.choices
        ]
    assert "".join(parts) == whole
    assert len(parts) > 5
    assert not any("�" in part for part in parts[:-1])
    assert any(ord(char) > 0x3000 for char in whole)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
