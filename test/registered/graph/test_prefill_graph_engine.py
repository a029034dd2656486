"""The whole scheduler with prefill graphs: what requests get, and what is counted."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from sglang.srt.model_executor.breakable_cuda_graph_runner import (
    BreakableCudaGraphRunner,
)
from sglang.srt.model_executor.graph_backends import RecordingBackend
from sglang.srt.model_executor.memory_plan import prefill_token_counts
from sglang.srt.models.mock_oracle import next_tokens
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.scale import count
from sglang.test.tiny_models import write_mock_model, write_tiny_model

register_cpu_ci(est_time=15, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

VOCAB = 250
CHUNK = 64
ON_GPU = torch.cuda.is_available()
CANARY = {
    "kv_canary": "raise",
    "kv_canary_real_data": "all",
    "kv_canary_sweep_interval": 4,
}


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return write_mock_model(tmp_path_factory.mktemp("mock"), vocab_size=VOCAB)


def graphed_engine(model, **args):
    """On a GPU the worker captures by itself."""
    harness = EngineHarness(
        model,
        **{"skip_tokenizer_init": True, "chunked_prefill_size": CHUNK} | args,
    )
    runner = harness.scheduler.worker.model_runner
    if not ON_GPU:
        runner.prefill_graph_runner = BreakableCudaGraphRunner(
            runner,
            token_counts=prefill_token_counts(CHUNK),
            make_backend=RecordingBackend,
        )
    return harness


def oracle(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(next_tokens(tokens, vocab_size=VOCAB)[-1]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("canary", [{}, CANARY], ids=["off", "canary"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_mixed_traffic_equals_the_oracle(mock, page_size, canary, overlap):
    """Up to 32 requests at once: short and long prompts, shared prefixes, chunks."""
    rng = random.Random(page_size)
    harness = graphed_engine(
        mock, page_size=page_size, max_total_tokens=4096, overlap=overlap, **canary
    )
    expected = {}
    for _ in range(count(ci=2, full=20)):
        shared = [rng.randrange(VOCAB) for _ in range(100)]
        for _ in range(rng.randrange(1, 33)):
            start = rng.choice([0, 0, 16, 64, 100])
            fresh = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 7, 40, 90]))]
            prompt, new = shared[:start] + fresh, rng.randrange(1, 5)
            rid = harness.submit(prompt, max_new_tokens=new, ignore_eos=True)
            expected[rid] = oracle(prompt, new)
        answers = harness.run()
        for rid, answer in answers.items():
            assert answer.output_ids == expected[rid], rid
    stats = harness.scheduler.stats_snapshot()
    assert stats.prefill_cuda_graph_passes_total > 0
    assert stats.prefill_cuda_graph_fallbacks_total == {}
    assert stats.cuda_graph_passes_total >= stats.prefill_cuda_graph_passes_total


def test_fallbacks_are_reported_by_reason(tmp_path):
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM")
    harness = graphed_engine(folder, enable_return_hidden_states=True)
    harness.generate([1, 2, 3], max_new_tokens=1)
    harness.generate([1, 2, 3], max_new_tokens=1, return_hidden_states=True)
    harness.generate(
        [4, 5, 6], max_new_tokens=1, return_logprob=True, logprob_start_len=0
    )
    embeds = array("f", [0.5] * 3 * 64).tobytes()
    harness.generate([0] * 3, max_new_tokens=1, input_embeds=embeds)
    stats = harness.scheduler.stats_snapshot()
    assert stats.prefill_cuda_graph_passes_total == 1
    assert stats.prefill_cuda_graph_fallbacks_total == {
        "hidden_mode": 1,
        "input_logprobs": 1,
        "input_embeds": 1,
    }


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
