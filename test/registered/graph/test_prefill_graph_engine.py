"""The whole scheduler with prefill graphs: the answers, and the counters."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from sglang.srt.model_executor.breakable_cuda_graph_runner import (
    FALLBACK_REASONS,
    BreakableCudaGraphRunner,
)
from sglang.srt.model_executor.memory_plan import prefill_token_counts
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.head_models import add_head
from sglang.test.hybrid_models import write_text_model
from sglang.test.mock_oracle import next_tokens
from sglang.test.recording_backend import RecordingBackend
from sglang.test.scale import count
from sglang.test.tiny_models import (
    write_mock_draft,
    write_mock_model,
    write_tiny_eagle,
    write_tiny_model,
)

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
    if not ON_GPU:
        record(harness.scheduler.worker.model_runner)
    return harness


def record(runner, **options):
    runner.prefill_graph_runner = BreakableCudaGraphRunner(
        runner,
        token_counts=prefill_token_counts(CHUNK),
        make_backend=RecordingBackend,
        **options,
    )


def speculating_engine(mock, draft, algorithm, *, replays):
    harness = EngineHarness(
        mock,
        skip_tokenizer_init=True,
        chunked_prefill_size=CHUNK,
        max_total_tokens=4096,
        speculative_algorithm=algorithm,
        speculative_draft_model_path=str(draft),
        disable_piecewise_cuda_graph=not replays,
        overlap=True,
    )
    worker = harness.scheduler.worker
    if replays and not ON_GPU:
        draft_worker = worker.draft_worker
        record(worker.model_runner, capture_hidden_mode=draft_worker.target_hidden_mode)
        record(
            draft_worker.draft_runner,
            capture_hidden_mode=draft_worker._hidden_mode,
            draft_hidden_dim=draft_worker._hidden_dim,
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
    assert not any(stats.prefill_cuda_graph_fallbacks_total.values())
    assert stats.cuda_graph_passes_total >= stats.prefill_cuda_graph_passes_total


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_target_and_draft_replay_under_speculation(mock, tmp_path, algorithm):
    """Outputs equal the oracle, and as many drafts are accepted as eagerly: a wrong
    draft slot of a replay would cost acceptance and nothing else."""
    draft = write_mock_draft(tmp_path, kind=algorithm, vocab_size=VOCAB)
    harnesses = [
        speculating_engine(mock, draft, algorithm, replays=replays)
        for replays in (False, True)
    ]
    verifications = []
    for harness in harnesses:
        rng = random.Random(5)
        expected = {}
        for _ in range(count(ci=12, full=60)):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 30, 150]))]
            rid = harness.submit(prompt, max_new_tokens=20, ignore_eos=True)
            expected[rid] = oracle(prompt, 20)
        while harness.io.requests or harness.scheduler.has_work():
            harness.scheduler.step()
        last = {
            output.rid: output.spec_verify_ct
            for message in harness.io.responses
            for output in message.outputs
        }
        verifications.append(last)
        answers = harness.collect()
        assert {rid: a.output_ids for rid, a in answers.items()} == expected
    assert verifications[0] == verifications[1]
    assert sum(verifications[0].values()) < 19 * len(expected)
    worker = harnesses[1].scheduler.worker
    for runner in (worker.model_runner, worker.draft_worker.draft_runner):
        graphs = runner.prefill_graph_runner
        assert graphs.num_replays > 0 and not graphs.fallbacks


@pytest.mark.skipif(ON_GPU, reason="another batch rounds otherwise on a GPU")
@pytest.mark.parametrize(
    ("algorithm", "architecture"),
    [
        ("EAGLE", "LlamaForCausalLM"),
        ("EAGLE3", "LlamaForCausalLM"),
        ("NEXTN", "Qwen3NextForCausalLM"),
        ("NEXTN", "DeepseekV3ForCausalLM"),
    ],
)
def test_trained_kinds_of_heads_replay_to_the_bit(tmp_path, algorithm, architecture):
    target = head = write_text_model(tmp_path / "target", architecture)
    if algorithm == "NEXTN":
        add_head(target, architecture)
    else:
        head = write_tiny_eagle(tmp_path / "head", target, algorithm=algorithm)
    found = []
    for replays in (False, True):
        harness = speculating_engine(target, head, algorithm, replays=replays)
        rng = random.Random(6)
        for length in (1, 5, 64, 100):
            prompt = [rng.randrange(VOCAB) for _ in range(length)]
            harness.submit(prompt, max_new_tokens=20, ignore_eos=True)
        answers = harness.run()
        found.append({rid: a.output_ids for rid, a in answers.items()})
    draft = harness.scheduler.worker.draft_worker.draft_runner
    assert draft.prefill_graph_runner.num_replays > 0
    assert not draft.prefill_graph_runner.fallbacks
    assert found[0] == found[1]


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
        **dict.fromkeys(FALLBACK_REASONS, 0),
        "hidden_mode": 1,
        "input_logprobs": 1,
        "input_embeds": 1,
    }


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
