"""Logits of tiny random models equal transformers', through every way to fill the
KV."""

from __future__ import annotations

import pytest
import torch
import transformers

from sglang.srt.forward.batch import ForwardMode
from sglang.srt.models.registry import supported_architectures
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.hybrid_models import HYBRIDS, write_text_model
from sglang.test.tiny_models import FAMILIES, write_tiny_model

register_cpu_ci(est_time=19, suite="cpu")

TOLERANCE = 2e-4
PROMPT_LENS = (1, 5, 17, 40)
OVERRIDES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "linear-rope": {
        "rope_parameters": {
            "rope_type": "linear",
            "rope_theta": 10000.0,
            "factor": 2.0,
        }
    },
}


@pytest.fixture(scope="module", params=[*FAMILIES, *HYBRIDS])
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_text_model(folder, request.param)
    return folder, reference_model(folder)


def reference_model(folder):
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32).eval()


def reference_logits(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def prompts(seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 264, (n,), generator=generator).tolist() for n in PROMPT_LENS
    ]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_every_text_architecture_has_a_parity_test():
    assert set(supported_architectures()) - {"MockForCausalLM"} == {
        *FAMILIES,
        *HYBRIDS,
    }


@pytest.mark.parametrize("backend", ["torch_native", "cpu_native"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prefill_chunks_and_decode(family, page_size, backend):
    """A batch is prefilled whole, in chunks, then decoded token by token."""
    folder, reference = family
    harness = ForwardHarness(folder, page_size=page_size, attention_backend=backend)
    batch = prompts(seed=page_size)
    rows = [harness.new_row(tokens) for tokens in batch]
    for row, tokens in zip(rows, batch, strict=True):
        expected = reference_logits(reference, tokens)
        whole = harness.extend([(row, len(tokens))])[0]
        assert_close(whole, expected[-1])
        chunked = harness.new_row(tokens)
        done = 0
        for size in (page_size, 3 * page_size, len(tokens)):
            end = min(done + size, len(tokens))
            if end > done:
                logits = harness.extend([(chunked, end)])[0]
                assert_close(logits, expected[end - 1])
                done = end
    for step in range(6):
        for row in rows:
            harness.append(row, (7 * step + row) % 264)
        logits = harness.forward(ForwardMode.DECODE, [(r, None) for r in rows])
        for i, row in enumerate(rows):
            assert_close(
                logits[i], reference_logits(reference, harness.tokens(row))[-1]
            )


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_cached_prefix_prefill_in_a_mixed_batch(family, page_size):
    """Rows that borrow another row's prefix slots see what they would have computed."""
    folder, reference = family
    harness = ForwardHarness(folder, page_size=page_size)
    if harness.runner.state_pool is not None:
        pytest.skip("a row's state is not in the middle of its tokens")
    owner_tokens = prompts(seed=9)[-1]
    owner = harness.new_row(owner_tokens)
    harness.extend([(owner, len(owner_tokens))])
    shared = 32  # whole pages of every size
    borrowers = []
    for tail in ([1, 2, 3], [250], list(range(30))):
        tokens = owner_tokens[:shared] + tail
        borrowers.append(harness.new_row(tokens, borrow=(owner, shared)))
    logits = harness.extend([(row, len(harness.tokens(row))) for row in borrowers])
    for i, row in enumerate(borrowers):
        assert_close(logits[i], reference_logits(reference, harness.tokens(row))[-1])


@pytest.mark.parametrize("name", [*OVERRIDES])
def test_variants_of_the_configuration(tmp_path, name):
    write_tiny_model(tmp_path, "LlamaForCausalLM", **OVERRIDES[name])
    reference = reference_model(tmp_path)
    harness = ForwardHarness(tmp_path)
    tokens = prompts(seed=4)[-1]
    row = harness.new_row(tokens)
    assert_close(
        harness.extend([(row, len(tokens))])[0], reference_logits(reference, tokens)[-1]
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(family, dtype):
    folder, reference = family
    harness = ForwardHarness(folder, dtype=dtype)
    tokens = prompts(seed=5)[-1]
    row = harness.new_row(tokens)
    logits = harness.extend([(row, len(tokens))])[0]
    expected = reference_logits(reference, tokens)[-1]
    error = (logits - expected).norm() / expected.norm()
    limit = {"bfloat16": 0.05, "float16": 0.01}[dtype]
    # Twice the layers; transformers' own models are as far off.
    assert error < (4 * limit if harness.runner.state_pool is not None else limit)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
